#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "A reward model: a copy of the policy, trained on preferences with the Bradley-Terry loss."
# name = "nano2/rl"
# setup = "nemotron-cookbook[train]"
# run.launch = "direct"
# config = {dir = "./config/training_reward", default = "tiny", schema = "training_reward.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 2, training 3 of 4: a model that says how good an answer is, for RLHF.

    ... | python training_dpo.py | python training_reward.py | python training_rlhf.py
    python training_reward.py --checkpoint-path MODEL --dataset-path DIR

The policy answers each prompt several times. Of two answers the right one is better, then the one with less reasoning,
then the shorter one. The reward model is a copy of the policy; its reward is how likely it finds an answer, mean over
the tokens (`stack/rl/reward_model.py`), trained so that the better answer has the higher one (Bradley and Terry 1952).

Simplified against the paper (arXiv 2508.14444, section 3.2), whose reward model is Qwen-based and was trained on what
people preferred: this one has the policy's size, and learns what verifiers and lengths say. So little data does not
teach it a scalar head (docs/recipes/nano2); what it knows is how likely answers are.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from nemo_runspec.errors import RunFailed
from nemotron.kit import Checkpoint, Dataset, Progress, Scale, Seed, UserPath
from nemotron.kit.dataclass_script import output_folder, run_step, step
from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.recipes.nano2.stage2_rl.judging import RewardModel, better_first, rewards_of
from nemotron.recipes.nano2.stage2_rl.sampling import (
    Policy,
    Prompt,
    batches,
    in_groups,
    load_policy,
    read_prompts,
    sample,
    save_policy,
)
from nemotron.stack.rl.reward_model import bradley_terry_loss
from nemotron.stack.rl.rollouts import Rollout
from nemotron.stack.training.optim import build_optimizer

Group = tuple[list[Rollout], list[tuple[int, int]]]
"""Answers to a prompt, and the positions of two of them, the better one first, as often as there are two."""


@dataclass
class Config:
    """What to train on, how long and how fast."""

    checkpoint_path: UserPath | None = None  # default: what the script before in the pipe made
    dataset_path: UserPath | None = None  # default: what came with it; of one that is named, its own
    scale: Scale | None = None  # one smaller than that of the data takes its share of the prompts
    samples: Annotated[int, Field(ge=2)] = 8  # answers to each prompt; every two of them may be a pair
    prompts_per_step: Annotated[int, Field(ge=1)] = 4  # of which every one has `samples` answers
    beta: Annotated[float, Field(gt=0)] = 2.0  # scale of the rewards in the loss, SimPO's
    lr: Annotated[float, Field(gt=0)] = 3e-4  # the smaller the model, the larger
    clip_grad: Annotated[float, Field(gt=0)] = 1.0  # largest norm of the gradient
    threads: Annotated[int, Field(ge=1, le=2)] = 2  # 1: one half after the other, with the same result
    seed: Seed = 1234  # of every random choice
    output_dir: Path | None = None  # also leave the model there


@step
def main(config: Config) -> RewardModel:
    """Sample, verify, pair, train; measure on held-out prompts, save."""
    initial = Checkpoint.load(path=config.checkpoint_path, key="model")
    dataset = Dataset.load(path=config.dataset_path or (config.checkpoint_path and initial.dataset_path), key="data")
    policy, judge = load_policy(initial, config.threads), load_policy(initial, config.threads)
    prompts = read_prompts(dataset, "preferences", config.scale)
    groups = preferences(policy, prompts, config)
    held_out = preferences(policy, read_prompts(dataset, "held_out"), config)
    before = measure(judge, held_out)
    optimizer = build_optimizer(judge.model, AdamWConfig(lr=config.lr, adam_beta2=0.95, weight_decay=0.0))
    steps = [groups[i : i + config.prompts_per_step] for i in range(0, len(groups), config.prompts_per_step)]

    def loss_sum(group: Group) -> Tensor:
        answers, pairs = group
        return bradley_terry_loss(rewards_of(judge, [answers], config.beta), pairs) * len(pairs)

    progress = Progress(len(steps), label="reward")
    progress.note(f"{len(groups):,} of {len(prompts):,} prompts have two answers of which one is better")
    judge.model.train()
    for i, batch in enumerate(steps):
        # Loss: -log sigmoid(r_better - r_worse), mean over the pairs of all prompts of the step
        loss = judge.lanes.add_gradients(judge.model, loss_sum, batch, sum(len(pairs) for _, pairs in batch))
        grad_norm = torch.nn.utils.clip_grad_norm_(judge.model.parameters(), config.clip_grad)
        if not math.isfinite(loss.item() + grad_norm.item()):  # before it reaches a weight
            raise RunFailed(f"loss {loss.item()}, gradient norm {grad_norm} at step {i + 1}", "try a smaller --lr")
        optimizer.step()
        optimizer.zero_grad()
        progress.update(i + 1, loss=loss.item())
    accuracy = measure(judge, held_out)
    for kind, (share, count) in accuracy.items():
        if count:
            progress.note(f"held-out pairs, {kind}: higher reward in {before[kind][0]:.1%} -> {share:.1%} of {count}")
    progress.close()

    with output_folder(config.output_dir) as folder:
        save_policy(judge.model, initial, folder)
        metrics = {"prompts": len(groups), "held_out": accuracy, "held_out_before": before}
        return RewardModel(path=folder, policy_path=initial.path, dataset_path=dataset.path, metrics=metrics).save()


def preferences(policy: Policy, prompts: list[Prompt], config: Config) -> list[Group]:
    """The policy's answers to each prompt, and which two are a pair; without the prompts that have none."""
    groups = []
    for i, batch in enumerate(batches(prompts, 32, keep_rest=True)):
        sampled = sample(policy, batch, config.samples, max_turns=1, seed=[config.seed, i])
        for answers in in_groups(sampled, config.samples):
            if pairs := better_first(answers, policy):
                groups.append((answers, pairs))
    return groups


@torch.no_grad()
def measure(judge: Policy, groups: Sequence[Group]) -> dict[str, list[float]]:
    """Share of the pairs in which the better answer has the higher reward, and of how many: by what makes it better."""
    won: dict[str, list[bool]] = {"right over wrong": [], "short over long": [], "ended over cut off": []}
    for answers, pairs in groups:
        rewards = rewards_of(judge, [answers]).tolist()
        for i, j in pairs:
            kind = "short over long" if answers[i].reward == answers[j].reward else "right over wrong"
            if answers[i].truncated != answers[j].truncated:
                kind = "ended over cut off"
            won[kind].append(rewards[i] > rewards[j])
    return {kind: [sum(wins) / max(len(wins), 1), len(wins)] for kind, wins in won.items()}


if __name__ == "__main__":
    run_step(main, Config)
