#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Prune the large model by importance, to the best of the shapes that fit a budget of memory."
# name = "nano2/pruned"
# setup = "nemotron-cookbook[train]"
# run.launch = "direct"
# config = {dir = "./config/training_prune", default = "tiny", schema = "training_prune.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 3, step 2 of 3, first half: which parts of the large model stay.

    python data_curation.py | python training_prune.py | python training_distil.py > checkpoint.json
    python training_prune.py --dataset-path DIR --teacher-path MODEL --memory-share 0.7

Units are scored by their activations on the calibration rows, blocks by what the logits lose without them. Of shapes
that fit the budget the best are distilled for a moment, and the best of those is published as it was pruned.

Simplified against the paper (arXiv 2508.14444, section on compression): depth and width are cut in one go, and a
candidate is judged by its KL from the large model on held-out rows, not by benchmarks.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from nemo_runspec.errors import UserError
from nemotron.kit import Checkpoint, Dataset, Model, Scale, Seed, UserPath
from nemotron.kit.dataclass_script import output_folder, run_step, step
from nemotron.kit.model_folder import copy_tokenizer
from nemotron.recipes.nano2.stage3_compress import training_distil
from nemotron.stack.compression import importance, search
from nemotron.stack.compression.distillation import measure_recovery
from nemotron.stack.compression.pruning import prune
from nemotron.stack.models import NemotronH
from nemotron.stack.training.loaders import PackedLoader

say = partial(print, file=sys.stderr)


@dataclass
class Config:
    """How small, and how the shape is chosen."""

    dataset_path: UserPath | None = None  # default: what the script before in the pipe made
    teacher_path: UserPath | None = None  # default: the model with whose tokenizer the data was made
    scale: Scale | None = None  # one smaller than that of the data takes its share of the calibration
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.75  # of the bytes: 19.66 GiB of 26.07 at 131,072 tokens
    memory_tokens: Annotated[int, Field(ge=1)] = 1024  # where caches take about a tenth of the bytes, as there
    parameter_share: Annotated[float, Field(gt=0, le=1)] = 0.72  # candidates are near to it: 8.89 B of 12.31 B
    removed_blocks: Annotated[int, Field(ge=0)] = 1  # at most, and no more than a fifth of all; 6 of 62
    depth_rows: Annotated[int, Field(ge=1)] = 8  # of the calibration rows: every block is left out of each
    candidates: Annotated[int, Field(ge=1)] = 10  # that are pruned
    trials: Annotated[int, Field(ge=1)] = 3  # of them that are distilled
    trial_steps: Annotated[int, Field(ge=1)] = 15  # the paper's are 19 B tokens
    threads: Annotated[int, Field(ge=1, le=2)] = 2  # of the trials; 1: the halves of a batch one after another
    seed: Seed = 1234  # of every random choice
    output_dir: Path | None = None  # also leave the model there


@step
def main(config: Config) -> Checkpoint:
    """Measure importances, search shapes, try the best, save the one that stays."""
    dataset = Dataset.load(path=config.dataset_path, key="data")
    if (teacher_path := config.teacher_path or dataset.tokenizer_path) is None:
        raise UserError(f"{dataset.path} does not say which model it is for", "name it: --teacher-path")
    large = Checkpoint.load(path=teacher_path)
    torch.set_num_threads(1)  # of an operation, as in the trials
    teacher = NemotronH.from_pretrained(large.checkpoint_path or large.path).eval()
    full, num_parameters = teacher.config, teacher.num_parameters()[0]
    # --- Importance of widths and of depth, on the calibration rows
    calibration, valid, train = (
        PackedLoader(dataset.path / f"{name}.parquet", None, config.seed) for name in ("calibration", "valid", "train")
    )
    batches = [batch.input_ids_BL for batch in calibration.all_batches(8)]
    batches = batches[: dataset.at_scale(len(batches), config.scale)]
    units = importance.measure_importance(teacher, batches)
    few = torch.cat(batches)[: config.depth_rows].split(8)
    errors, cosines = importance.removal_errors(teacher, few), importance.cosine_distances(teacher, few)
    correlation = importance.spearman([*errors.values()], [*cosines.values()])
    removed = [r.block for r in importance.remove_iteratively(teacher, few, config.removed_blocks, {"*": 1}, errors)]
    for i, symbol in enumerate(full.hybrid_override_pattern):
        say(f"block {i} {symbol}: logits without it off by {errors[i]:.3g} (squared), sum of 1 - cos {cosines[i]:.3g}")
    say(f"rank correlation of the two {correlation:.2f}; goes by the first: {removed or 'none'}")

    # --- Shapes that fit: all as they are pruned, then the best of them after a moment of distillation
    num_bytes = search.inference_bytes(full, config.memory_tokens)
    budget = search.Budget(int(config.memory_share * num_bytes), config.memory_tokens)
    target, shapes = round(config.parameter_share * num_parameters), search.sixteenths(full, removed)
    found = search.find_candidates(full, shapes, budget, target, config.candidates)

    def score(candidate: search.Candidate, steps: int) -> float:
        student = prune(teacher, units, candidate.target)
        train.load_state_dict({"drawn": 0, "num_rows": train.num_rows})  # the same rows for each of them
        list(training_distil.distil(student, teacher, train, training_distil.Config(threads=config.threads), steps))
        kl = measure_recovery(student, teacher, valid.all_batches(8)).kl
        say(f"{shape(candidate)}: {kl:.3f} nats of KL after {steps} steps")
        return -kl

    as_pruned = search.rank_candidates(found, partial(score, steps=0))
    tried = search.rank_candidates([c for c, _ in as_pruned[: config.trials]], partial(score, steps=config.trial_steps))
    best = tried[0][0]
    say(f"{shape(best)}: {best.num_parameters / num_parameters:.0%} of {num_parameters:,} parameters")

    # --- Save: weights, tokenizer and template, with the model and the data that they come from
    with output_folder(config.output_dir) as folder:
        prune(teacher, units, best.target).save_pretrained(folder)
        copy_tokenizer(large.tokenizer_path or large.path, folder)
        checkpoint = Model(
            path=folder,
            num_steps=0,
            checkpoint_path=folder,
            dataset_path=dataset.path,
            tokenizer_path=folder,
            chat_template=large.chat_template,
            reasoning=large.reasoning,
            num_parameters=best.num_parameters,
            metrics={
                "removal_errors": [*errors.values()],
                "cosine_distances": [*cosines.values()],
                "rank_correlation": correlation,
                "blocks": list(best.target.blocks),
                "bytes": {"full": num_bytes, "budget": budget.num_bytes, "pruned": best.num_bytes},
                "kl_as_pruned": {shape(c): -negative for c, negative in as_pruned},
                "kl_after_trial": {shape(c): -negative for c, negative in tried},
            },
        )
        return checkpoint.save()


def shape(candidate: search.Candidate) -> str:
    c = candidate.config
    return f"{c.hybrid_override_pattern} hidden {c.hidden_size} MLP {c.intermediate_size} Mamba {c.mamba_num_heads}"


if __name__ == "__main__":
    run_step(main, Config)
