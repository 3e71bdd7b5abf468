#!/usr/bin/env python
"""Does reinforcement learning on small repositories help with held-out ones? The model after it beside the one before.

    nemotron super3 pipe -c tiny                   # first: publishes the models
    python benchmarks/repair_gain.py super3-rl-model-tiny-swe1 super3-rl-model-tiny-swe2

Takes two models of the current output root, and asks both the same repositories of the evaluation split, whose
functions are in no training data of code_generation, repository_repair and tool_comparison. The interval of the
difference is a paired bootstrap over repositories.
"""

from __future__ import annotations

import argparse
from typing import Literal

from models import machine

from nemotron.kit import Checkpoint
from nemotron.kit.schemas.evaluation import EvaluationConfig
from nemotron.stack.environments import generate_tasks
from nemotron.stack.evaluation.comparison import compare
from nemotron.stack.evaluation.model import evaluate_model
from nemotron.stack.evaluation.scoring import Evaluation
from nemotron.stack.models import NemotronH


def main() -> None:
    """Print pass@1 of both models, greedy and sampled, and the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--family", default="repository_repair")
    parser.add_argument("--tasks", type=int, default=300)
    parser.add_argument("--samples", type=int, default=4)
    args = parser.parse_args()
    print(machine())
    tasks = generate_tasks(args.family, "eval", args.tasks)
    settings = EvaluationConfig(
        families=[args.family], samples=args.samples, max_new_tokens=112, max_turns=6, tasks_per_family=args.tasks
    )
    evaluations: list[Evaluation] = []
    for name in (args.before, args.after):
        checkpoint = Checkpoint.load(name)
        model = NemotronH.from_pretrained(checkpoint.path).eval()
        evaluation = evaluate_model(model, checkpoint.path, tasks, settings, template=checkpoint.template)
        greedy, sampled = evaluation.greedy(args.family), evaluation.sampled(args.family)
        for which, score in (("greedy", greedy), ("sampled", sampled)):
            print(f"{checkpoint.ref} {which}: {score.estimate:.3f} [{score.low:.3f}, {score.high:.3f}]", flush=True)
        evaluations.append(evaluation)
    either: tuple[Literal["greedy", "sampled"], ...] = ("greedy", "sampled")
    for which in either:
        difference = compare(evaluations[0], evaluations[1], which).mean
        print(f"{which}: {difference.estimate:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]")


if __name__ == "__main__":
    main()
