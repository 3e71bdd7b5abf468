"""NVFP4, MXFP8 and MXFP4 with the roundings of torchao, where they differ from ModelOpt's (`nvfp4.py`, `mx.py`).

| | ModelOpt | torchao |
|---|---|---|
| NVFP4: value | x / (scale * global) | x * ((1 / global) / scale) |
| NVFP4: scale of a block | at least 2^-9; of zeros 1 | at least 2^-6, of zeros too |
| NVFP4: negative zero | becomes 0 | stays |
| MXFP4: ties, code of 0 | towards zero, 8 | to the even code, 0 |
| MX: exponent of a scale | ceil(log2(amax / largest)) | four rules, "rceil" is ModelOpt's |
| MX: block with inf or NaN | scale 2^127 or 2^-127 | scale NaN |

On ordinary values both give the same codes: they part on exact ties, small blocks and subnormal numbers. The shapes are
those of `nvfp4.py` and `mx.py`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nemotron.stack.quantization import mx
from nemotron.stack.quantization.fp8 import E4M3_MAX
from nemotron.stack.quantization.mx import MX
from nemotron.stack.quantization.nvfp4 import (
    E2M1_MAX,
    NVFP4,
    blocks_of,
    e2m1_values,
    global_scale_of,
    pack_codes,
    steps_of,
    unpack_codes,
)

SMALLEST_SCALE = 2.0**-6  # the smallest normal E4M3 value

Scaling = Literal["floor", "rceil", "ceil", "even"]


def quantize_nvfp4(x: Tensor, two_level: bool = True) -> NVFP4:
    """x [..., K] in NVFP4 (`NVFP4Tensor.to_nvfp4`); without `two_level` the global scale is 1."""
    x = x.float()
    blocks = blocks_of(x)
    global_scale = global_scale_of(x.abs().amax()) if two_level else torch.ones((), device=x.device)
    scales = blocks.abs().amax(-1) / E2M1_MAX / global_scale
    scales = scales.clamp(SMALLEST_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)
    values = blocks * ((1.0 / global_scale) / scales.float()).unsqueeze(-1)
    return NVFP4(pack_codes(_e2m1_codes(values.flatten(-2))), scales, global_scale)


def dequantize_nvfp4(quantized: NVFP4) -> Tensor:
    """value * (global_scale * scale), fp32 [..., K]; keeps negative zeros."""
    values = blocks_of(e2m1_values(unpack_codes(quantized.codes)))
    return (values * steps_of(quantized.scales, quantized.global_scale)).flatten(-2)


def quantize_mxfp8(x: Tensor, scaling: Scaling = "floor") -> MX:
    """x [..., K] in MXFP8 with E4M3 values (`to_mx`)."""
    scales = _exponents(x, scaling, E4M3_MAX, mantissa_bits=3)
    return MX(_scaled(x, scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales)


def quantize_mxfp4(x: Tensor, scaling: Scaling = "floor") -> MX:
    """x [..., K] in MXFP4 (`to_mx`): ties to the even code."""
    scales = _exponents(x, scaling, E2M1_MAX, mantissa_bits=1)
    return MX(pack_codes(_e2m1_codes(_scaled(x, scales))), scales)


def _exponents(x: Tensor, scaling: Scaling, largest: float, mantissa_bits: int) -> Tensor:
    """Biased exponents, uint8 [..., K/32], of the scales; p below is that of `largest`, 8 or 2.

    floor: floor(log2 amax) - p. ceil: ceil(log2 amax) - p. even: floor of amax rounded to the format's mantissa, half
    up, - p. rceil: ceil(log2(amax / largest)).
    """
    amax = blocks_of(x.float(), mx.BLOCK).abs().amax(-1)
    if scaling == "rceil":
        scales = mx.exponents(x, largest).int()
    else:
        mantissa, exponent = torch.frexp(amax)  # mantissa in [0.5, 1)
        if scaling == "ceil":
            exponent = exponent + (mantissa > 0.5)
        elif scaling == "even":
            exponent = exponent + (mantissa + 2.0 ** -(mantissa_bits + 2) >= 1)
        power = 8 if largest == E4M3_MAX else 2
        scales = (exponent - 1 - power).clamp(-mx.BIAS, mx.BIAS) + mx.BIAS
        scales = scales.masked_fill(amax == 0, 0)
    return scales.masked_fill(~amax.isfinite(), mx.NAN_SCALE).to(torch.uint8)


def _scaled(x: Tensor, scales: Tensor) -> Tensor:
    """x * 2^(127 - scale), fp32 [..., K]; NaN where the scale is."""
    factors = mx.power_of_two((2 * mx.BIAS - scales.int()).masked_fill(scales == mx.NAN_SCALE, mx.NAN_SCALE))
    return (blocks_of(x.float(), mx.BLOCK) * factors.unsqueeze(-1)).flatten(-2)


def _e2m1_codes(values: Tensor) -> Tensor:
    """Four-bit codes, uint8, by rounding the bits of fp32 to one mantissa bit, ties to even; beyond 6, 6.

    A NaN has the code that its own bits leave, which depends on where it comes from; its block's scale is NaN as well.
    """
    values = values.clamp(-E2M1_MAX, E2M1_MAX)
    bits = values.abs().view(torch.int32)
    rounded = (bits + 0x1FFFFF + (bits >> 22 & 1) >> 22) - 252  # 1.0 is 254 << 22 and has the index 2
    index = torch.where(values.abs() < 1, (values.abs() * 2).round().int(), rounded) & 7
    return index.to(torch.uint8) | values.signbit().to(torch.uint8) << 3
