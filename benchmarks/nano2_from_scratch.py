#!/usr/bin/env python
"""Is a small model of a large one better than a small model of its own? Distillation against training from scratch.

    python -m nemotron.recipes.nano2 --scale tiny        # first: publishes the compressed model
    python benchmarks/nano2_from_scratch.py

Takes the latest nano2-compressed-model of the current output root. A seed gives both sides the same rows in the same
order, in the same loop and for as many steps: the pruned weights with forward KL from the large model, and random
weights of the same shape with cross entropy on the labels of those rows, at a learning rate of their own. Both are then
asked the same held-out tasks, with reasoning on and off. The interval of the mean difference over seeds is Student's.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import deque
from dataclasses import replace

import torch
from models import machine

from nemotron.kit import Checkpoint, Dataset
from nemotron.kit.schemas.evaluation import EvaluationConfig
from nemotron.recipes.nano2.stage1_sft.evaluation import FAMILIES
from nemotron.recipes.nano2.stage3_compress import training_distil
from nemotron.recipes.nano2.stage3_compress.evaluation import ask, mean_score
from nemotron.stack.evaluation.model import held_out_tasks
from nemotron.stack.models import NemotronH
from nemotron.stack.training.lanes import Lanes
from nemotron.stack.training.loaders import PackedLoader

# 97.5 % quantile of Student's t with n - 1 degrees of freedom, by the number of seeds n.
T_QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def main() -> None:
    """Print the scores of every seed, then the mean difference with its interval."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, choices=T_QUANTILE)
    parser.add_argument("--tasks", type=int, default=64, help="held-out tasks of each family")
    parser.add_argument("--scratch-lr", type=float, default=4e-3, help="of random weights; the default is stage 1's")
    parser.add_argument("--threads", type=int, default=2, choices=(1, 2))
    args = parser.parse_args()
    print(machine())
    lanes = Lanes(args.threads)
    small = Checkpoint.load("nano2-compressed-model")
    pruned = Checkpoint.input_of(small)
    large = Checkpoint.input_of(pruned)
    rows = Dataset.load(path=small.dataset_path).path / "train.parquet"
    teacher = NemotronH.from_pretrained(large.path).eval()
    settings = EvaluationConfig(families=FAMILIES, tasks_per_family=args.tasks, samples=0, max_turns=4, seed=0)
    tasks = held_out_tasks(args.tasks, settings)
    print(f"{large.ref}: score {mean_score(ask(teacher, large, tasks, settings, lanes)):.3f}", flush=True)

    differences = list[float]()
    for seed in range(args.seeds):
        distilled = NemotronH.from_pretrained(pruned.path)
        torch.manual_seed(seed)
        scratch = NemotronH(distilled.config)
        config = training_distil.Config(seed=seed, threads=args.threads)
        scores = []
        for student, guide, of_side in (
            (distilled, teacher, config),
            (scratch, None, replace(config, lr=args.scratch_lr)),
        ):
            loop = training_distil.distil(student, guide, PackedLoader(rows, None, seed), of_side, small.num_steps)
            deque(loop, maxlen=0)
            scores.append(mean_score(ask(student.eval(), small, tasks, settings, lanes)))
        differences.append(scores[0] - scores[1])
        print(f"seed {seed}: distilled {scores[0]:.3f}, from scratch {scores[1]:.3f}", flush=True)
    mean, deviation = statistics.mean(differences), statistics.stdev(differences)
    half = T_QUANTILE[args.seeds] * deviation / math.sqrt(args.seeds)
    print(f"difference {mean:+.3f}, 95 % interval {mean - half:+.3f} to {mean + half:+.3f} ({args.seeds} seeds)")


if __name__ == "__main__":
    main()
