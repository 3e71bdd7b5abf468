"""NVFP4: four-bit values with two levels of scales, as ModelOpt rounds them.

A value is E2M1 (sign, 2 exponent bits, 1 mantissa bit), so one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign. Sixteen
values along the dimension that a product sums over share a scale in E4M3 (at most 448), all of a tensor one in fp32:

    x  ~  value * (scale * global_scale)
    global_scale = max |x| / (6 * 448)              scale = E4M3(max |x| of the block / (6 * global_scale))

4 + 8/16 = 4.5 bits a value. Three ways to choose the scales of blocks:

- "max": the largest value of a block becomes 6 (ModelOpt, `NVFP4QTensor`).
- "mse": that of the 126 positive E4M3 values with the smallest squared error (ModelOpt, `NVFP4MSECalibrator`).
- "four_over_six": the largest value becomes 6 or 4, whichever has the smaller squared error; scales go up to 384, as
  the global scale is max |x| / (6 * 256) (arXiv 2512.02010).

A tensor with infinite or NaN values comes back as NaN, which the loss then shows; with a calibrated global scale, an
infinite value saturates, as all do that are beyond it. `torchao.py` has the same format with torchao's roundings.

Shapes: [..., K] a tensor whose last dimension is summed over, K a multiple of 16; [..., K/16] its blocks, b = K/16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BLOCK = 16
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX, E4M3_MIN = 448.0, 2.0**-9  # largest and smallest positive value
FOUR_OVER_SIX_MAX = 256.0  # times 6/4 it is still below 448

Scales = Literal["max", "mse", "four_over_six"]


@dataclass(frozen=True)
class NVFP4:
    """A tensor [..., K] in NVFP4.

    codes: uint8 [..., K/2], two values a byte, the one with the even index in the low four bits; a code is the sign in
    bit 3 and the index into `E2M1_VALUES`. scales: float8_e4m3fn [..., K/16]. global_scale: fp32 scalar, or [E, 1, 1]
    of a stack of matrices [E, N, K] with one each.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor

    def dequantize(self) -> Tensor:
        """value * (scale * global_scale), fp32 [..., K]; without negative zeros, as ModelOpt's table has none."""
        values = blocks_of(e2m1_values(unpack_codes(self.codes)))
        return (values * steps_of(self.scales, self.global_scale)).flatten(-2) + 0.0


def quantize_nvfp4(x: Tensor, *, global_scale: Tensor | None = None, scales: Scales = "max") -> NVFP4:
    """x [..., K] in NVFP4.

    Args:
        global_scale: where several tensors share one (q, k and v of an attention block), where each matrix of a stack
            has its own, or where it has been calibrated; None: from the largest value of x.
        scales: how a block's scale is chosen, see the module's docstring.

    Raises:
        ValueError: K is no multiple of 16.
    """
    x = x.float()
    if global_scale is None:
        global_scale = global_scale_of(x.abs().amax(), scales)
    return quantize_with_scales(x, choose_scales(x, global_scale, scales), global_scale)


def quantize_with_scales(x: Tensor, scales: Tensor, global_scale: Tensor) -> NVFP4:
    """x [..., K] in NVFP4 with given scales, float8_e4m3fn [..., K/16]: those of a calibration, kept frozen."""
    scaled = blocks_of(x.float()) / steps_of(scales, global_scale) + 0.0  # ModelOpt has no negative zero here
    return NVFP4(pack_codes(e2m1_codes(round_to_e2m1(scaled)).flatten(-2)), scales, global_scale)


def fake_nvfp4(
    x: Tensor,
    *,
    global_scale: Tensor | None = None,
    scales: Scales | Tensor = "max",
    generator: torch.Generator | None = None,
) -> Tensor:
    """What NVFP4 leaves of x [..., K], in the dtype of x: quantised and dequantised, without codes. No gradient.

    Args:
        global_scale: as in `quantize_nvfp4`.
        scales: how they are chosen, or the scales themselves, float8_e4m3fn [..., K/16].
        generator: round stochastically, with its random numbers (`round_to_e2m1`).
    """
    x32 = x.float()
    if global_scale is None:
        global_scale = global_scale_of(x32.abs().amax(), "max" if isinstance(scales, Tensor) else scales)
    if not isinstance(scales, Tensor):
        scales = choose_scales(x32, global_scale, scales)
    steps = steps_of(scales, global_scale)
    # Below 2^-128 a step may be rounded to 0, by which a zero may not be divided.
    values = round_to_e2m1(blocks_of(x32) / steps.clamp(min=2.0**-149), generator)
    return values.mul_(steps).flatten(-2).to(x.dtype)


# ---- scales


def global_scale_of(amax: Tensor, scales: Scales = "max") -> Tensor:
    """amax / (6 * 448), or amax / (6 * 256) for "four_over_six"; 1 for a tensor of zeros. `amax`: max |x|."""
    global_scale = amax.float() / (E2M1_MAX * (FOUR_OVER_SIX_MAX if scales == "four_over_six" else E4M3_MAX))
    return global_scale.masked_fill(global_scale == 0, 1.0)


def choose_scales(x: Tensor, global_scale: Tensor, scales: Scales = "max") -> Tensor:
    """The scale of each block, float8_e4m3fn [..., K/16], from x [..., K] in fp32. Raises ValueError as above."""
    blocks = blocks_of(x)
    if scales == "mse":
        return _scales_by_mse(blocks, global_scale)
    amax = blocks.abs().amax(-1)
    if scales == "max":
        return scales_of_amax(amax, global_scale)
    six, four = (scales_of_amax(amax, global_scale, largest, of_zeros=E4M3_MIN) for largest in (6.0, 4.0))
    error_of_six, error_of_four = (_squared_error(blocks, s, global_scale, torch.float64) for s in (six, four))
    return torch.where(error_of_four < error_of_six, four.float(), six.float()).to(torch.float8_e4m3fn)


def scales_of_amax(amax: Tensor, global_scale: Tensor, largest: float = E2M1_MAX, of_zeros: float = 1.0) -> Tensor:
    """E4M3(amax / (largest * global_scale)), at least 2^-9, nearest, ties to even; `amax`: max |x| of each block.

    What is above 448, where a calibrated global scale is too small, becomes 448. of_zeros: scale of a block of zeros.
    """
    scales = amax / (largest * global_scale)
    return scales.masked_fill(scales == 0, of_zeros).clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)


def steps_of(scales: Tensor, global_scale: Tensor) -> Tensor:
    """What a value of 1 stands for in each block, scale * global_scale, fp32 [..., K/16, 1]."""
    return (scales.float() * global_scale).unsqueeze(-1)


def e4m3_candidates(device: torch.device | None = None) -> Tensor:
    """The 126 positive values of E4M3 in ascending order, 2^-9 .. 448, fp32."""
    return torch.arange(1, 127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


def _scales_by_mse(blocks: Tensor, global_scale: Tensor) -> Tensor:
    """Of all E4M3 values the first with the smallest squared error, which is summed in fp32 over a block's values."""
    candidates = e4m3_candidates(blocks.device)
    best = candidates[0].expand(blocks.shape[:-1]).clone()
    smallest = torch.full_like(best, torch.inf)
    for candidate in candidates:
        error = _squared_error(blocks, candidate.expand_as(best), global_scale, torch.float32)
        is_better = error < smallest
        best, smallest = torch.where(is_better, candidate, best), torch.where(is_better, error, smallest)
    return best.to(torch.float8_e4m3fn)


def _squared_error(blocks: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    steps = steps_of(scales, global_scale)
    return round_to_e2m1(blocks / steps).mul_(steps).to(dtype).sub_(blocks).square_().sum(-1)


# ---- values and codes


@torch.no_grad()
def round_to_e2m1(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The E2M1 value nearest to x in fp32, of two the one with the even code; beyond 6, 6. Zero keeps its sign, too.

    With a generator: one of the two neighbours a <= x <= b, b with probability (x - a) / (b - a), so that the expected
    value is x up to |x| = 6; to 24 bits, those of a random number in fp32.
    """
    magnitude = x.abs().clamp_(max=E2M1_MAX)
    # Neighbours are apart by half the power of two below: 0.5 up to 2, 1 up to 4, 2 up to 6. Counted in such steps,
    # even numbers are those with even codes. The power of two is the number without its mantissa.
    step = (magnitude.clamp(min=1).view(torch.int32) & 0x7F800000).view(torch.float32).div_(2)
    count = magnitude.div_(step)
    if generator is None:
        count.round_()
    else:
        chance = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        count = count.floor() + (chance < count.frac())
    return count.mul_(step).copysign_(x)


def e2m1_codes(values: Tensor) -> Tensor:
    """Four-bit codes, uint8, of E2M1 values: sign in bit 3, index into `E2M1_VALUES` below; NaN becomes 7."""
    index = torch.bucketize(values.abs(), values.new_tensor(E2M1_VALUES[1:]), right=True).to(torch.uint8)
    return index | (values.signbit() & ~values.isnan()).to(torch.uint8) << 3


def e2m1_values(codes: Tensor) -> Tensor:
    """The fp32 values of four-bit codes, negative zero among them."""
    values = torch.tensor(E2M1_VALUES, device=codes.device)
    return torch.cat([values, -values])[codes.long()]


def pack_codes(codes: Tensor) -> Tensor:
    """Four-bit codes [..., K] two a byte, [..., K/2]; the one with the even index in the low bits."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_codes(packed: Tensor) -> Tensor:
    """[..., K/2] -> [..., K]."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def blocks_of(x: Tensor, size: int = BLOCK) -> Tensor:
    """[..., K] as [..., K/size, size]. Raises ValueError where K is no multiple of it."""
    if x.shape[-1] % size:
        raise ValueError(f"blocks of {size} values: the last dimension of {list(x.shape)} is no multiple of {size}")
    return x.unflatten(-1, (-1, size))
