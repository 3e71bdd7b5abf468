"""Supervised steps inside reinforcement learning: a policy learns a form that it has never seen by imitating it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemotron.kit.schemas.rl import PolicyConfig
from nemotron.stack.rl.policy import step_policy
from nemotron.stack.rl.rollouts import Rollout, pack_rollouts
from nemotron.stack.training.distributed import sum_metrics
from nemotron.stack.training.session import Session


def imitate(session: Session, policy: PolicyConfig, rollouts: Sequence[Rollout]) -> tuple[float, dict[str, float]]:
    """One supervised step. Loss: mean negative log-likelihood of the completions' tokens, over the global batch.

    Returns the norm of the gradient, and the metrics `loss`, nats a token, `tokens`, and `trained_tokens`, prompts and
    padding included.
    """
    model, device = session.model, session.ranks.device
    weights = [[1.0] * len(rollout.completion_ids) for rollout in rollouts]
    tokens = float(sum(map(len, weights)))
    loss_sum, num_tokens = torch.zeros((), device=device), torch.tensor([tokens], device=device)
    trained_tokens = 0.0
    model.train()
    for micro in pack_rollouts(rollouts, weights, policy.max_total_sequence_length, policy.train_micro_batch_size):
        micro = micro.to(device)
        with session.autocast:
            loss = -micro.logprobs(model).sum()
        loss.backward()
        loss_sum += loss.detach()
        trained_tokens += micro.input_ids_BL.numel()
    grad_norm = step_policy(session, policy, num_tokens)
    sums = sum_metrics({"loss": loss_sum, "tokens": tokens, "trained_tokens": trained_tokens}, session.ranks)
    return grad_norm, sums | {"loss": sums["loss"] / max(sums["tokens"], 1)}
