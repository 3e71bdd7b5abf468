"""The SSM state of Mamba-2 kept in FP16 between decoding steps, with stochastic rounding (Nemotron 3 Super).

A state sums over the whole past, h_t = a_t h_{t-1} + dt_t B_t x_t^T. What a token adds may be less than half a step of
FP16, which has 10 mantissa bits. Rounding to the nearest value would then lose every such addition; stochastic rounding
keeps their mean.

The published kernels (FlashInfer's `selective_state_update`, vLLM's `mamba_cache_philox_rounds: 5`) compute a step in
fp32, read y = C h from the state in registers, and store it with `cvt.rs.f16x2.f32`: 13 random bits are added to the 13
mantissa bits that FP16 lacks, which are then cut off. The bits come from Philox4x32 with 5 rounds instead of the usual
10. Emulated here: the same rounding of the state between steps, with as many random bits, and y from the state before
it. Not emulated: which bits they are (a torch generator's), and memory: values of FP16 lie in an fp32 tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MANTISSA_BITS = 10
SMALLEST_EXPONENT = -14  # below 2^-14 values of FP16 are 2^-24 apart
FP16_MAX = 65504.0
RANDOM_BITS = 13  # 23 mantissa bits of fp32 - 10 of FP16


def fp16_state(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """What a `Mamba2` takes as `round_state`; draws its random bits from the generator."""

    def round_state(state: Tensor) -> Tensor:
        bits = torch.randint(1 << RANDOM_BITS, state.shape, generator=generator, device=state.device)
        return round_to_fp16(state, bits)

    return round_state


def round_to_fp16(x: Tensor, bits: Tensor) -> Tensor:
    """FP16 values, in fp32, of x in fp32: one of the two neighbours a <= x <= b.

    b where bits / 2^13 < (x - a) / (b - a). `bits` are integers in 0 .. 2^13 - 1, in the shape of x. The mean over all
    of them is x, exactly for |x| from 2^-14 to 65504, and to 2^-37 below; larger ones saturate, a NaN stays.
    """
    x = x.clamp(-FP16_MAX, FP16_MAX)
    _, exponent = torch.frexp(x)  # |x| in [2^(exponent - 1), 2^exponent)
    step = torch.exp2((exponent - 1).clamp(min=SMALLEST_EXPONENT).float() - MANTISSA_BITS)
    count = x / step
    below = count.floor()
    return (below + (bits < (count - below) * (1 << RANDOM_BITS))) * step
