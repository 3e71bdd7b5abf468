"""The causal depthwise convolution of Mamba-2, with its gradient written down.

Shapes: B batch, L length, c channels, K width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class CausalConv(torch.autograd.Function):
    """y[t] = bias + sum_s w[s] x[t - s] over the shifts s = 0 .. K-1 that stay within the document.

    K multiply-adds on slices keep the [B, L, c] layout; a Conv1d would transpose twice and cannot stop at a boundary.
    The gradient is written down because autograd would fill and pad a whole tensor for each shift:

        dx[t] = sum_s w[s] dy[t + s]      dw[s] = sum_t dy[t] x[t - s]      dbias = sum_t dy[t]
    """

    @staticmethod
    def forward(ctx: Any, x_BLc: Tensor, weight_c1K: Tensor, bias_c: Tensor, seq_idx_BL: Tensor | None) -> Tensor:
        taps_Kc = weight_c1K.squeeze(1).T.flip(0).contiguous()  # taps_Kc[s] multiplies x[t - s]
        out_BLc = torch.addcmul(bias_c, x_BLc, taps_Kc[0])
        for shift in range(1, min(len(taps_Kc), x_BLc.shape[1])):
            source = _within(x_BLc[:, :-shift], seq_idx_BL, shift)
            out_BLc[:, shift:].addcmul_(source, taps_Kc[shift])
        ctx.save_for_backward(x_BLc, taps_Kc)
        ctx.seq_idx_BL = seq_idx_BL
        return out_BLc

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (grad_BLc,) = grads
        x_BLc, taps_Kc = ctx.saved_tensors
        grad_x_BLc = grad_BLc * taps_Kc[0]
        grad_taps_Kc = torch.zeros_like(taps_Kc)
        grad_taps_Kc[0] = (grad_BLc * x_BLc).sum((0, 1))
        for shift in range(1, min(len(taps_Kc), x_BLc.shape[1])):
            arriving = _within(grad_BLc[:, shift:], ctx.seq_idx_BL, shift)
            grad_x_BLc[:, :-shift].addcmul_(arriving, taps_Kc[shift])
            grad_taps_Kc[shift] = (arriving * x_BLc[:, :-shift]).sum((0, 1))
        return grad_x_BLc, grad_taps_Kc.flip(0).T.unsqueeze(1), grad_BLc.sum((0, 1)), None


def _within(values_BTc: Tensor, seq_idx_BL: Tensor | None, shift: int) -> Tensor:
    """Values of T = L - shift pairs of positions (t - shift, t), zero where the two are of different documents."""
    if seq_idx_BL is None:
        return values_BTc
    return values_BTc * (seq_idx_BL[:, shift:] == seq_idx_BL[:, :-shift]).unsqueeze(-1)
