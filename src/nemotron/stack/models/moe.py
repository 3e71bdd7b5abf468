"""`E`: sparse mixture of experts with a sigmoid router, aux-loss-free balancing and one shared expert.

Routing (DeepSeek-V3 section 2.1.2, as Nemotron 3 uses it): scores = sigmoid(x W^T) in fp32; a per-expert correction
bias is added for the *choice* of the top-k only; the weights are the unbiased scores of the chosen, normalised to one
and scaled. After each optimiser step the bias of under-loaded experts rises and that of over-loaded ones falls.

Shapes: T tokens, D hidden, E experts, K experts a token, F expert width, R = T K choices. The experts' products and
their gradient stand in `kernels/experts.py`. Next: `shared_prompt.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.kernels.experts import RoutedExperts
from nemotron.stack.models.kernels.linear import Linear, Rounding, rounded
from nemotron.stack.models.layers import MLP, at_least_fp32


class Router(nn.Module):
    """Chooses K of E experts a token. `e_score_correction_bias` is a buffer without gradient."""

    e_score_correction_bias: Tensor
    expert_load: Tensor

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.scaling_factor = config.routed_scaling_factor
        self.counts_load = True  # not in the second forward pass of a recomputed block
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        # Rows routed to each expert since the last bias update; bookkeeping of a step, not part of a checkpoint.
        self.register_buffer("expert_load", torch.zeros(config.n_routed_experts, dtype=torch.int64), persistent=False)

    def forward(self, x_TD: Tensor, counts_T: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns weights [T, K], expert indices [T, K] and all scores [T, E] (fp32).

        `counts_T`: how often each token counts in the load; None: once.
        """
        with torch.autocast(x_TD.device.type, enabled=False):  # bf16 scores would swap experts
            scores_TE = torch.sigmoid(F.linear(at_least_fp32(x_TD), at_least_fp32(self.weight)))
        chosen_TK = (scores_TE.detach() + self.e_score_correction_bias).topk(self.top_k, dim=-1, sorted=False).indices
        weights_TK = scores_TE.gather(-1, chosen_TK)
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20) * self.scaling_factor
        if self.training and self.counts_load:
            chosen_R = chosen_TK.flatten()
            # Not `bincount`, which on a GPU has no fixed order where it is given weights.
            counts_R = torch.ones_like(chosen_R) if counts_T is None else counts_T.repeat_interleave(self.top_k)
            self.expert_load.index_add_(0, chosen_R, counts_R)
        return weights_TK, chosen_TK, scores_TE

    @torch.no_grad()
    def update_bias(self, rate: float) -> None:
        """bias += rate * sign(mean load - load), then forget the loads (Wang et al. 2024, arXiv 2408.15664).

        Under torch.distributed the loads are summed over ranks first, so every rank holds the same bias.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.expert_load)
        load = self.expert_load.double()
        self.e_score_correction_bias += rate * torch.sign(load.mean() - load).float()
        self.expert_load.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Called by `.to()`, `.bfloat16()` and the like: the bias always stays fp32 or wider.

        In bf16 it could no longer change by 1e-3 once it had reached 0.5.
        """
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if after.dtype in (torch.bfloat16, torch.float16):
            self.e_score_correction_bias = before.to(device=after.device, dtype=torch.float32)
        return self


class Experts(nn.Module):
    """Weights of all routed experts, stacked: up [E, F, D], down [E, D, F]; D is the latent width in a LatentMoE.

    `round_input` rounds what goes into up, `round_active` what goes into down, where activations are quantised.
    """

    round_input: Rounding | None = None
    round_active: Rounding | None = None

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        num_experts, width = config.n_routed_experts, config.moe_intermediate_size
        self.up_proj = nn.Parameter(torch.empty(num_experts, width, config.routed_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, config.routed_size, width))

    def forward(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
        device = x_TD.device.type
        x_TD = rounded(x_TD, self.round_input)
        up_EFD: Tensor = self.up_proj
        down_EDF: Tensor = self.down_proj
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x_TD, up_EFD, down_EDF = x_TD.to(dtype), up_EFD.to(dtype), down_EDF.to(dtype)
        with torch.autocast(device, enabled=False):  # operands have their dtypes; on a GPU it would change some to fp32
            out_TD: Tensor = RoutedExperts.apply(x_TD, weights_TK, chosen_TK, up_EFD, down_EDF, self.round_active)
        return out_TD


class MoE(nn.Module):
    """Routed experts plus one shared expert that sees every token.

    With `moe_latent_size` (LatentMoE, Nemotron 3 Super) the routed experts live in a narrow latent space:
    out = fc2(sum_k w_k expert_k(fc1 x)) + shared(x). Router and shared expert keep the full width. Where experts are
    spread over devices, tokens then travel at the latent width, and more experts fit the same bandwidth.
    """

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.moe_shared_expert_intermediate_size)
        self.fc1_latent_proj: Linear | None = None
        self.fc2_latent_proj: Linear | None = None
        if config.moe_latent_size is not None:
            self.fc1_latent_proj = Linear(config.hidden_size, config.moe_latent_size)
            self.fc2_latent_proj = Linear(config.moe_latent_size, config.hidden_size)

    def forward(self, x_BLD: Tensor, counts_BL: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the output [B, L, D] and the sequence-level load-balancing loss: scalar, fp32, 1 when balanced.

        Outside training that loss is 0. `counts_BL`: how often each token counts in it, and in the load of the experts,
        by which their bias moves; None: once.
        """
        x_TD = x_BLD.flatten(0, 1)
        weights_TK, chosen_TK, scores_TE = self.gate(x_TD, None if counts_BL is None else counts_BL.flatten())
        routed_in = x_TD if self.fc1_latent_proj is None else self.fc1_latent_proj(x_TD)
        routed = self.experts(routed_in, weights_TK, chosen_TK)
        routed_TD = routed if self.fc2_latent_proj is None else self.fc2_latent_proj(routed)
        balance = scores_TE.new_zeros(())
        if self.training:
            balance = load_balancing_loss(scores_TE.view(*x_BLD.shape[:2], -1), self.gate.top_k, counts_BL)
        return routed_TD.view_as(x_BLD) + self.shared_experts(x_BLD), balance


def load_balancing_loss(scores_BLE: Tensor, top_k: int, counts_BL: Tensor | None = None) -> Tensor:
    """Mean over sequences of sum_e f_e P_e (DeepSeek-V3 equations 17-20).

    f_e is E times the fraction of the sequence's choices that fall on e, P_e the mean normalised score of e. It is 1
    for a uniform router and E / K when all tokens choose the same K experts with certainty. Choices are those of the
    scores alone, as there and in Megatron-Core: those with the bias are even already, and would leave nothing to do.

    Args:
        scores_BLE: of the router, in (0, 1).
        top_k: K.
        counts_BL: how often each token counts, 0 for padding; None: once.
    """
    num_experts = scores_BLE.shape[-1]
    counts_BL = scores_BLE.new_ones(scores_BLE.shape[:2]) if counts_BL is None else counts_BL.to(scores_BLE.dtype)
    total_B1 = counts_BL.sum(1, keepdim=True).clamp(min=1)
    share_BE = (counts_BL.unsqueeze(1) @ (scores_BLE / scores_BLE.sum(-1, keepdim=True))).squeeze(1) / total_B1
    chosen_BLK = scores_BLE.detach().topk(top_k, sorted=False).indices
    counts_BR = counts_BL.repeat_interleave(top_k, dim=1)
    counts_BE = torch.zeros_like(share_BE).scatter_add_(1, chosen_BLK.flatten(1), counts_BR)
    fraction_BE = counts_BE * (num_experts / top_k) / total_B1
    return (fraction_BE * share_BE).sum(-1).mean()
