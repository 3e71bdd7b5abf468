"""The small parts that every block shares: RMSNorm, the squared ReLU, and the dense feed-forward layer.

`Linear` of `kernels/linear.py` is `nn.Linear` without bias. Next: `attention.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nemotron.stack.models.kernels.linear import Linear


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or in float64 when it already is: where bf16 would lose what matters."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32 and returned in the dtype of x. Shape [..., D] -> [..., D]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = NormalizeRMS.apply(at_least_fp32(x), self.weight, self.eps)
        return normed.to(x.dtype)


class GatedGroupRMSNorm(nn.Module):
    """Mamba-2's output norm: the RMS of x * silu(z) is taken a group (size d_inner / n_groups), not the whole width."""

    def __init__(self, size: int, num_groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.num_groups = num_groups
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        gated = at_least_fp32(x) * F.silu(at_least_fp32(z))
        groups = (self.num_groups, -1)
        normed: Tensor = NormalizeRMS.apply(gated.unflatten(-1, groups), self.weight.unflatten(-1, groups), self.eps)
        return normed.flatten(-2).to(z.dtype)


class NormalizeRMS(torch.autograd.Function):
    """y = x r w with r = (mean x^2 + eps)^-1/2 over the last dimension; the weight has the last dimensions of x.

    The gradient in fewer passes over memory than autograd makes, with e = dy x:

        dw = sum_tokens e r        dx = dy w r - x (r^3 / d) sum_d(e w)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        rstd = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (x * rstd).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (dy,) = grads
        x, weight, rstd = ctx.saved_tensors
        dyw, e = dy * weight, dy * x
        along_x = (dyw * x).sum(-1, keepdim=True).mul_(rstd.pow(3)).div_(-x.shape[-1])
        dx = dyw.mul_(rstd).addcmul_(x, along_x)
        dw = e.mul_(rstd).sum_to_size(weight.shape)
        return dx, dw, None


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2, the activation of every feed-forward part of Nemotron (So et al. 2021, Primer)."""
    out: Tensor = SquaredReLU.apply(x)
    return out


class SquaredReLU(torch.autograd.Function):
    """y = relu(x)^2, dx = 2 relu(x) dy: one pass over memory where autograd makes four."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        relu = F.relu(x)
        ctx.save_for_backward(relu)
        return relu * relu

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (relu,) = ctx.saved_tensors
        return (grads[0] * relu).mul_(2)


class MLP(nn.Module):
    """Dense feed-forward with squared ReLU and no gate: `-` blocks and the shared expert of `E` blocks."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(squared_relu(self.up_proj(x)))
