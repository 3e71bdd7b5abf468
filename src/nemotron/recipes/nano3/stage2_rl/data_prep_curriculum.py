# /// script
# [tool.runspec]
# docs = "Pass rates of a model on RL prompts, which a curriculum goes by"
# name = "nano3/data/prep/rl/curriculum"
# setup = "nemotron-cookbook[train]"
#
# [tool.runspec.run]
# launch = "direct"
#
# [tool.runspec.config]
# dir = "./config/data_prep"
# schema = "curriculum_schema.py:CurriculumDataConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 1
# ///
"""Nemotron 3 Nano, stage 2: a model answers the prompts of RL, 8 times each -> the same prompts with their pass rates.

    nemotron nano3 data prep rl -c curriculum
    python data_prep_curriculum.py --config curriculum num_prompts=50

`pass_rate` of a record is the mean score of the rollouts that have a verdict; a prompt of which none has one is left
out. Validation prompts stay as they are. The record of the artifact names the model, by version and digest. `rlvr.py`
draws by these rates with `data.curriculum` (`nemotron nano3 rl rlvr -c curriculum`); where a trained model has left
them behind, measure its own: `run.model` names any.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds, or fails: Ctrl-C and a missing torch are one line
    from nemo_runspec.script import begin_script

    begin_script()

import json
import math
import shutil
import sys
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError
from nemo_runspec.words import counted
from nemotron.kit import Checkpoint, RLPrompts, apply_scale, open_run, print_complete
from nemotron.kit.commands import run_data_script
from nemotron.kit.jsonl import write_jsonl
from nemotron.kit.schemas.difficulty import FAMILIES
from nemotron.kit.schemas.environments import QUESTIONS
from nemotron.kit.schemas.evaluation import ResponsesConfig
from nemotron.kit.tables import aligned
from nemotron.stack.environments import Task, load_environments, verifiable_families
from nemotron.stack.evaluation.model import evaluate_model
from nemotron.stack.models import NemotronH
from nemotron.stack.rl.curriculum import LEVELS
from nemotron.stack.rl.prompts import read_prompts

if TYPE_CHECKING:
    from nemotron.recipes.nano3.stage2_rl.curriculum_schema import CurriculumDataConfig


def main() -> None:
    """Measure and publish."""
    cfg: CurriculumDataConfig = load_script_config(__file__)
    prompts, artifact = RLPrompts.load(cfg.run.data), Checkpoint.load(cfg.run.model)
    if artifact.template is None:
        raise UserError(f"{artifact.ref} has no chat template", "RL starts from a model after SFT")
    if prompts.train_path is None:
        raise UserError(f"{prompts.ref} has no training prompts")
    environments = load_environments(cfg.environments)
    families = sorted(read_prompts(prompts.train_path, environments))
    for family in families:
        if family not in (*FAMILIES, *environments) and not family.startswith(QUESTIONS):
            raise UserError(
                f"{prompts.ref} has prompts of '{family}', which is neither a family nor one of `environments`",
                f"where it is yours: 'environments={{{family}: FILE.py:NAME}}'",
            )
    families = verifiable_families(families, cfg.sandbox)
    records = [record for record in read_records(cfg, prompts) if record["task"]["family"] in families]
    tasks = [Task.from_dict(record["task"]) for record in records]
    tasks = [replace(task, environment=environments.get(task.family)) for task in tasks]

    with open_run(cfg, script=__file__) as run:
        shutil.rmtree(run.output_dir, ignore_errors=True)  # whatever a killed run left there
        run.output_dir.mkdir(parents=True)
        with run.phase("sample"):
            model = NemotronH.from_pretrained(artifact.path, device="cuda" if torch.cuda.is_available() else "cpu")
            settings = ResponsesConfig(
                samples=cfg.generation.num_generations_per_prompt, max_new_tokens=cfg.generation.max_new_tokens,
                max_turns=cfg.generation.max_turns, batch_size=cfg.generation.batch_size, seed=cfg.seed,
                max_error_rate=cfg.max_error_rate, sandbox=cfg.sandbox,
            )  # fmt: skip
            evaluation = evaluate_model(
                model, artifact.path, tasks, settings, template=artifact.template, thinking=cfg.enable_thinking,
                with_greedy=False, show_progress=True,
            )  # fmt: skip
        rated = [
            {**record, "pass_rate": rate}
            for record, rate in zip(records, evaluation.sampled_means().tolist(), strict=True)
            if not math.isnan(rate)
        ]
        histogram = count_levels(rated)
        print(format_histogram(histogram), file=sys.stderr)

        write_jsonl(run.output_dir / "train.jsonl", rated)
        if prompts.valid_path is not None:
            shutil.copyfile(prompts.valid_path, run.output_dir / "valid.jsonl")
        dataset = RLPrompts(
            path=run.output_dir,
            num_examples=len(rated),
            train_path=run.output_dir / "train.jsonl",
            valid_path=run.output_dir / "valid.jsonl" if prompts.valid_path is not None else None,
            families=families,
            metrics={
                "pass_rates_of": artifact.ref,
                "rollouts_per_prompt": cfg.generation.num_generations_per_prompt,
                "prompts_by_pass_rate": histogram,
            },
            sources=prompts.sources,
        )
        dataset.save(move=True)
        print(f"{dataset.ref}: {counted(len(rated), 'prompt')} with the pass rates of {artifact.ref}", file=sys.stderr)
        print_complete({"data": dataset})


def read_records(cfg: CurriculumDataConfig, prompts: RLPrompts) -> list[dict[str, Any]]:
    """The training prompts that are measured: of each family the first `num_prompts`, and the share of `--scale`."""
    assert prompts.train_path is not None
    with prompts.train_path.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    sizes = Counter(record["task"]["family"] for record in records)
    left = {f: min(apply_scale(size, cfg.scale_all or "full"), cfg.num_prompts or size) for f, size in sizes.items()}
    chosen = []
    for record in records:
        family = record["task"]["family"]
        if left[family]:
            left[family] -= 1
            chosen.append(record)
    return chosen


def count_levels(records: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Family -> how many of its prompts have a pass rate of 0, 1/8, ..., 1."""
    counts: dict[str, list[int]] = {}
    for record in records:
        counts.setdefault(record["task"]["family"], [0] * (LEVELS + 1))[round(record["pass_rate"] * LEVELS)] += 1
    return counts


def format_histogram(counts: dict[str, list[int]]) -> str:
    """The counts as a table, a line a family."""
    head = ["prompts by pass rate", *(f"{level / LEVELS:g}" for level in range(LEVELS + 1))]
    rows = [[family, *map(str, row)] for family, row in sorted(counts.items())]
    return "\n".join(aligned([head, *rows], "<" + ">" * (LEVELS + 1)))


if __name__ == "__main__":
    run_data_script(main)
