"""The small parts that every block shares: RMSNorm and the squared ReLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        normed = F.rms_norm(at_least_fp32(x), (x.shape[-1],), eps=self.eps)
        return (self.weight * normed).to(x.dtype)


class GatedGroupRMSNorm(nn.Module):
    """Mamba-2's output norm: the RMS of x * silu(z) is taken a group (size d_inner / n_groups), not the whole width."""

    def __init__(self, size: int, num_groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.num_groups = num_groups
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        gated = at_least_fp32(x) * F.silu(at_least_fp32(z))
        grouped = gated.unflatten(-1, (self.num_groups, -1))
        normed = F.rms_norm(grouped, (grouped.shape[-1],), eps=self.eps).flatten(-2)
        return (self.weight * normed).to(z.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2, the activation of every feed-forward part of Nemotron (So et al. 2021, Primer)."""
    return F.relu(x).square()


class MLP(nn.Module):
    """Dense feed-forward with squared ReLU and no gate: `-` blocks and the shared expert of `E` blocks."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(squared_relu(self.up_proj(x)))
