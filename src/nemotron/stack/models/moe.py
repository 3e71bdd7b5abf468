"""`E`: sparse mixture of experts with a sigmoid router, aux-loss-free balancing and one shared expert.

Routing (DeepSeek-V3 section 2.1.2, as Nemotron 3 uses it): scores = sigmoid(x W^T) in fp32; a per-expert correction
bias is added for the *choice* of the top-k only; the weights are the unbiased scores of the chosen, normalised to one
and scaled. After each optimiser step the bias of under-loaded experts rises and that of over-loaded ones falls.

Shapes: T tokens, D hidden, E experts, K experts a token, F expert width, R = T K choices,
S rows sorted by expert. Next: `block.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.kernels.linear import ROW_MULTIPLE, Linear, Rounding, matmul_nt, onednn_serves, rounded
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
            counts_R = None if counts_T is None else counts_T.repeat_interleave(self.top_k)
            load_E = torch.bincount(chosen_TK.flatten(), counts_R, minlength=self.expert_load.shape[0])
            self.expert_load += load_E.to(self.expert_load.dtype)
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
        if torch.is_autocast_enabled(device):  # autocast does not look into a function with its own gradient
            dtype = torch.get_autocast_dtype(device)
            x_TD, up_EFD, down_EDF = x_TD.to(dtype), up_EFD.to(dtype), down_EDF.to(dtype)
        out_TD: Tensor = RoutedExperts.apply(x_TD, weights_TK, chosen_TK, up_EFD, down_EDF, self.round_active)
        return out_TD


class RoutedExperts(torch.autograd.Function):
    """out[t] = sum_k weights[t, k] * down[e] relu(up[e] x[t])^2 with e = chosen[t, k].

    Rows are sorted by expert, so each expert is two plain matmuls on a contiguous slice. Autograd over that loop would
    record thousands of small slices; the gradient is short enough to write down:

        a = relu(x up^T)^2, y = a down^T      da = w g down      dpre = da * 2 relu(x up^T)
        d down = (w g)^T a    d up = dpre^T x    dx = dpre up    dw = g . y

    Each expert's slice may end in padding rows (see `dispatch`): they repeat token 0 with weight 0, so that they add
    nothing to any gradient, and their output is never read. Where `round_active` rounds a, its gradient is that of the
    rounded one (straight through).
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor,
        round_active: Rounding | None,
    ) -> Tensor:  # fmt: skip
        fast = onednn_serves(x_TD) and chosen_TK.numel() >= ROW_MULTIPLE * len(up_EFD)
        slot_TK, token_S, slices = dispatch(chosen_TK, len(up_EFD), ROW_MULTIPLE if fast else 1)
        x_SD = x_TD.index_select(0, token_S)  # copies whole rows; x_TD[token_S] takes three times as long
        y_SD, relu_SF = torch.empty_like(x_SD), x_SD.new_empty(len(x_SD), up_EFD.shape[1])
        for expert, rows in slices:
            matmul_nt(x_SD[rows], up_EFD[expert], relu_SF[rows], fast)
        active_SF = rounded(relu_SF.relu_().square(), round_active)
        for expert, rows in slices:
            matmul_nt(active_SF[rows], down_EDF[expert], y_SD[rows], fast)
        ctx.save_for_backward(x_SD, y_SD, weights_TK, slot_TK, token_S, up_EFD, down_EDF, relu_SF)
        ctx.slices, ctx.fast, ctx.round_active = slices, fast, round_active
        return weighted_sum(y_SD, slot_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None, Tensor | None, None]:
        (grad_TD,) = grads
        x_SD, y_SD, weights_TK, slot_TK, token_S, up_EFD, down_EDF, relu_SF = ctx.saved_tensors
        fast = ctx.fast
        grad_SD = grad_TD.index_select(0, token_S)
        grad_weights_TK = (grad_SD * y_SD).sum(-1)[slot_TK].to(weights_TK.dtype)
        weight_S = grad_TD.new_zeros(len(token_S))
        weight_S[slot_TK] = weights_TK.to(grad_TD.dtype)
        grad_y_SD = grad_SD.mul_(weight_S.unsqueeze(-1))
        grad_pre_SF, grad_x_SD = torch.empty_like(relu_SF), torch.empty_like(x_SD)
        for expert, rows in ctx.slices:
            matmul_nt(grad_y_SD[rows], down_EDF[expert].T, grad_pre_SF[rows], fast)
        grad_pre_SF.mul_(relu_SF).mul_(2)
        for expert, rows in ctx.slices:
            matmul_nt(grad_pre_SF[rows], up_EFD[expert].T, grad_x_SD[rows], fast)
        grad_up = grad_down = None
        if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
            grad_up, grad_down = torch.zeros_like(up_EFD), torch.zeros_like(down_EDF)
            active_SF = rounded(relu_SF.square(), ctx.round_active)
            for expert, rows in ctx.slices:
                matmul_nt(grad_y_SD[rows].T, active_SF[rows].T, grad_down[expert], fast)
                matmul_nt(grad_pre_SF[rows].T, x_SD[rows].T, grad_up[expert], fast)
        return F.embedding_bag(slot_TK, grad_x_SD, mode="sum"), grad_weights_TK, None, grad_up, grad_down, None


def weighted_sum(y_SD: Tensor, slot_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """sum_k weights[t, k] y[slot[t, k]], [T, D], in one pass, where indexing, multiplying and adding would be three.

    Weights and sum are fp32, the result is of the dtype of y: with 22 choices of a token, bf16 would round 22 times.
    """
    return F.embedding_bag(slot_TK, at_least_fp32(y_SD), per_sample_weights=weights_TK, mode="sum").to(y_SD.dtype)


def dispatch(chosen_TK: Tensor, num_experts: int, multiple: int) -> tuple[Tensor, Tensor, list[tuple[int, slice]]]:
    """Give every choice a row among those of its expert, each expert's rows padded to a multiple of `multiple`.

    Returns the row of each choice [T, K], the token of each row [S], and the rows of every expert that was chosen.
    """
    num_choices, top_k = chosen_TK.numel(), chosen_TK.shape[1]
    expert_R = chosen_TK.flatten()
    order_R = expert_R.argsort(stable=True)
    counts_E = torch.bincount(expert_R, minlength=num_experts)
    padded_E = (counts_E + multiple - 1).div(multiple, rounding_mode="floor") * multiple
    # How far padding has moved an expert's first row.
    moved_E = (padded_E.cumsum(0) - padded_E) - (counts_E.cumsum(0) - counts_E)
    slot_R = torch.empty_like(order_R)
    slot_R[order_R] = torch.arange(num_choices, device=order_R.device) + moved_E[expert_R[order_R]]
    slices, start = [], 0
    for expert, count in enumerate(padded_E.tolist()):
        if count:
            slices.append((expert, slice(start, start + count)))
        start += count
    token_S = order_R.new_zeros(start)
    token_S[slot_R] = torch.arange(num_choices, device=order_R.device).div(top_k, rounding_mode="floor")
    return slot_R.view(-1, top_k), token_S, slices


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
        """Returns the output [B, L, D] and the sequence-level load-balancing loss (scalar, fp32, 1.0 when balanced).

        `counts_BL`: how often each token counts in the load of the experts, by which their bias moves; None: once.
        """
        x_TD = x_BLD.flatten(0, 1)
        weights_TK, chosen_TK, scores_TE = self.gate(x_TD, None if counts_BL is None else counts_BL.flatten())
        routed_in = x_TD if self.fc1_latent_proj is None else self.fc1_latent_proj(x_TD)
        routed = self.experts(routed_in, weights_TK, chosen_TK)
        routed_TD = routed if self.fc2_latent_proj is None else self.fc2_latent_proj(routed)
        balance = (
            load_balancing_loss(scores_TE, chosen_TK, x_BLD.shape[0]) if self.training else scores_TE.new_zeros(())
        )
        return routed_TD.view_as(x_BLD) + self.shared_experts(x_BLD), balance


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
