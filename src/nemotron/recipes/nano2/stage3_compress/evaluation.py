#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "The large and the small model on the same held-out tasks, and how the small one recovered."
# name = "nano2/compressed"
# setup = "nemotron-cookbook[train]"
# run.launch = "direct"
# config = {dir = "./config/evaluation", default = "tiny", schema = "evaluation.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 3, step 3 of 3: what the small model kept.

    python data_curation.py --scale tiny | python training.py | python evaluation.py
    python evaluation.py < checkpoint.json

The only input is the checkpoint: it knows the pruned model that it was, and that one the large model. Both answer the
same held-out tasks, greedily, with reasoning on and off. The score is the mean over families and the two modes.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from nemotron.kit import Checkpoint, Results, Scale, Seed, UserPath, apply_scale
from nemotron.kit.dataclass_script import output_folder, run_step, step
from nemotron.kit.schemas.evaluation import EvaluationConfig
from nemotron.recipes.nano2.stage1_sft.evaluation import FAMILIES, MODES
from nemotron.stack.compression.search import inference_bytes
from nemotron.stack.environments import Task
from nemotron.stack.evaluation.comparison import compare
from nemotron.stack.evaluation.model import evaluate_model, held_out_tasks
from nemotron.stack.evaluation.scoring import Evaluation
from nemotron.stack.models import NemotronH
from nemotron.stack.training.lanes import Lanes

# Tokens distilled -> share of the larger model's score, 66.1, that the pruned one had: 9B -> 7B of the Minitron recipe.
PUBLISHED = {"2.5 B": 59.8 / 66.1, "80 B": 65.1 / 66.1}


@dataclass
class Config:
    """What to evaluate."""

    checkpoint_path: UserPath | None = None  # default: what the script before in the pipe made
    scale: Scale = "tiny"  # of num_tasks
    num_tasks: Annotated[int, Field(ge=1)] = 6_400  # of each family, at full scale
    memory_tokens: Annotated[int, Field(ge=1)] = 1024  # at which memory is compared
    threads: Annotated[int, Field(ge=1, le=2)] = 2  # 1: one mode after the other, with the same result
    seed: Seed = 0  # of every random choice
    output_dir: Path | None = None  # also leave results.json there


@step
def main(config: Config) -> Results:
    """Ask both models, verify, compare."""
    small = Checkpoint.load(path=config.checkpoint_path, key="model")
    pruned = Checkpoint.input_of(small)
    large = Checkpoint.input_of(pruned)
    num_tasks = apply_scale(config.num_tasks, config.scale)
    settings = EvaluationConfig(families=FAMILIES, tasks_per_family=num_tasks, samples=0, max_turns=4, seed=config.seed)
    tasks = held_out_tasks(num_tasks, settings)
    metrics, answers = dict[str, Any](), dict[str, dict[str, Evaluation]]()
    for name, checkpoint in (("large", large), ("small", small)):
        print(f"{name}: {checkpoint.ref}", file=sys.stderr)
        model = NemotronH.from_pretrained(checkpoint.checkpoint_path or checkpoint.path).eval()
        answers[name] = ask(model, checkpoint, tasks, settings, Lanes(config.threads))
        metrics[name] = {
            "parameters": model.num_parameters()[0],
            "bytes": inference_bytes(model.config, config.memory_tokens),
            "score": mean_score(answers[name]),
            "modes": {mode: evaluation.metrics() for mode, evaluation in answers[name].items()},
        }
    kept = {key: metrics["small"][key] / (metrics["large"][key] or 1) for key in ("parameters", "bytes", "score")}
    metrics |= {"kept": kept, "recovery": small.metrics.get("recovery"), "published": PUBLISHED}
    metrics["small_minus_large"] = {
        mode: compare(answers["large"][mode], answers["small"][mode], "greedy").metrics() for mode in MODES
    }
    show(metrics)
    with output_folder(config.output_dir) as folder:
        results = Results(path=folder, metrics=metrics)
        return results.save()


def ask(
    model: NemotronH, checkpoint: Checkpoint, tasks: list[Task], settings: EvaluationConfig, lanes: Lanes
) -> dict[str, Evaluation]:
    """What a model answers, with reasoning on and off."""
    tokenizer_dir, template = checkpoint.tokenizer_path or checkpoint.path, checkpoint.template

    def in_mode(name: str) -> Evaluation:
        return evaluate_model(
            model, tokenizer_dir, tasks, settings, template=template, thinking=MODES[name], poll=lanes.poll,
            show_progress=True, label=name,
        )  # fmt: skip

    return dict(zip(MODES, lanes.map(in_mode, MODES), strict=True))


def mean_score(answers: dict[str, Evaluation]) -> float:
    """Greedy pass@1, mean over families and modes."""
    return sum(evaluation.mean("greedy").estimate for evaluation in answers.values()) / len(answers)


def show(metrics: dict[str, Any]) -> None:
    """The comparison and the recovery, as tables on stderr."""
    lines = [f"{'':36} {'large':>9} {'small':>9}"]
    for key in ("parameters", "bytes"):
        lines.append(f"{key:36} {metrics['large'][key]:9,} {metrics['small'][key]:9,}  {metrics['kept'][key]:.0%}")
    for mode in MODES:
        entries = [metrics[name]["modes"][mode]["families"] for name in ("large", "small")]
        for family in entries[0]:
            first, second = (entry[family]["greedy"] for entry in entries)
            lines.append(f"{mode + ' ' + family:36} {first:9.3f} {second:9.3f}")
    scores = [metrics[name]["score"] for name in ("large", "small")]
    lines.append(f"{'score':36} {scores[0]:9.3f} {scores[1]:9.3f}  {metrics['kept']['score']:.0%}")
    lines.append("recovery: tokens distilled, KL in nats a token, share of the large model's next-token accuracy")
    for at in metrics["recovery"] or []:
        lines.append(f"{at['tokens']:12,} {at['kl']:9.3f} {at['accuracy'] / (at['teacher_accuracy'] or 1):9.1%}")
    lines.append(
        "published, of benchmark scores (9B -> 7B): " + ", ".join(f"{t} {s:.1%}" for t, s in PUBLISHED.items())
    )
    print("\n".join(lines), file=sys.stderr)


if __name__ == "__main__":
    run_step(main, Config)
