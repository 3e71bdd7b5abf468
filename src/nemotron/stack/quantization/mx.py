"""MXFP8 and MXFP4: blocks of 32 values that share a power of two (OCP Microscaling Formats 1.0), as ModelOpt rounds.

A value is E4M3 (MXFP8) or E2M1 (MXFP4); a scale is a byte e that stands for 2^(e - 127) (E8M0, 255 is NaN):

    x  ~  value * 2^(e - 127)           e - 127 = ceil(log2(max |x| / 448)), or / 6 for MXFP4

With the ceiling no value is beyond the format's largest. The standard's own rule, floor(log2(max |x|)) - 8 (2 for
MXFP4), saturates some; `torchao.py` has it. Super 3 keeps the Mamba out_proj in MXFP8 while all around it is in NVFP4.

Shapes: [..., K] with K a multiple of 32; [..., K/32] its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from nemotron.stack.quantization.fp8 import E4M3_MAX
from nemotron.stack.quantization.nvfp4 import (
    E2M1_MAX,
    E2M1_VALUES,
    blocks_of,
    e2m1_values,
    pack_codes,
    unpack_codes,
)

BLOCK = 32
BIAS = 127  # of an E8M0 exponent
NAN_SCALE = 255


@dataclass(frozen=True)
class MX:
    """A tensor [..., K] in MXFP8 or MXFP4.

    codes: float8_e4m3fn [..., K], or uint8 [..., K/2] with two E2M1 codes a byte, packed as in NVFP4. scales: uint8
    [..., K/32], biased exponents.
    """

    codes: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """value * 2^(scale - 127), fp32 [..., K]."""
        values = e2m1_values(unpack_codes(self.codes)) if self.codes.dtype == torch.uint8 else self.codes.float()
        return (blocks_of(values, BLOCK) * power_of_two(self.scales).unsqueeze(-1)).flatten(-2)


def quantize_mxfp8(x: Tensor) -> MX:
    """x [..., K] in MXFP8: E4M3 values, nearest, ties to even. Raises ValueError where K is no multiple of 32."""
    blocks, scales = blocks_of(x.float(), BLOCK), exponents(x, E4M3_MAX)
    values = blocks * power_of_two(2 * BIAS - scales.int()).unsqueeze(-1)
    return MX(values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2), scales)


def quantize_mxfp4(x: Tensor) -> MX:
    """x [..., K] in MXFP4: E2M1 values, nearest, ties towards zero. Raises ValueError where K is no multiple of 32.

    As in ModelOpt zero has the code 8, that of -0, and a block with a NaN becomes zeros.
    """
    blocks = blocks_of(x.float(), BLOCK)
    blocks = blocks.masked_fill(blocks.isnan().any(-1, keepdim=True), 0.0)
    scales = exponents(blocks.flatten(-2), E2M1_MAX)
    values = (blocks / power_of_two(scales).unsqueeze(-1)).flatten(-2)
    midpoints = values.new_tensor([(a + b) / 2 for a, b in pairwise(E2M1_VALUES)])
    index = torch.bucketize(values.abs(), midpoints)  # a midpoint belongs to the value below it
    return MX(pack_codes(index.to(torch.uint8) | (values <= 0).to(torch.uint8) << 3), scales)


def fake_mxfp8(x: Tensor) -> Tensor:
    """What MXFP8 leaves of x, in the dtype of x."""
    return quantize_mxfp8(x).dequantize().to(x.dtype)


def exponents(x: Tensor, largest: float) -> Tensor:
    """127 + ceil(log2(max |x| / largest)) of each block, uint8 [..., K/32]; exact, without a logarithm.

    0 for a block of zeros or with a NaN, 254 for one with an infinite value.
    """
    mantissa, exponent = torch.frexp(blocks_of(x.float(), BLOCK).abs().amax(-1) / largest)  # mantissa in [0.5, 1)
    scales = (exponent - (mantissa == 0.5).int()).clamp(-BIAS, BIAS) + BIAS
    return scales.masked_fill(~(mantissa > 0), 0).masked_fill(mantissa.isinf(), 2 * BIAS).to(torch.uint8)


def power_of_two(scales: Tensor) -> Tensor:
    """2^(scale - 127) in fp32, exact, of biased exponents; NaN for 255."""
    return torch.exp2(scales.float() - BIAS).masked_fill(scales == NAN_SCALE, torch.nan)
