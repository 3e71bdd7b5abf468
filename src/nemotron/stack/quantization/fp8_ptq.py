"""FP8 for a finished model: E4M3 values with one fp32 scale a tensor or a channel, as ModelOpt's `FP8QTensor`.

    x  ~  value * scale         scale = max |x| / 448

`fp8.py` has the blockwise scheme of FP8 training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemotron.stack.quantization.fp8 import E4M3_MAX


@dataclass(frozen=True)
class FP8:
    """codes: float8_e4m3fn, the tensor's shape. scale: fp32 scalar, or [..., 1, C, 1, ...] for scales along an axis."""

    codes: Tensor
    scale: Tensor

    def dequantize(self) -> Tensor:
        """value * scale, fp32."""
        return self.codes.float() * self.scale


def quantize_fp8(x: Tensor, axis: int | None = None, scale: Tensor | None = None) -> FP8:
    """x in E4M3, to the nearest value, ties to even; what is beyond 448 * scale saturates.

    Args:
        axis: the dimension whose indices have a scale each: 0 for the output channels of a weight [N, K]; None: one
            scale for the tensor.
        scale: a calibrated one; None: max |x| / 448, and 1 where all values are zero.

    A scale from an infinite value or a NaN makes NaN of everything that shares it.
    """
    x = x.float()
    if scale is None:
        others = [dim for dim in range(x.dim()) if axis is None or dim != axis % x.dim()]
        scale = scale_of(x.abs().amax(others, keepdim=axis is not None))
    return FP8((x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale)


def scale_of(amax: Tensor) -> Tensor:
    """amax / 448, fp32; 1 for a tensor of zeros. `amax`: max |x|."""
    scale = amax.float() / E4M3_MAX
    return scale.masked_fill(scale == 0, 1.0)


def fake_fp8(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """What FP8 leaves of x, in the dtype of x: quantised and dequantised."""
    return quantize_fp8(x, scale=scale).dequantize().to(x.dtype)
