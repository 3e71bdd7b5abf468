"""Group-relative advantages: how much better a completion is than the others of the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

# Shapes: P prompts, N completions a prompt.


def leave_one_out_advantages(rewards_PN: Tensor, valid_PN: Tensor, normalize: bool = True) -> Tensor:
    """A[p, i] = r[p, i] - mean of the *other* valid rewards of prompt p, divided by the group's standard deviation.

    The baseline does not contain the completion itself, which keeps the policy gradient unbiased (Kool et al. 2019;
    Ahmadian et al. 2024, RLOO); the division is GRPO's (Shao et al. 2024, equation 3). Groups whose
    rewards are all equal get 0 everywhere: they carry no gradient.

    Args:
        rewards_PN: float [P, N].
        valid_PN: bool [P, N]; False for completions whose verification failed, which are neither a zero nor a baseline.
        normalize: divide by the standard deviation (n - 1) over the valid completions.

    Returns:
        float [P, N]; 0 for invalid completions and for prompts with fewer than two valid ones.
    """
    valid = valid_PN.to(rewards_PN.dtype)
    rewards = torch.where(valid_PN, rewards_PN, torch.zeros_like(rewards_PN))
    count_P1 = valid.sum(-1, keepdim=True)
    others_PN = (rewards.sum(-1, keepdim=True) - rewards) / (count_P1 - 1).clamp(min=1)
    advantages = (rewards - others_PN) * valid * (count_P1 > 1)
    if normalize:
        mean_P1 = rewards.sum(-1, keepdim=True) / count_P1.clamp(min=1)
        variance_P1 = ((rewards - mean_P1).square() * valid).sum(-1, keepdim=True) / (count_P1 - 1).clamp(min=1)
        std_P1 = variance_P1.sqrt()
        advantages = torch.where(std_P1 > 1e-6, advantages / std_P1.clamp(min=1e-6), torch.zeros_like(advantages))
    return advantages
