"""Linear layers without bias, through oneDNN where that is faster: fp32 on AMD's processors with AVX-512.

PyTorch multiplies fp32 matrices with MKL, which does without AVX-512 on AMD processors; oneDNN, which is part of every
x86 build, uses it on all. At the sizes of small models, MKL is 1.1 to 1.6 times as fast on Intel's processors, and on
one of AMD's without AVX-512 0.9 to 1.5 times with 2,048 rows and 1.1 to 2.6 times with 512 (`benchmarks/linear.py`
prints the ratio on this machine). oneDNN compiles a kernel for each new shape, a fraction of a millisecond, so shapes
that keep changing stay with MKL.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

HAS_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and platform.machine() in ("x86_64", "AMD64")
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # the operator that torch.compile emits for a linear layer
)
CPU_INFO = Path("/proc/cpuinfo")
HAS_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
MKL_IS_FASTER = not HAS_AVX512 or (CPU_INFO.is_file() and "GenuineIntel" in CPU_INFO.read_text())
# What a model with quantised activations does to an operand of a product: [..., K] -> [..., K].
Rounding = Callable[[Tensor], Tensor]
# Shapes that stay: a training batch is such a number of tokens, an odd prompt or a decoding step is not.
MIN_ROWS = 256
ROW_MULTIPLE = 64


class Linear(nn.Linear):
    """`nn.Linear` without bias, x W^T. Shape [..., K] -> [..., N]; the weight is [N, K].

    In a quantised model (`quantization/layers.py`) `round_input` rounds x, and `round_output` what k_proj and v_proj
    give to the cache; None: nothing does.
    """

    round_input: Rounding | None = None
    round_output: Rounding | None = None

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return rounded(linear(rounded(x, self.round_input), self.weight), self.round_output)


def rounded(x: Tensor, rounding: Rounding | None) -> Tensor:
    """x, rounded where there is something that rounds."""
    return x if rounding is None else rounding(x)


def linear(x: Tensor, weight_NK: Tensor) -> Tensor:
    """x W^T as `F.linear`, by the faster of the two libraries."""
    rows = x.numel() // x.shape[-1]
    if rows >= MIN_ROWS and rows % ROW_MULTIPLE == 0 and onednn_serves(x) and onednn_serves(weight_NK):
        out: Tensor = OneDnnLinear.apply(x, weight_NK)
        return out
    return F.linear(x, weight_NK)


def onednn_serves(x: Tensor) -> bool:
    """Whether `matmul_nt` may take this tensor to oneDNN."""
    on_cpu = x.device.type == "cpu" and x.dtype == torch.float32
    return HAS_ONEDNN and not MKL_IS_FASTER and on_cpu and not torch.is_autocast_enabled("cpu")


def matmul_nt(a_MK: Tensor, b_NK: Tensor, out_MN: Tensor | None = None, onednn: bool = True) -> Tensor:
    """a b^T, [M, K] and [N, K] -> [M, N], either of which may be a transposed view. Records no gradient."""
    if not onednn:
        return torch.mm(a_MK, b_NK.T, out=out_MN)
    if a_MK.stride(1) != 1 and b_NK.shape[0] < a_MK.shape[0] and b_NK.stride(1) != 1:
        product = _onednn_nt(b_NK, a_MK).T  # the left factor is copied where it is transposed: let it be the smaller
    else:
        product = _onednn_nt(a_MK, b_NK)
    return product if out_MN is None else out_MN.copy_(product)


def _onednn_nt(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a_MK, b_NK, None, "none", [], "")
    return out


class OneDnnLinear(torch.autograd.Function):
    """y = x W^T, dx = dy W, dW = dy^T x, each through oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        product = matmul_nt(x.reshape(-1, x.shape[-1]).contiguous(), weight_NK)
        # As F.linear does: no view, to which FSDP2 could not attach its hooks safely. Nobody else has the product.
        out: Tensor = torch.ops.aten._unsafe_view(product, [*x.shape[:-1], len(weight_NK)])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        # Contiguous, because oneDNN falls back to a loop for strides such as those of an expanded tensor.
        dy_TN, x_TK = grads[0].reshape(-1, grads[0].shape[-1]).contiguous(), x.reshape(-1, x.shape[-1]).contiguous()
        dx = matmul_nt(dy_TN, weight_NK.T).view(x.shape) if ctx.needs_input_grad[0] else None
        dw_NK = matmul_nt(dy_TN.T, x_TK.T) if ctx.needs_input_grad[1] else None
        return dx, dw_NK
