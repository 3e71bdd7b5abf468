"""The GRPO loss: clipped policy gradient with asymmetric bounds, masked importance sampling, optional k3 KL.

Shapes: T completion tokens, all completions of a micro-batch one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class PolicyLoss:
    """`loss` is a sum over tokens: the caller divides by the number of loss tokens of the whole global batch.

    clipped: tokens where the clip was active. masked: tokens that importance sampling dropped. kl: sum of k3.
    """

    loss: Tensor
    clipped: Tensor
    masked: Tensor
    kl: Tensor


def token_logprobs(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Log-probability of each target under fp32 logits, [T]. V vocabulary."""
    return -F.cross_entropy(logits_TV.float(), targets_T, reduction="none")


def grpo_loss(
    logp_T: Tensor,
    logp_old_T: Tensor,
    logp_generator_T: Tensor,
    advantages_T: Tensor,
    *,
    ratio_clip_min: float = 0.2,
    ratio_clip_max: float = 0.28,
    importance_bound: float = 2.0,
    logp_reference_T: Tensor | None = None,
    kl_penalty: float = 0.0,
) -> PolicyLoss:
    """Sum over tokens of -min(rho A, clip(rho, 1 - clip_min, 1 + clip_max) A) + kl_penalty * k3.

    rho = exp(logp - logp_old). The upper bound is the looser one, so that unlikely tokens can still grow
    ("clip-higher", Yu et al. 2025, DAPO section 3.1). The tokens were drawn by the generator, whose numerics may
    differ from the trainer's: tokens whose exp(logp_old - logp_generator) leaves [1/importance_bound, importance_bound]
    are dropped, the others weighted by it (masked importance sampling). k3 = exp(ref - logp) - (ref - logp) - 1
    (Schulman 2020).

    Args:
        logp_T: log-probabilities of the sampled tokens under the policy being trained, with gradient.
        logp_old_T: the same under the policy at the start of the step. logp_generator_T: as sampled.
        advantages_T: advantage of the completion each token belongs to.
    """
    ratio_T = torch.exp(logp_T - logp_old_T)
    clipped_T = ratio_T.clamp(1 - ratio_clip_min, 1 + ratio_clip_max)
    surrogate_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    importance_T = torch.exp(logp_old_T - logp_generator_T).detach()
    trusted_T = (importance_T >= 1 / importance_bound) & (importance_T <= importance_bound)
    # `where`, not a product: an importance of infinity times 0 would be NaN.
    loss_T = -surrogate_T * torch.where(trusted_T, importance_T, 0.0)
    kl_T = torch.zeros_like(logp_T)
    if logp_reference_T is not None:
        difference_T = logp_reference_T - logp_T
        kl_T = torch.exp(difference_T) - difference_T - 1
        loss_T = loss_T + kl_penalty * kl_T
    return PolicyLoss(
        loss_T.sum(),
        (ratio_T * advantages_T > clipped_T * advantages_T).sum(),
        (~trusted_T).sum(),
        kl_T.detach().sum(),
    )
