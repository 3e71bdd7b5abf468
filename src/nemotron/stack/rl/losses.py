"""The GRPO loss: clipped policy gradient with asymmetric bounds, importance correction, optional KL to a reference.

Shapes: T completion tokens, all completions of a micro-batch one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.kit.schemas.rl import ClippedPGLossConfig
from nemotron.stack.models.layers import at_least_fp32


@dataclass
class PolicyLoss:
    """`loss` is a sum over tokens: the caller divides by the number of loss tokens of the whole global batch.

    The others are of each token, without gradient. ratio_T, clamped_T: its probability over that under the old policy,
    before and after the clip. importance_T, out_of_bounds_T: of `importance_weights`. kl_T: the KL term without its
    factor.
    """

    loss: Tensor
    ratio_T: Tensor
    clamped_T: Tensor
    importance_T: Tensor
    out_of_bounds_T: Tensor
    kl_T: Tensor


def token_logprobs(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Log-probability of each target under logits in fp32 or wider, [T]. V vocabulary."""
    return -F.cross_entropy(at_least_fp32(logits_TV), targets_T, reduction="none")


def grpo_loss(
    logp_T: Tensor,
    advantages_T: Tensor,
    cfg: ClippedPGLossConfig,
    *,
    logp_old_T: Tensor,
    logp_generator_T: Tensor,
    logp_reference_T: Tensor | None = None,
) -> PolicyLoss:
    """Sum over tokens of -w min(rho A, clip(rho, 1 - clip_min, 1 + clip_max) A) + kl_penalty * KL.

    rho = exp(logp - logp_old). The upper bound may be the looser one, so that unlikely tokens can still grow
    ("clip-higher", Yu et al. 2025, DAPO section 3.1). w: `importance_weights`. KL: `kl_to_reference`.

    Args:
        logp_T: log-probabilities of the sampled tokens under the policy being trained, with gradient.
        advantages_T: advantage of the message that each token belongs to.
        logp_old_T: the log-probabilities under the policy at the start of the step; `force_on_policy_ratio` takes
            `logp_T` for it.
        logp_generator_T: as sampled.
        logp_reference_T: under the model that the policy is held to; needed with a `reference_policy_kl_penalty`.
    """
    if cfg.force_on_policy_ratio:
        logp_old_T = logp_T.detach()
    ratio_T = torch.exp(logp_T - logp_old_T)
    clamped_T = ratio_T.clamp(1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max)
    importance_T, out_of_bounds_T = importance_weights(logp_old_T, logp_generator_T, cfg)
    weight_T = importance_T if cfg.use_importance_sampling_correction else torch.ones_like(importance_T)
    loss_T = -weight_T * torch.minimum(ratio_T * advantages_T, clamped_T * advantages_T)
    kl_T = torch.zeros_like(logp_T)
    if logp_reference_T is not None:
        kl_T = kl_to_reference(logp_T, logp_generator_T, logp_reference_T, cfg)
        loss_T = loss_T + cfg.reference_policy_kl_penalty * kl_T
    return PolicyLoss(loss_T.sum(), ratio_T.detach(), clamped_T.detach(), importance_T, out_of_bounds_T, kl_T.detach())


def importance_weights(logp_old_T: Tensor, logp_generator_T: Tensor, cfg: ClippedPGLossConfig) -> tuple[Tensor, Tensor]:
    """exp(logp_old - logp_generator) after its bounds, and whether it was out of them; no gradient.

    The tokens were drawn by the generator, whose numerics may differ from the trainer's. `tis` clamps the weight
    (truncated importance sampling); `icepop` sets it to 0 (masked importance sampling: Nemotron 3 Nano, arXiv
    2512.20848, section 3.2). A token that the generator held impossible has weight 0, or the lower bound of `tis`.
    """
    weight_T = torch.exp(logp_old_T - logp_generator_T).detach()
    low, high = cfg.truncated_importance_sampling_ratio_min, cfg.truncated_importance_sampling_ratio
    out_of_bounds_T = torch.zeros_like(weight_T, dtype=torch.bool)
    if high is not None:
        out_of_bounds_T = (weight_T < (low or 0.0)) | (weight_T > high)
    weight_T = weight_T.nan_to_num(nan=0.0, posinf=0.0)
    if cfg.truncated_importance_sampling_type == "tis":
        weight_T = weight_T.clamp(low, high)
    elif cfg.truncated_importance_sampling_type == "icepop":
        weight_T = weight_T.masked_fill(out_of_bounds_T, 0.0)
    return weight_T, out_of_bounds_T


def kl_to_reference(
    logp_T: Tensor, logp_generator_T: Tensor, logp_reference_T: Tensor, cfg: ClippedPGLossConfig
) -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token, nats, times a weight.

    The gradient of an expectation over tokens that the policy draws is not the expectation of the gradient: the weight
    adds what is missing, KL times the gradient of logp (arXiv 2506.09477). With `use_on_policy_kl_approximation` it is
    exp(logp - logp_generator), which also corrects for the generator, else exp(logp - sg logp): its value is 1, and sg
    lets no gradient through. Where logp_reference - logp is clamped there is no gradient at all.
    """
    from_T = logp_generator_T if cfg.use_on_policy_kl_approximation else logp_T.detach()
    weight_T = torch.exp(logp_T - from_T).nan_to_num(nan=0.0, posinf=0.0)
    difference_T = logp_reference_T - logp_T
    if (bound := cfg.kl_input_clamp_value) is not None:
        weight_T = torch.where(difference_T.abs() > bound, weight_T.detach(), weight_T)
        difference_T = difference_T.clamp(-bound, bound)
    kl_T = weight_T * kl_estimate(difference_T, cfg.reference_policy_kl_type)
    return kl_T if (bound := cfg.kl_output_clamp_value) is None else kl_T.clamp(-bound, bound)


def kl_estimate(difference_T: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """KL(p || q) at tokens drawn from p, with the difference d = log q - log p (Schulman 2020), nats.

    k1 = -d has the right mean and much variance; k2 = d^2 / 2 has little of it and a bias; k3 = exp(d) - d - 1 has
    neither, and is never negative.
    """
    if kind == "k1":
        return -difference_T
    if kind == "k2":
        return difference_T.square() / 2
    return torch.exp(difference_T) - difference_T - 1
