"""Group-relative advantages: how much better a completion is than the others of the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

# Shapes: P prompts, N completions a prompt.


def group_advantages(
    rewards_PN: Tensor, valid_PN: Tensor, *, leave_one_out: bool = True, normalize: bool = True
) -> Tensor:
    """A[p, i] = (r[p, i] - mean) / (standard deviation + 1e-6) of the rewards of prompt p.

    With `leave_one_out` both are those of the *other* completions of the prompt, as in NeMo-RL: a baseline without the
    completion itself keeps the policy gradient unbiased (Kool et al. 2019; Ahmadian et al. 2024, RLOO). Without it they
    are those of the whole group (GRPO, Shao et al. 2024, section 4.1.2). The standard deviation (n - 1) divides only
    where it is above 0. With `leave_one_out`, therefore, the one right completion of sixteen has advantage 1, since the
    rewards of the others are all equal, and of two completions neither is divided. Rewards that are all equal give 0:
    no gradient.

    Args:
        rewards_PN: float [P, N].
        valid_PN: bool [P, N]; False for completions whose verification failed, which are neither a zero nor a baseline.
        normalize: divide by the standard deviation.

    Returns:
        float [P, N]; 0 for invalid completions and for prompts with fewer than two valid ones.
    """
    # Distances from the median. Where all the others have one reward it is the median, and their distances are exactly
    # 0. The mean of 31 rewards of 0.1 is not exactly 0.1, and what is left would be a standard deviation above 0.
    median_P1 = rewards_PN.masked_fill(~valid_PN, torch.nan).nanmedian(-1, keepdim=True).values
    distances_PN = torch.where(valid_PN, rewards_PN - median_P1, 0.0)
    # Row i holds what completion i is compared with. Two passes: E[x^2] - E[x]^2 would cancel.
    compared_PNN = valid_PN[:, None, :].expand(-1, valid_PN.shape[1], -1)
    if leave_one_out:
        compared_PNN = compared_PNN & ~torch.eye(valid_PN.shape[1], dtype=torch.bool, device=valid_PN.device)
    count_PN = compared_PNN.sum(-1)
    mean_PN = (distances_PN[:, None, :] * compared_PNN).sum(-1) / count_PN.clamp(min=1)
    variance_PN = ((distances_PN[:, None, :] - mean_PN[:, :, None]) * compared_PNN).square().sum(-1)
    std_PN = (variance_PN / (count_PN - 1).clamp(min=1)).sqrt()
    advantages_PN = (distances_PN - mean_PN) * (valid_PN & (count_PN > 0))
    if normalize:
        advantages_PN = torch.where(std_PN > 0, advantages_PN / (std_PN + 1e-6), advantages_PN)
    return advantages_PN


def clip_advantages(advantages_PN: Tensor, low: float | None, high: float | None) -> Tensor:
    """Advantages within [low, high]; None is no bound. Rewards that are nearly all equal give very large ones."""
    return advantages_PN.clamp(-torch.inf if low is None else low, torch.inf if high is None else high)
