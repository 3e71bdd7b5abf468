#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Held-out tasks, and preferences: the model after RL beside the one that RL began with."
# name = "nano2/rl"
# setup = "nemotron-cookbook[train]"
# run.launch = "direct"
# config = {dir = "./config/evaluation", default = "tiny", schema = "evaluation.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 2, step 3 of 3: what RL has changed.

    python data_curation.py --scale tiny | python training.py | python evaluation.py
    python evaluation.py --checkpoint-path MODEL                   # also that of any training of this stage

Both models come from the checkpoint: it knows its prompts, and those know the model that they were made for.

`tasks`: pass@1 on held-out tasks of every family, verified, as in stage 1. `preferences`: one sampled answer of each
model to every held-out context, side by side: how often the new model's is better by the rule that the reward model
learned (right, then brief; a tie is half a win), how often by the reward model, and how long either's are.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_runspec.errors import UserError
from nemotron.kit import Checkpoint, Dataset, Results
from nemotron.kit.dataclass_script import output_folder, run_step, step
from nemotron.recipes.nano2.stage1_sft import evaluation as stage1
from nemotron.recipes.nano2.stage2_rl.judging import RewardModel, better_first, rewards_of
from nemotron.recipes.nano2.stage2_rl.sampling import Policy, Prompt, batches, load_policy, read_prompts, sample
from nemotron.stack.rl.rollouts import Rollout


@dataclass
class Config(stage1.Config):
    """What to evaluate: the knobs of stage 1."""


@step
def main(config: Config) -> Results:
    """Ask both, verify, compare."""
    checkpoint = Checkpoint.load(path=config.checkpoint_path, key="model")
    if checkpoint.dataset_path is None:
        raise UserError(f"{checkpoint.ref} does not say what it was trained on", "training.py of this folder makes one")
    dataset = Dataset.load(path=checkpoint.dataset_path)
    if dataset.tokenizer_path is None:
        raise UserError(
            f"{dataset.path} does not say which model RL began with",
            "data_curation.py of this folder makes some that does",
        )
    initial = Checkpoint.load(path=dataset.tokenizer_path)
    tasks = {}
    for name, which in (("before", initial), ("after", checkpoint)):
        print(f"{name}: {which.ref}", file=sys.stderr)
        tasks[name] = stage1.score(which, config)
    for mode, before in tasks["before"].items():
        for family, entry in before["tasks"]["families"].items():
            after = tasks["after"][mode]["tasks"]["families"][family]
            shown = ", ".join(
                f"{how} {entry[how]:.3f} -> {after[how]:.3f}" for how in ("greedy", "sampled") if how in entry
            )
            print(f"{mode} {family}: {shown}", file=sys.stderr)
    with output_folder(config.output_dir) as folder:
        metrics = {
            "tasks": tasks,
            "preferences": compare(checkpoint, initial, read_prompts(dataset, "held_out"), config),
        }
        return Results(path=folder, metrics=metrics).save()


def compare(checkpoint: Checkpoint, initial: Checkpoint, prompts: Sequence[Prompt], config: Config) -> dict[str, Any]:
    """An answer of each model to each prompt: who wins, and how long they are, in tokens."""
    before, after = load_policy(initial, config.threads), load_policy(checkpoint, config.threads)
    old, new = (answers_of(policy, prompts, config.seed) for policy in (before, after))
    both = [list(pair) for pair in zip(new, old, strict=True)]
    better = [better_first(pair, after) for pair in both]
    wins = [0.5 if not first else float(first[0] == (0, 1)) for first in better]
    results = {"prompts": len(wins), "win_rate": sum(wins) / len(wins)}
    for name, answers in (("before", old), ("after", new)):
        results[f"tokens_{name}"] = sum(len(answer.completion_ids) for answer in answers) / len(answers)
    if RewardModel.role() in checkpoint.inputs:
        with torch.no_grad():
            judge = RewardModel.input_of(checkpoint).load_judge()
            rewards_S = torch.cat([rewards_of(judge, both[i : i + 32]) for i in range(0, len(both), 32)])
            margins_P = rewards_S[::2] - rewards_S[1::2]  # of the new model's answer over the old one's
            results["reward_model_win_rate"] = (margins_P.sign() / 2 + 0.5).mean().item()
    print(", ".join(f"{name} {value:.3f}" for name, value in results.items()), file=sys.stderr)
    return results


def answers_of(policy: Policy, prompts: Sequence[Prompt], seed: int) -> list[Rollout]:
    """A sampled answer to each prompt, with reasoning or without, in an order that depends on the prompts alone."""
    return [
        answer
        for i, batch in enumerate(batches(prompts, 32, keep_rest=True))
        for answer in sample(policy, batch, samples=1, max_turns=1, seed=[seed, i])
    ]


if __name__ == "__main__":
    run_step(main, Config)
