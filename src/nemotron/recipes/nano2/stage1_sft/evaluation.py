#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Held-out tasks: how many the model answers right, with reasoning and without."
# name = "nano2/sft"
# setup = "nemotron-cookbook[train]"
# run.launch = "direct"
# config = {dir = "./config/evaluation", default = "tiny", schema = "evaluation.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 1, step 3 of 3: what the model can do.

    python data_curation.py --scale tiny | python training.py | python evaluation.py
    python evaluation.py < checkpoint.json

Held-out tasks of every family, of the generators' split `eval`, which nothing is trained on. Each is answered greedily
and `samples` times at temperature 1: once with reasoning on (the prompt ends with `<think>`, as a user's `/think` makes
it), once with it off (`<think></think>`, as `/no_think` does). Answers are verified, not judged; tasks with tools take
several turns.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from nemo_runspec.errors import UserError
from nemotron.kit import Checkpoint, Results, Scale, Seed, UserPath, apply_scale
from nemotron.kit.dataclass_script import output_folder, run_step, step
from nemotron.kit.schemas.evaluation import EvaluationConfig
from nemotron.stack.evaluation.model import score_tasks
from nemotron.stack.models import NemotronH
from nemotron.stack.training.lanes import Lanes

FAMILIES = ["math", "multiple_choice", "instruction_following", "structured_output", "workplace_assistant"]
MODES = {"reasoning_on": True, "reasoning_off": False}


@dataclass
class Config:
    """What to evaluate."""

    checkpoint_path: UserPath | None = None  # default: what the script before in the pipe made
    scale: Scale = "tiny"  # of num_tasks
    num_tasks: Annotated[int, Field(ge=1)] = 6_400  # of each family, at full scale
    samples: Annotated[int, Field(ge=0)] = 2  # beside the greedy answer
    threads: Annotated[int, Field(ge=1, le=2)] = 2  # 1: one mode after the other, with the same result
    seed: Seed = 0  # of every random choice
    output_dir: Path | None = None  # also leave results.json there


@step
def main(config: Config) -> Results:
    """Ask, verify, count."""
    checkpoint = Checkpoint.load(path=config.checkpoint_path, key="model")
    metrics = score(checkpoint, config)
    with output_folder(config.output_dir) as folder:
        results = Results(path=folder, metrics=metrics)
        return results.save()


def score(checkpoint: Checkpoint, config: Config) -> dict[str, Any]:
    """pass@1 of a model on the held-out tasks, with reasoning and without: greedy, and beside it the samples' mean.

    The best constant answer, which needs no model, is there to compare with (`score_tasks`).
    """
    if checkpoint.template is None:
        raise UserError(f"{checkpoint.ref} is a base model: it has no chat template", "training.py makes one of it")
    model = NemotronH.from_pretrained(checkpoint.checkpoint_path or checkpoint.path).eval()
    settings = EvaluationConfig(
        families=FAMILIES,
        tasks_per_family=apply_scale(config.num_tasks, config.scale),
        samples=config.samples,
        max_new_tokens=64,  # of a turn, whose rest is cut off
        max_turns=4,
        seed=config.seed,
    )
    tokenizer_dir, template = checkpoint.tokenizer_path or checkpoint.path, checkpoint.template
    lanes = Lanes(config.threads)

    def in_mode(name: str) -> dict[str, Any]:
        return score_tasks(
            model, tokenizer_dir, settings, template=template, thinking=MODES[name], poll=lanes.poll, label=name
        )

    return dict(zip(MODES, lanes.map(in_mode, MODES), strict=True))


if __name__ == "__main__":
    run_step(main, Config)
