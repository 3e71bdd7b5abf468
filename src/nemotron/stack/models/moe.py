"""`E`: sparse mixture of experts with a sigmoid router, aux-loss-free balancing and one shared expert.

Routing (DeepSeek-V3 section 2.1.2, as Nemotron 3 uses it): scores = sigmoid(x W^T) in fp32; a per-expert correction
bias is added for the *choice* of the top-k only; the weights are the unbiased scores of the chosen, normalised to one
and scaled. After each optimiser step the bias of under-loaded experts rises and that of over-loaded ones falls.

Shapes: T tokens, D hidden, E experts, K experts a token, F expert width, R = T K routed rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.layers import MLP, at_least_fp32


class Router(nn.Module):
    """Chooses K of E experts a token. `e_score_correction_bias` is a buffer: no gradient ever reaches it."""

    e_score_correction_bias: Tensor
    expert_load: Tensor

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.scaling_factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        # Rows routed to each expert since the last bias update; bookkeeping of a step, not part of a checkpoint.
        self.register_buffer("expert_load", torch.zeros(config.n_routed_experts, dtype=torch.int64), persistent=False)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns weights [T, K], expert indices [T, K] and all scores [T, E] (fp32)."""
        with torch.autocast(x_TD.device.type, enabled=False):  # bf16 scores would swap experts
            scores_TE = torch.sigmoid(F.linear(at_least_fp32(x_TD), at_least_fp32(self.weight)))
        chosen_TK = (scores_TE.detach() + self.e_score_correction_bias).topk(self.top_k, dim=-1, sorted=False).indices
        weights_TK = scores_TE.gather(-1, chosen_TK)
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20) * self.scaling_factor
        if self.training:
            self.expert_load += torch.bincount(chosen_TK.flatten(), minlength=self.expert_load.shape[0])
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


class Experts(nn.Module):
    """Weights of all routed experts, stacked: up [E, F, D], down [E, D, F]."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        num_experts, width = config.n_routed_experts, config.moe_intermediate_size
        self.up_proj = nn.Parameter(torch.empty(num_experts, width, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, config.hidden_size, width))

    def forward(self, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
        device = x_TD.device.type
        up_EFD: Tensor = self.up_proj
        down_EDF: Tensor = self.down_proj
        if torch.is_autocast_enabled(device):  # autocast does not look into a function with its own gradient
            dtype = torch.get_autocast_dtype(device)
            x_TD, up_EFD, down_EDF = x_TD.to(dtype), up_EFD.to(dtype), down_EDF.to(dtype)
        out_TD: Tensor = RoutedExperts.apply(x_TD, weights_TK, chosen_TK, up_EFD, down_EDF)
        return out_TD


class RoutedExperts(torch.autograd.Function):
    """out[t] = sum_k weights[t, k] * down[e] relu(up[e] x[t])^2 with e = chosen[t, k].

    Rows are sorted by expert, so each expert is two plain matmuls on a contiguous slice. Autograd over that loop would
    record thousands of small slices; the gradient is short enough to write down:

        a = relu(x up^T)^2, y = a down^T      da = w g down      dpre = da * 2 relu(x up^T)
        d down = (w g)^T a    d up = dpre^T x    dx = dpre up    dw = g . y
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor
    ) -> Tensor:
        num_tokens, top_k = chosen_TK.shape
        order_R = chosen_TK.flatten().argsort(stable=True)
        counts = torch.bincount(chosen_TK.flatten(), minlength=up_EFD.shape[0]).tolist()
        x_RD = x_TD[order_R.div(top_k, rounding_mode="floor")]
        relu_RF = x_RD.new_empty(len(order_R), up_EFD.shape[1])
        y_RD = torch.empty_like(x_RD)
        for expert, rows in _slices(counts):
            torch.mm(x_RD[rows], up_EFD[expert].T, out=relu_RF[rows])
        relu_RF.relu_()
        a_RF = relu_RF.square()
        for expert, rows in _slices(counts):
            torch.mm(a_RF[rows], down_EDF[expert].T, out=y_RD[rows])
        # y_TKD back in token order; a gather with the inverse permutation instead of a scatter-add.
        inverse_R = torch.empty_like(order_R)
        inverse_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        y_TKD = y_RD[inverse_R].view(num_tokens, top_k, -1)
        ctx.save_for_backward(x_RD, relu_RF, y_TKD, weights_TK, order_R, inverse_R, up_EFD, down_EDF)
        ctx.counts = counts
        return (weights_TK.to(y_TKD.dtype).unsqueeze(1) @ y_TKD).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, Tensor, Tensor]:
        (grad_TD,) = grads
        x_RD, relu_RF, y_TKD, weights_TK, order_R, inverse_R, up_EFD, down_EDF = ctx.saved_tensors
        num_tokens, top_k = weights_TK.shape
        grad_weights_TK = (y_TKD @ grad_TD.unsqueeze(-1)).squeeze(-1).to(weights_TK.dtype)
        token_R = order_R.div(top_k, rounding_mode="floor")
        grad_y_RD = grad_TD[token_R] * weights_TK.to(grad_TD.dtype).flatten()[order_R].unsqueeze(-1)
        grad_pre_RF = torch.empty_like(relu_RF)
        grad_x_RD = torch.empty_like(x_RD)
        grad_up, grad_down = torch.zeros_like(up_EFD), torch.zeros_like(down_EDF)
        a_RF = relu_RF.square()
        for expert, rows in _slices(ctx.counts):
            torch.mm(grad_y_RD[rows].T, a_RF[rows], out=grad_down[expert])
            torch.mm(grad_y_RD[rows], down_EDF[expert], out=grad_pre_RF[rows])
        grad_pre_RF.mul_(relu_RF).mul_(2)
        for expert, rows in _slices(ctx.counts):
            torch.mm(grad_pre_RF[rows].T, x_RD[rows], out=grad_up[expert])
            torch.mm(grad_pre_RF[rows], up_EFD[expert], out=grad_x_RD[rows])
        grad_x_TD = grad_x_RD[inverse_R].view(num_tokens, top_k, -1).sum(1)
        return grad_x_TD, grad_weights_TK, None, grad_up, grad_down


def _slices(counts: list[int]) -> list[tuple[int, slice]]:
    """(expert, its rows in the sorted order) of every expert that received a row."""
    slices, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            slices.append((expert, slice(start, start + count)))
        start += count
    return slices


class MoE(nn.Module):
    """Routed experts plus one shared expert that sees every token."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.moe_shared_expert_intermediate_size)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the output [B, L, D] and the sequence-level load-balancing loss (scalar, fp32, 1.0 when balanced)."""
        x_TD = x_BLD.flatten(0, 1)
        weights_TK, chosen_TK, scores_TE = self.gate(x_TD)
        routed_BLD = self.experts(x_TD, weights_TK, chosen_TK).view_as(x_BLD)
        balance = (
            load_balancing_loss(scores_TE, chosen_TK, x_BLD.shape[0]) if self.training else scores_TE.new_zeros(())
        )
        return routed_BLD + self.shared_experts(x_BLD), balance


def load_balancing_loss(scores_TE: Tensor, chosen_TK: Tensor, num_sequences: int) -> Tensor:
    """Mean over sequences of sum_e f_e P_e (DeepSeek-V3 equations 17-20).

    f_e is E times the fraction of the sequence's choices that fell on e, P_e the mean normalised score of e. It is 1
    for a uniform router and E / K when all tokens choose the same K experts with certainty.
    """
    num_experts = scores_TE.shape[1]
    share_BE = (scores_TE / scores_TE.sum(-1, keepdim=True)).view(num_sequences, -1, num_experts).mean(1)
    chosen_BR = chosen_TK.reshape(num_sequences, -1)
    counts_BE = torch.zeros_like(share_BE).scatter_add_(1, chosen_BR, torch.ones_like(chosen_BR, dtype=share_BE.dtype))
    fraction_BE = counts_BE * (num_experts / chosen_BR.shape[1])
    return (fraction_BE * share_BE).sum(-1).mean()
