#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Prompts for the three algorithms of RL: instructions, tools, contexts for preferences."
# name = "nano2/rl"
# setup = "nemotron-cookbook"
# run.launch = "direct"
# config = {dir = "./config/data_curation", default = "tiny", schema = "data_curation.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 2, step 1 of 3: prompts, and what it takes to verify an answer.

    python data_curation.py --scale tiny | python training.py | python evaluation.py
    python data_curation.py --base-path MODEL > dataset.json

One file for each algorithm (arXiv 2508.14444, section 3.2), a prompt a line: `instructions.jsonl` for IFEval-RL, words
to write under constraints that a program checks; `tools.jsonl` for DPO, requests that take calls of tools over several
turns; `preferences.jsonl` for the reward model and `contexts.jsonl` for RLHF, of four families. `thinking` says whether
the model is to reason: in half of the prompts, and in all with tools. `held_out.jsonl` has contexts for evaluation.

SFT drew its tasks, those of its held-out loss too, from the generators' split `train`; these are of `valid`, and the
held-out ones of `eval`. The split of a task follows from a hash of what is asked, so that no prompt of SFT occurs here,
whatever the seeds.

Simplified against the paper: generated tasks in place of LMSYS prompts, WorkBench and HelpSteer3.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from nemo_runspec.errors import UserError
from nemotron.data_prep.sources.documents import stable_hash
from nemotron.kit import Checkpoint, Dataset, RLPrompts, Scale, Seed, Source, UserPath, apply_scale
from nemotron.kit.dataclass_script import output_folder, run_step, step
from nemotron.kit.jsonl import write_jsonl
from nemotron.stack.environments import Split, Task, generate_tasks, prompt_messages, prompt_tools

INSTRUCTIONS, TOOLS = ("instruction_following",), ("workplace_assistant",)
CONTEXTS = ("math", "multiple_choice", "instruction_following", "structured_output")  # one response each


@dataclass
class Config:
    """How many prompts."""

    base_path: UserPath | None = None  # the model that will be trained; default: nano2-sft-model, its latest version
    scale: Scale = "tiny"  # 1, 10, 30 or 100 % of the prompts
    num_instructions: Annotated[int, Field(ge=100)] = 32_000  # at full scale; the paper's are 16,000
    num_tools: Annotated[int, Field(ge=100)] = 19_200  # requests that take calls of tools
    num_preferences: Annotated[int, Field(ge=100)] = 32_000  # contexts to learn the reward on
    num_contexts: Annotated[int, Field(ge=100)] = 32_000  # contexts of RLHF
    num_held_out: Annotated[int, Field(ge=100)] = 6_400  # contexts
    seed: Seed = 1234  # of every random choice
    output_dir: Path | None = None  # also leave the files there


@step
def main(config: Config) -> Dataset:
    """Draw the tasks, write them."""
    base = Checkpoint.load(path=config.base_path) if config.base_path else Checkpoint.load("nano2-sft-model")
    if base.template is None:
        raise UserError(f"{base.ref} is a base model: it has no chat template", "RL goes on from SFT")
    with output_folder(config.output_dir) as folder:
        counts = {
            "instructions": write_prompts(folder, config, "instructions", INSTRUCTIONS, config.num_instructions),
            "tools": write_prompts(folder, config, "tools", TOOLS, config.num_tools),
            "preferences": write_prompts(folder, config, "preferences", CONTEXTS, config.num_preferences),
            "contexts": write_prompts(folder, config, "contexts", CONTEXTS, config.num_contexts),
            "held_out": write_prompts(folder, config, "held_out", CONTEXTS, config.num_held_out),
        }
        print(", ".join(f"{count:,} {name}" for name, count in counts.items()), file=sys.stderr)
        dataset = RLPrompts(
            path=folder,
            num_examples=sum(counts.values()) - counts["held_out"],
            train_path=folder,
            test_path=folder / "held_out.jsonl",
            tokenizer_path=base.path,
            families=sorted({*INSTRUCTIONS, *TOOLS, *CONTEXTS}),
            metrics={"scale": config.scale, "prompts": counts},
            sources=[Source(name="task-generators", detail=f"splits valid and eval; seed {config.seed}")],
        )
        return dataset.save()


def write_prompts(folder: Path, config: Config, name: str, families: Sequence[str], count: int) -> int:
    """`count` prompts at full scale, of the families in equal parts, in an order that the seed decides."""
    per_family = max(1, apply_scale(count, config.scale) // len(families))
    split: Split = "eval" if name == "held_out" else "valid"
    seed = stable_hash(name, str(config.seed)) % 2**31
    tasks = [task for family in families for task in generate_tasks(family, split, per_family, seed)]
    tasks.sort(key=lambda task: stable_hash(name, str(config.seed), task.canonical))
    write_jsonl(folder / f"{name}.jsonl", (record(task, i % 2 == 0 or name == "tools") for i, task in enumerate(tasks)))
    return len(tasks)


def record(task: Task, thinking: bool) -> dict[str, Any]:
    """A line: the conversation up to where the model answers, for readers; `thinking` and `task`, for the trainings.

    The task holds the prompt again, and what an answer to it is verified against.
    """
    tools = {"tools": declared} if (declared := prompt_tools(task)) else {}
    return {"messages": prompt_messages(task), **tools, "thinking": thinking, "task": task.to_dict()}


if __name__ == "__main__":
    run_step(main, Config)
