#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "RLHF: GRPO with the rewards of a reward model, with reasoning and without."
# name = "nano2/rl-rlhf"
# setup = "nemotron-cookbook[train]"
# run.launch = "direct"
# config = {dir = "./config/training_rlhf", default = "tiny", schema = "training_rlhf.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 2, training 4 of 4: a model whose answers the reward model likes.

    ... | python training_dpo.py | python training_reward.py | python training_rlhf.py > rlhf.json
    python training_rlhf.py --reward-path MODEL --lr 2e-4

The loop is that of IFEval-RL; only the reward differs: what the reward model says of an answer. Every other step draws
prompts with reasoning (they end with `<think>`), the steps between those without (`<think></think>`).

Shapes: P prompts of a step, N answers to each, T sampled tokens of all of them.

Simplified against the paper (arXiv 2508.14444, section 3.2): one process, fp32, contexts of generated tasks.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from nemo_runspec.errors import RunFailed
from nemotron.kit import Checkpoint, Dataset, Model, Progress, Scale, Seed, UserPath
from nemotron.kit.dataclass_script import output_folder, run_step, step
from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.recipes.nano2.stage2_rl.judging import RewardModel, rewards_of
from nemotron.recipes.nano2.stage2_rl.sampling import batches, in_groups, load_policy, read_prompts, sample, save_policy
from nemotron.recipes.nano2.stage2_rl.training_ifeval import grpo_gradient
from nemotron.stack.training.optim import build_optimizer


@dataclass
class Config:
    """What to train on, how long and how fast."""

    reward_path: UserPath | None = None  # default: what the script before in the pipe made
    checkpoint_path: UserPath | None = None  # default: the policy whose answers the reward model knows
    dataset_path: UserPath | None = None  # default: what that was trained on
    scale: Scale | None = None  # one smaller than that of the data takes its share of the prompts
    prompts_per_step: Annotated[int, Field(ge=1)] = 8  # of which every one has `samples` answers
    samples: Annotated[int, Field(ge=2)] = 8  # answers to each prompt
    lr: Annotated[float, Field(gt=0)] = 4e-4  # the smaller the model, the larger
    kl_penalty: Annotated[float, Field(ge=0)] = 2e-2  # against answers that only the reward model likes
    clip_grad: Annotated[float, Field(gt=0)] = 1.0  # largest norm of the gradient
    threads: Annotated[int, Field(ge=1, le=2)] = 2  # 1: one half after the other, with the same result
    seed: Seed = 1234  # of every random choice
    output_dir: Path | None = None  # also leave the model there


@step
def main(config: Config) -> Checkpoint:
    """Sample, judge, compare, update; save."""
    reward = RewardModel.load(path=config.reward_path)
    initial = Checkpoint.load(path=config.checkpoint_path or reward.policy_path)
    dataset = Dataset.load(path=config.dataset_path or reward.dataset_path)
    policy, judge = load_policy(initial, config.threads), reward.load_judge()
    model, reference = policy.model, copy.deepcopy(policy.model)
    steps = batches(read_prompts(dataset, "contexts", config.scale), config.prompts_per_step)
    optimizer = build_optimizer(model, AdamWConfig(lr=config.lr, adam_beta2=0.95, weight_decay=0.0))

    progress, rewards, right = Progress(len(steps), label="rlhf"), list[float](), list[float]()
    for i, prompts in enumerate(steps):
        # --- 1. Answers, sampled from the policy as it is now, and what the reward model says of them
        rollouts = sample(policy, prompts, config.samples, max_turns=1, seed=[config.seed, i])
        with torch.no_grad():
            rewards_PN = rewards_of(judge, in_groups(rollouts, config.samples)).view(len(prompts), -1)
        # --- 2. One update: the gradient of GRPO, clipped
        num_tokens = grpo_gradient(policy, reference, rollouts, rewards_PN, config.kl_penalty)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        if not math.isfinite(grad_norm.item()):  # before it reaches a weight
            raise RunFailed(f"gradient norm {grad_norm} at step {i + 1}", "try a smaller --lr")
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(rewards_PN.mean().item())
        right.append(sum(rollout.reward or 0.0 for rollout in rollouts) / len(rollouts))
        progress.update(i + 1, tokens=num_tokens, reward=rewards[-1], right=right[-1])
    progress.close()

    with output_folder(config.output_dir) as folder:
        save_policy(model, initial, folder)
        checkpoint = Model(
            path=folder,
            num_steps=len(steps),
            checkpoint_path=folder,
            dataset_path=dataset.path,
            tokenizer_path=folder,
            chat_template=initial.chat_template,
            reasoning=True,
            num_parameters=model.num_parameters()[0],
            metrics={"reward": rewards, "right": right},
        )
        return checkpoint.save()


if __name__ == "__main__":
    run_step(main, Config)
