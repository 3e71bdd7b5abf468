"""How a policy takes a step, whatever loss gave its gradients."""

from __future__ import annotations

import math

import torch

from nemotron.kit.schemas.rl import TrainedPolicyConfig
from nemotron.stack.training.distributed import clip_gradients, divide_gradients, sum_gradients, sum_over_ranks
from nemotron.stack.training.session import Session


def warmed_up_lr(step: int, policy: TrainedPolicyConfig) -> float:
    """The learning rate of step `step`, from 0 on: constant after a linear warm-up."""
    return policy.optimizer.lr * min(1.0, (step + 1) / (policy.lr_warmup_iters + 1))


def step_policy(session: Session, policy: TrainedPolicyConfig, denominator: torch.Tensor | None = None) -> float:
    """One step of the optimiser and of the expert bias. Returns the norm of the gradient of all ranks.

    `denominator`: this rank's part, [1], of what a loss that is a sum still has to be divided by (0 counts as 1). Where
    the norm is not finite, nothing moves: the caller stops the run.
    """
    model = session.model
    if denominator is not None:
        sum_over_ranks([denominator])
    sum_gradients(model)
    if denominator is not None:
        divide_gradients(model, denominator.clamp(min=1))
    grad_norm = clip_gradients(model, policy.max_grad_norm).item()
    if math.isfinite(grad_norm):
        session.optimizer.step()
        model.update_expert_bias(policy.moe_router_bias_update_rate)
    session.optimizer.zero_grad()
    return grad_norm
