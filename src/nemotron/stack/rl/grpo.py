"""What a step of GRPO does with completions that have their rewards, whatever gave these: one update, and its records.

The loop is the script's: what it draws, and what it rewards.

Shapes: P prompts, N completions a prompt, R completions that may count in the loss, S those of a micro-batch, T their
sampled tokens, K depths of multi-token prediction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from tokenizers import Tokenizer

from nemo_runspec.errors import RunFailed, UserError
from nemotron.kit.metrics import MetricsLog
from nemotron.kit.schemas.rl import ClippedPGLossConfig, GRPOConfig, PolicyConfig
from nemotron.stack.environments import Task
from nemotron.stack.models import NemotronH
from nemotron.stack.rl.advantages import clip_advantages, group_advantages
from nemotron.stack.rl.loss_metrics import LossRecord, sequence_errors, sequences_within, token_metrics
from nemotron.stack.rl.losses import grpo_loss
from nemotron.stack.rl.policy import step_policy
from nemotron.stack.rl.rollouts import Rollout, count_rollouts, pack_rollouts, rollout_rates
from nemotron.stack.rl.shaping import message_advantages
from nemotron.stack.training.distributed import Ranks, sum_metrics
from nemotron.stack.training.session import Session


class StepConfig(Protocol):
    """What a step reads of a stage's config."""

    @property
    def grpo(self) -> GRPOConfig: ...
    @property
    def loss_fn(self) -> ClippedPGLossConfig: ...
    @property
    def policy(self) -> PolicyConfig: ...


@dataclass
class Batch:
    """This rank's prompts of a step, their completions, and why the verification of some failed.

    families: of the prompts of all ranks.
    """

    tasks: list[Task]
    rollouts: list[Rollout]
    errors: list[str]
    families: list[str]


def load_policy(cfg: StepConfig, folder: Path, device: torch.device) -> tuple[NemotronH, NemotronH | None]:
    """The model to train, its router frozen if so configured, and for a KL term the reference: as it is in `folder`."""
    model = NemotronH.from_pretrained(folder, device=device)
    if cfg.policy.mtp_num_layers and model.mtp is None:
        raise UserError(
            f"policy.mtp_num_layers {cfg.policy.mtp_num_layers}: {folder} has no multi-token prediction",
            "policy.mtp_num_layers=0",
        )
    if cfg.policy.freeze_moe_router:
        for moe in model.moe_blocks():
            moe.gate.weight.requires_grad_(False)
    if not cfg.loss_fn.reference_policy_kl_penalty:
        return model, None
    return model, NemotronH.from_pretrained(folder, device=device).eval()


def prompts_per_call(cfg: StepConfig) -> int:
    """How many prompts a rank generates for together."""
    return max(1, cfg.policy.generation.batch_size // cfg.grpo.num_generations_per_prompt)


def token_advantages(rollouts: Sequence[Rollout], cfg: GRPOConfig) -> tuple[list[list[float]], int]:
    """The advantage of each completion token, and the number of prompts whose completions are all equally good.

    Those of a prompt stand together in `rollouts`, `cfg.num_generations_per_prompt` of them.
    """
    rewards_PN = torch.tensor([math.nan if r.reward is None else r.reward for r in rollouts])
    rewards_PN = rewards_PN.view(-1, cfg.num_generations_per_prompt)
    advantages_PN = group_advantages(
        rewards_PN, ~rewards_PN.isnan(), leave_one_out=cfg.use_leave_one_out_baseline, normalize=cfg.normalize_rewards
    )
    advantages_PN = clip_advantages(advantages_PN, cfg.advantage_clip_low, cfg.advantage_clip_high)
    penalties = cfg.invalid_tool_call_advantage, cfg.malformed_thinking_advantage
    pairs = zip(advantages_PN.flatten().tolist(), rollouts, strict=True)
    of_tokens = [message_advantages(advantage, rollout.messages, *penalties) for advantage, rollout in pairs]
    return of_tokens, int((advantages_PN == 0).all(-1).sum())


def update(
    cfg: StepConfig,
    session: Session,
    reference: NemotronH | None,
    rollouts: list[Rollout],
    advantages: list[list[float]],
) -> tuple[float, LossRecord]:
    """One step on one batch. Loss: sum over sampled tokens / number of sampled tokens of the global batch.

    Completions without a verdict count in neither, and neither do those that hit the length limit, with overlong
    filtering, or those for which trainer and generator disagree. `advantages`: of each completion token. `reference`:
    the model that a KL term, if any, holds the policy to. Returns norm of the gradient and what was measured.

    With `policy.mtp_num_layers` every counted completion also trains multi-token prediction, whatever its advantage:
    the cross entropy summed over its tokens, averaged over the depths, times `policy.mtp_loss_scaling_factor`. It is
    divided by the same number of tokens.
    """
    model, device, policy = session.model, session.ranks.device, cfg.policy
    counted = [
        (rollout, advantage)
        for rollout, advantage in zip(rollouts, advantages, strict=True)
        if rollout.reward is not None and not (cfg.grpo.overlong_filtering and rollout.truncated)
    ]
    rewards_R = torch.tensor([rollout.reward or 0.0 for rollout, _ in counted], device=device)
    record = LossRecord(len(counted))
    loss_tokens = torch.tensor([sum(len(rollout.logprobs) for rollout, _ in counted)], device=device)
    model.train()
    for micro in pack_rollouts(
        [rollout for rollout, _ in counted],
        [advantage for _, advantage in counted],
        policy.max_total_sequence_length,
        policy.train_micro_batch_size,
        # With a KL term or multi-token prediction every completion has a gradient.
        keep_zero_advantage=reference is not None or policy.mtp_num_layers > 0,
    ):
        micro = micro.to(device)
        with session.autocast:
            logp_T, mtp_logits = micro.logprobs_and_mtp(model, policy.mtp_num_layers, policy.mtp_detach_heads)
        reference_T = None
        if reference is not None:
            with torch.no_grad(), session.autocast:
                reference_T = micro.logprobs(reference)
        # Where the two disagree too much the whole completion is left out, and its tokens of the denominator, which is
        # why the gradient of a sum is taken here and divided once, below.
        errors_S = sequence_errors(logp_T, micro.logp_generator_T, micro.lengths)
        kept_S = sequences_within(errors_S, cfg.grpo.seq_logprob_error_threshold)
        kept_T = kept_S.repeat_interleave(torch.tensor(micro.lengths, device=device))
        loss_tokens -= (~kept_T).sum()
        record.add_sequences(errors_S, kept_S, rewards_R[micro.rollouts], micro.input_ids_BL.numel())
        logp_T, generator_T, advantages_T = logp_T[kept_T], micro.logp_generator_T[kept_T], micro.advantages_T[kept_T]
        old_T = logp_T.detach()  # one update a batch: the policy of the rollouts is the policy being updated
        reference_T = None if reference_T is None else reference_T[kept_T]
        loss = grpo_loss(
            logp_T, advantages_T, cfg.loss_fn,
            logp_old_T=old_T, logp_generator_T=generator_T, logp_reference_T=reference_T,
        )  # fmt: skip
        total = loss.loss
        if mtp_logits:
            sums_K, counts_K = micro.mtp_loss(mtp_logits, kept_T)
            total = total + policy.mtp_loss_scaling_factor * sums_K.mean()
            record.add_mtp(sums_K, counts_K)
        total.backward()
        record.add_tokens(token_metrics(loss, logp_T, cfg.loss_fn, logp_old_T=old_T, logp_generator_T=generator_T))
    return step_policy(session, policy, loss_tokens), record


def check_verified(num_errors: float, num_responses: float, cfg: GRPOConfig, errors: Sequence[str]) -> None:
    """RunFailed where the verification of too large a share of the responses failed. `errors`: those of this rank."""
    if num_errors > cfg.max_error_rate * num_responses:
        raise RunFailed(
            f"no verdict on {num_errors:.0f} of {num_responses:.0f} responses, "
            f"more than grpo.max_error_rate {cfg.max_error_rate:g} allows",
            errors[0] if errors else "on another rank",
        )


def step_metrics(
    cfg: GRPOConfig, ranks: Ranks, batch: Batch, record: LossRecord, without_gradient: int
) -> dict[str, float]:
    """The metrics of a step over all ranks, from what this rank's update measured and from its rollouts.

    RunFailed where the verification of too many rollouts failed.
    """
    counts = count_rollouts(batch.rollouts, [task.family for task in batch.tasks], batch.families)
    counts |= {"groups_without_gradient": without_gradient, "verifier_errors": len(batch.errors)}
    sums = sum_metrics(counts, ranks)
    check_verified(sums["verifier_errors"], sums["completions"], cfg, batch.errors)
    groups = sums["completions"] / cfg.num_generations_per_prompt
    return {
        **rollout_rates(sums, batch.families),
        "groups_without_gradient": sums["groups_without_gradient"] / max(groups, 1),
        **record.metrics(ranks),
        **{name: sums[name] for name in ("verifier_errors", "tokens")},
    }


def log_samples(log: MetricsLog, step: int, batch: Batch, tokenizer: Tokenizer, number: int) -> None:
    """Log `number` rollouts of the batch, evenly spread: prompt, completion as text, and reward.

    Those of the next step begin at the next prompt, so that each place in a batch, and with it each family, is seen.
    """
    count = len(batch.rollouts)
    number = min(number, count)
    for place in range(number):
        rollout = batch.rollouts[(step * (count // len(batch.tasks) + 1) + place * (count // number)) % count]
        task = batch.tasks[rollout.prompt_index]
        text = tokenizer.decode(rollout.completion_ids, skip_special_tokens=False)
        log.log(step, family=task.family, prompt=task.prompt, completion=text, reward=rollout.reward)
