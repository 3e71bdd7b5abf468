"""The routed experts of an `E` block, with their gradient: out[t] = sum_k weights[t, k] down[e] relu(up[e] x[t])^2.

    for t, k: out[t] += weights[t, k] * down[chosen[t, k]] @ relu(up[chosen[t, k]] @ x[t]) ** 2

Choices are sorted by expert, so that each expert multiplies its tokens at once. Where one batched product is several
times as fast as one for each expert (on a CPU bf16 through oneDNN, and the few rows of a decoding step), all experts
get equally many rows. A GPU multiplies bf16 rows of all experts at once, however many each has.

Shapes: T tokens, D hidden, E experts, K experts a token, F expert width, R = T K choices, S rows sorted by
expert; a matrix is [O, I].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron.stack.models.kernels.linear import ROW_MULTIPLE, Rounding, matmul_nt, onednn_serves, rounded

# How the experts' products are computed, by transformers' names: one by one ("eager"), as a batch of equally many rows,
# or as PyTorch's grouped product.
Implementation = Literal["eager", "batched_mm", "grouped_mm"]
# Of a batched product: each expert's rows are a multiple; those of all are at most so many times as without batching.
BATCHED_MULTIPLE, MAX_PADDING = 16, 3


class RoutedExperts(torch.autograd.Function):
    """out[t] = sum_k weights[t, k] * down[e] relu(up[e] x[t])^2 with e = chosen[t, k].

    Rows are sorted by expert, so each expert is two plain matmuls on a contiguous slice, or all are two batched ones.
    Autograd over that would record thousands of small slices; the gradient is short enough to write down:

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
        num_experts, width, _ = up_EFD.shape
        rows = dispatch(chosen_TK, num_experts, *choose_implementation(x_TD, chosen_TK.numel() // num_experts, width))
        slot_TK, token_S = rows.slot_TK, rows.token_S
        x_SD = x_TD.index_select(0, token_S)  # copies whole rows; x_TD[token_S] takes three times as long
        relu_SF = rows.products(x_SD, up_EFD).relu_()
        active_SF = rounded(relu_SF * relu_SF, round_active)
        y_SD = rows.products(active_SF, down_EDF)
        ctx.save_for_backward(x_SD, y_SD, weights_TK, slot_TK, token_S, up_EFD, down_EDF, relu_SF)
        ctx.rows, ctx.round_active = rows, round_active
        return weighted_sum(y_SD, slot_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None, Tensor | None, None]:
        (grad_TD,) = grads
        x_SD, y_SD, weights_TK, slot_TK, token_S, up_EFD, down_EDF, relu_SF = ctx.saved_tensors
        rows: ExpertRows = ctx.rows
        grad_SD = grad_TD.index_select(0, token_S)
        grad_weights_TK = (grad_SD * y_SD).sum(-1)[slot_TK].to(weights_TK.dtype)
        grad_y_SD = grad_SD.mul_(rows.weights(weights_TK.to(grad_TD.dtype)).unsqueeze(-1))
        grad_pre_SF = rows.products(grad_y_SD, down_EDF.transpose(1, 2)).mul_(relu_SF).mul_(2)
        grad_x_SD = rows.products(grad_pre_SF, up_EFD.transpose(1, 2))
        grad_up = grad_down = None
        if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
            active_SF = rounded(relu_SF * relu_SF, ctx.round_active)
            grad_down, grad_up = rows.outer(grad_y_SD, active_SF), rows.outer(grad_pre_SF, x_SD)
        return F.embedding_bag(slot_TK, grad_x_SD, mode="sum"), grad_weights_TK, None, grad_up, grad_down, None


def weighted_sum(y_SD: Tensor, slot_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """sum_k weights[t, k] y[slot[t, k]], [T, D], in one pass, where indexing, multiplying and adding would be three.

    Weights and sum are fp32, the result is of the dtype of y: with 22 choices of a token, bf16 would round 22 times.
    """
    return F.embedding_bag(slot_TK, y_SD.to(weights_TK.dtype), per_sample_weights=weights_TK, mode="sum").to(y_SD.dtype)


@dataclass
class ExpertRows:
    """The rows of all choices, sorted by expert, as matrix products take them.

    slot_TK: the row of each choice. token_S: the token of each row. capacity: rows of every expert, where all have
    equally many and are multiplied at once, else 0. ends_E: int32, where the rows of each expert end, for PyTorch's
    grouped product, and choice_S: the choice of each row, of T K; else None. slices: the rows of every expert that
    has some, where they are multiplied one by one, through oneDNN or not.
    """

    num_experts: int
    slot_TK: Tensor
    token_S: Tensor
    slices: list[tuple[int, slice]]
    capacity: int = 0
    onednn: bool = False
    ends_E: Tensor | None = None
    choice_S: Tensor | None = None

    def weights(self, weights_TK: Tensor) -> Tensor:
        """The weight of each row, 0 of padding: [S]."""
        if self.choice_S is not None:
            return weights_TK.flatten().index_select(0, self.choice_S)
        weight_S = weights_TK.new_zeros(len(self.token_S))
        weight_S[self.slot_TK] = weights_TK
        return weight_S

    def products(self, x_SI: Tensor, weight_EOI: Tensor) -> Tensor:
        """x W^T of each expert's rows and its matrix: [S, in] and [E, out, in] -> [S, out]."""
        if self.capacity:
            return torch.bmm(self._by_expert(x_SI), weight_EOI.transpose(1, 2)).flatten(0, 1)
        if self.ends_E is not None:
            return F.grouped_mm(x_SI, weight_EOI.transpose(1, 2), offs=self.ends_E)
        out_SO = x_SI.new_empty(len(x_SI), weight_EOI.shape[1])
        for expert, rows in self.slices:
            matmul_nt(x_SI[rows], weight_EOI[expert], out_SO[rows], self.onednn)
        return out_SO

    def outer(self, dy_SO: Tensor, x_SI: Tensor) -> Tensor:
        """dy^T x of each expert's rows, the gradient of its matrix: [S, out] and [S, in] -> [E, out, in]."""
        if self.capacity:
            return torch.bmm(self._by_expert(dy_SO).transpose(1, 2), self._by_expert(x_SI))
        if self.ends_E is not None:
            dw_EOI = F.grouped_mm(dy_SO.T, x_SI, offs=self.ends_E)
            # On Blackwell it may leave uninitialised memory where an expert has no rows (pytorch#172439, open).
            is_empty_E = self.ends_E.diff(prepend=self.ends_E.new_zeros(1)) == 0
            return dw_EOI.masked_fill_(is_empty_E.view(-1, 1, 1), 0)
        dw_EOI = x_SI.new_zeros(self.num_experts, dy_SO.shape[1], x_SI.shape[1])
        for expert, rows in self.slices:
            matmul_nt(dy_SO[rows].T, x_SI[rows].T, dw_EOI[expert], self.onednn)
        return dw_EOI

    def _by_expert(self, x_SI: Tensor) -> Tensor:
        return x_SI.view(self.num_experts, self.capacity, -1)


def choose_implementation(x_TD: Tensor, rows_per_expert: int, width: int) -> tuple[int, Implementation]:
    """Of `dispatch`, what suits products of such rows with experts of `width`: multiple, implementation.

    oneDNN compiles a product for each shape, so it gets rows by the multiple. In bf16 it multiplies all experts in one
    call, several times as fast as one by one. A GPU's grouped product reads 16 bytes at once; it is one kernel on
    Hopper and Blackwell, and a loop over experts on others.
    """
    if x_TD.dtype == torch.bfloat16 and x_TD.device.type == "cpu":
        return BATCHED_MULTIPLE, "batched_mm"
    if x_TD.dtype == torch.bfloat16 and x_TD.device.type == "cuda" and not (x_TD.shape[-1] % 8 or width % 8):
        return 1, "grouped_mm"
    return (ROW_MULTIPLE if onednn_serves(x_TD) and rows_per_expert >= ROW_MULTIPLE else 1), "eager"


def dispatch(
    chosen_TK: Tensor, num_experts: int, multiple: int = 1, implementation: Implementation = "eager"
) -> ExpertRows:
    """Give every choice a row among those of its expert, each expert's rows padded to a multiple of `multiple`.

    "batched_mm": all to the rows of the expert with most, unless most of the rows would be padding: then it is "eager".
    """
    rows = equal_rows(chosen_TK, num_experts, multiple) if implementation == "batched_mm" else None
    return rows or sorted_rows(chosen_TK, num_experts, multiple, implementation)


def equal_rows(chosen_TK: Tensor, num_experts: int, multiple: int) -> ExpertRows | None:
    """Rows of which every expert has as many as the one with most; None where most of them would be padding."""
    expert_1R = chosen_TK.reshape(1, -1)
    is_chosen_ER = expert_1R == torch.arange(num_experts, device=chosen_TK.device).unsqueeze(1)
    counts_ER = is_chosen_ER.cumsum(1)  # how many of an expert's choices there are up to each choice
    padded = [-(-count // multiple) * multiple for count in counts_ER[:, -1].tolist()]
    capacity = max(padded)
    if capacity * num_experts > MAX_PADDING * sum(padded):
        return None
    slot_R = (expert_1R * capacity).add_(counts_ER.gather(0, expert_1R)).sub_(1).squeeze(0)
    return ExpertRows(num_experts, *_slots(slot_R, num_experts * capacity, chosen_TK), [], capacity)


def sorted_rows(chosen_TK: Tensor, num_experts: int, multiple: int, implementation: Implementation) -> ExpertRows:
    """Rows sorted by expert, one's behind another's."""
    sorted_R, order_R = chosen_TK.flatten().sort(stable=True)
    # Where each expert's rows end. `bincount` would ask the device for the largest index.
    last_E = torch.searchsorted(sorted_R, torch.arange(num_experts, device=sorted_R.device), right=True)
    if implementation == "grouped_mm":
        # By a second sort: writing by index sorts, too, where sums have one order, and takes 0.2 ms to be launched.
        assert multiple == 1
        slot_TK = order_R.argsort().view_as(chosen_TK)
        token_S = order_R.div(chosen_TK.shape[1], rounding_mode="floor")
        return ExpertRows(num_experts, slot_TK, token_S, [], ends_E=last_E.int(), choice_S=order_R)
    counts_E = last_E.diff(prepend=last_E.new_zeros(1))
    padded_E = (counts_E + multiple - 1).div(multiple, rounding_mode="floor") * multiple
    moved_E = (padded_E.cumsum(0) - padded_E) - (last_E - counts_E)  # how far padding has moved an expert's first row
    slot_R = torch.empty_like(order_R)
    slot_R[order_R] = torch.arange(len(order_R), device=order_R.device) + moved_E[sorted_R]
    slices, start = [], 0
    for expert, count in enumerate(padded_E.tolist()):
        if count:
            slices.append((expert, slice(start, start + count)))
        start += count
    onednn = multiple > 1 and implementation == "eager"
    return ExpertRows(num_experts, *_slots(slot_R, start, chosen_TK), slices, onednn=onednn)


def _slots(slot_R: Tensor, num_rows: int, chosen_TK: Tensor) -> tuple[Tensor, Tensor]:
    """slot_TK and token_S of the rows; padding is of token 0."""
    token_S = slot_R.new_zeros(num_rows)
    token_S[slot_R] = torch.arange(len(slot_R), device=slot_R.device) // chosen_TK.shape[1]
    return slot_R.view_as(chosen_TK), token_S
