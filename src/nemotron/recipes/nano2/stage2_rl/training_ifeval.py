#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "IFEval-RL: GRPO on instructions whose constraints a program checks."
# name = "nano2/rl-ifeval"
# setup = "nemotron-cookbook[train]"
# run.launch = "direct"
# config = {dir = "./config/training_ifeval", default = "tiny", schema = "training_ifeval.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 2, training 1 of 4: a model that follows instructions more reliably.

    python data_curation.py --scale tiny | python training_ifeval.py > ifeval.json
    python training_ifeval.py --dataset-path DIR --base-path MODEL --lr 2e-4

GRPO (Shao et al. 2024): several answers to each instruction, a rule says which are right, and each is made likelier or
less likely by how much better it is than the others to the same instruction. As NeMo-RL does it: mean and deviation
are those of the *other* answers, not of the group (eq. 3), and the loss is a mean over tokens, not over answers.

Shapes: P prompts of a step, N answers to each, T sampled tokens of all of them.

Simplified against the paper (arXiv 2508.14444, section 3.2): one process, fp32, 320 instructions in place of 16,000.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from nemo_runspec.errors import RunFailed, UserError
from nemotron.kit import Checkpoint, Dataset, Model, Progress, Scale, Seed, UserPath
from nemotron.kit.dataclass_script import output_folder, run_step, step
from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.kit.schemas.rl import ClippedPGLossConfig
from nemotron.recipes.nano2.stage2_rl.sampling import Policy, batches, load_policy, read_prompts, sample, save_policy
from nemotron.stack.models import NemotronH
from nemotron.stack.rl.advantages import group_advantages
from nemotron.stack.rl.losses import grpo_loss
from nemotron.stack.rl.rollouts import MicroBatch, Rollout, pack_rollouts
from nemotron.stack.training.optim import build_optimizer


@dataclass
class Config:
    """What to train on, how long and how fast."""

    dataset_path: UserPath | None = None  # default: what the script before in the pipe made
    base_path: UserPath | None = None  # default: the model that the prompts were made for
    scale: Scale | None = None  # one smaller than that of the data takes its share of the prompts
    prompts_per_step: Annotated[int, Field(ge=1)] = 16  # of which every one has `samples` answers
    samples: Annotated[int, Field(ge=2)] = 16  # answers to each prompt
    lr: Annotated[float, Field(gt=0)] = 5e-4  # the smaller the model, the larger
    kl_penalty: Annotated[float, Field(ge=0)] = 2e-2  # holds the policy to what it began as: other families stay
    clip_grad: Annotated[float, Field(gt=0)] = 1.0  # largest norm of the gradient
    threads: Annotated[int, Field(ge=1, le=2)] = 2  # 1: one half after the other, with the same result
    seed: Seed = 1234  # of every random choice
    output_dir: Path | None = None  # also leave the model there


@step
def main(config: Config) -> Checkpoint:
    """Sample, verify, compare, update; save."""
    dataset = Dataset.load(path=config.dataset_path)
    if (base_path := config.base_path or dataset.tokenizer_path) is None:
        raise UserError(f"{dataset.path} does not say which model it is for", "name it: --base-path")
    base = Checkpoint.load(path=base_path)
    policy = load_policy(base, config.threads)
    model, reference = policy.model, copy.deepcopy(policy.model)
    steps = batches(read_prompts(dataset, "instructions", config.scale), config.prompts_per_step)  # each prompt once
    optimizer = build_optimizer(model, AdamWConfig(lr=config.lr, adam_beta2=0.95, weight_decay=0.0))  # no schedule

    progress, rewards = Progress(len(steps), label="ifeval-rl"), list[float]()
    for i, prompts in enumerate(steps):
        # --- 1. Answers, sampled from the policy as it is now, and what the verifier says of them
        rollouts = sample(policy, prompts, config.samples, max_turns=1, seed=[config.seed, i])
        rewards_PN = torch.tensor([math.nan if r.reward is None else r.reward for r in rollouts]).view(len(prompts), -1)
        # --- 2. One update: the gradient of GRPO, clipped
        num_tokens = grpo_gradient(policy, reference, rollouts, rewards_PN, config.kl_penalty)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        if not math.isfinite(grad_norm.item()):  # before it reaches a weight
            raise RunFailed(f"gradient norm {grad_norm} at step {i + 1}", "try a smaller --lr")
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(rewards_PN.nanmean().item())
        progress.update(i + 1, tokens=num_tokens, reward=rewards[-1])
    progress.close()

    with output_folder(config.output_dir) as folder:
        save_policy(model, base, folder)
        checkpoint = Model(
            path=folder,
            num_steps=len(steps),
            checkpoint_path=folder,
            dataset_path=dataset.path,
            tokenizer_path=folder,
            chat_template=base.chat_template,
            reasoning=True,
            num_parameters=model.num_parameters()[0],
            metrics={"reward": rewards},
        )
        return checkpoint.save()


def grpo_gradient(
    policy: Policy, reference: NemotronH, rollouts: Sequence[Rollout], rewards_PN: Tensor, kl_penalty: float
) -> int:
    """Add the gradient of GRPO's loss, mean over all sampled tokens, to that of the policy; returns how many there are.

    rewards_PN: of N answers to each of P prompts, NaN where one has none. RLHF learns by it, too.
    """
    # --- Advantages: distance from the mean of the OTHER answers to the prompt, in standard deviations of those
    advantages_PN = group_advantages(rewards_PN, ~rewards_PN.isnan())
    of_tokens = [[a] * len(r.completion_ids) for a, r in zip(advantages_PN.flatten().tolist(), rollouts, strict=True)]
    # --- Loss: sum over tokens of -ratio A + kl_penalty KL (Schulman's k3). One update a batch: the policy that sampled
    # is the policy that is updated, so that the ratio is 1, has a gradient and is never clipped.
    clipped = ClippedPGLossConfig(reference_policy_kl_penalty=kl_penalty)
    num_tokens = sum(len(rollout.logprobs) for rollout in rollouts)

    def loss_sum(micro: MicroBatch) -> Tensor:
        logp_T = micro.logprobs(policy.model.train())
        with torch.no_grad():
            reference_T = micro.logprobs(reference)
        return grpo_loss(
            logp_T, micro.advantages_T, clipped,
            logp_old_T=logp_T.detach(), logp_generator_T=micro.logp_generator_T, logp_reference_T=reference_T,
        ).loss  # fmt: skip

    # 2 rows of 512 tokens each; a row holds a prompt once, and answers that do not see each other.
    micros = pack_rollouts(rollouts, of_tokens, 512, 2, keep_zero_advantage=kl_penalty > 0)
    policy.lanes.add_gradients(policy.model, loss_sum, micros, num_tokens)
    return num_tokens


if __name__ == "__main__":
    run_step(main, Config)
