"""NVFP4, FP8 and MX formats against the recorded values of ModelOpt and torchao, enumerations and closed forms."""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemotron.stack.quantization import mx, torchao
from nemotron.stack.quantization.fp8_ptq import fake_fp8, quantize_fp8
from nemotron.stack.quantization.nvfp4 import (
    E2M1_VALUES,
    choose_scales,
    e2m1_codes,
    e2m1_values,
    e4m3_candidates,
    fake_nvfp4,
    global_scale_of,
    pack_codes,
    quantize_nvfp4,
    quantize_with_scales,
    round_to_e2m1,
    unpack_codes,
)

RECORDED = json.loads(lzma.decompress((Path(__file__).parent / "recorded/quantization.json.xz").read_bytes()))

# Where ours is not theirs: what they divide by zero, or turn into NaN without a sign of it.
DIFFERENT = {
    "quantization/0060": "ModelOpt NVFP4, all zeros: theirs is NaN, ours zero",
    "quantization/0065": "torchao NVFP4, all zeros: theirs is NaN, ours zero",
    "quantization/0061": "ModelOpt FP8, all zeros: theirs is NaN, ours zero",
    "quantization/0062": "ModelOpt FP8 per channel, all zeros: theirs is NaN, ours zero",
    "quantization/0074": "ModelOpt FP8 per channel, rows of zeros: theirs are NaN, ours zero",
    "quantization/0087": "ModelOpt FP8 per channel, a row of zeros: theirs is NaN, ours zero",
    "quantization/0265": "ModelOpt FP8 per channel, a row of negative zeros: theirs is NaN, ours zero",
    "quantization/0278": "ModelOpt MXFP4, infinite: theirs makes zeros of the block, ours keeps the infinite value",
}


def fp32(hex_of_bytes: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(hex_of_bytes), dtype=torch.float32)


def as_hex(tensor: Tensor) -> str:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:32]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def input_of(case: dict[str, Any]) -> Tensor:
    tensor = RECORDED["tensors"][case["inputs"]["tensor"]]
    return fp32(tensor["float32_le_hex"]).view(tensor["shape"])


def ours(case: dict[str, Any]) -> tuple[dict[str, str], Tensor]:
    """What the variant of the case makes of its tensor, named and written as recorded, and the dequantised tensor."""
    x, options, name = input_of(case), case["options"], case["case"]
    if name == "modelopt_nvfp4_mse_sweep":
        nvfp4 = quantize_nvfp4(x, scales="mse")
        # ModelOpt keeps the maximum of a block that a scale stands for: 448 is the largest value of the tensor.
        return {"amax": as_hex(x.abs().amax() * (nvfp4.scales.float() / 448))}, nvfp4.dequantize()
    if name in ("modelopt_nvfp4", "four_over_six", "torchao_nvfp4"):
        if name == "torchao_nvfp4":
            nvfp4 = torchao.quantize_nvfp4(x, two_level=options["two_level"])
            back = torchao.dequantize_nvfp4(nvfp4)
        else:
            nvfp4 = quantize_nvfp4(x, scales="max" if name == "modelopt_nvfp4" else "four_over_six")
            back = nvfp4.dequantize()
        out = {"codes": as_hex(nvfp4.codes), "scales_e4m3": as_hex(nvfp4.scales)}
        return out | ({"global_scale": as_hex(nvfp4.global_scale)} if options.get("two_level", True) else {}), back
    if name.startswith("modelopt_fp8"):
        fp8 = quantize_fp8(x, options["axis"])
        return {"codes": as_hex(fp8.codes), "scales": as_hex(fp8.scale)}, fp8.dequantize()
    if name.startswith("modelopt_mx"):
        block = mx.quantize_mxfp8(x) if name == "modelopt_mxfp8" else mx.quantize_mxfp4(x)
    else:
        quantize = torchao.quantize_mxfp8 if name == "torchao_mxfp8_e4m3" else torchao.quantize_mxfp4
        block = quantize(x, options["scaling_mode"].lower())
    return {"codes": as_hex(block.codes), "scales_e8m0": as_hex(block.scales)}, block.dequantize()


@pytest.mark.parametrize("name", sorted({case["case"] for case in RECORDED["cases"]}))
def test_codes_scales_and_values_are_the_recorded_ones_bit_for_bit(name: str) -> None:
    differing = set()
    for case in RECORDED["cases"]:
        if case["case"] == name:
            recorded = dict(case["outputs"])
            recorded.pop("block_max", None)  # 4 or 6: scales and codes follow from it
            out, back = ours(case)
            if out | {"dequantized_sha256_32": digest(back)} != recorded:
                differing.add(case["id"])
    assert differing == {case["id"] for case in RECORDED["cases"] if case["case"] == name} & set(DIFFERENT)


def test_every_recorded_case_is_compared() -> None:
    counts = Counter(case["case"] for case in RECORDED["cases"])
    assert sum(counts.values()) == 340 and len(counts) == 10
    by_id = {case["id"]: case for case in RECORDED["cases"]}
    for identity in DIFFERENT:  # zeros stay zero, infinite values stay infinite: nothing turns into NaN
        x, (_, back) = input_of(by_id[identity]), ours(by_id[identity])
        assert not back.isnan().any()
        assert torch.equal(back[x == 0], x[x == 0]) and (back[x.isinf()] == x[x.isinf()]).all()
        assert (x == 0).all(-1).any() or x.isinf().any()


# ---- E2M1


def nearest_e2m1(x: float) -> float:
    """By looking at all of them: the nearest, of two the one with the even index; in exact arithmetic."""
    index = min(range(8), key=lambda i: (abs(abs(x) - E2M1_VALUES[i]), i % 2))
    return math.copysign(E2M1_VALUES[index], x)


def test_rounding_takes_the_nearest_value_and_the_even_code_on_ties() -> None:
    points = [i / 64 for i in range(-8 * 64, 8 * 64 + 1)]  # every tie is among them
    rounded = round_to_e2m1(torch.tensor(points))
    assert rounded.tolist() == [nearest_e2m1(x) for x in points]
    assert rounded.signbit().tolist() == [math.copysign(1, x) < 0 for x in points]
    ties = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1_VALUES)])
    above, below = torch.nextafter(ties, torch.tensor(9.0)), torch.nextafter(ties, torch.tensor(0.0))
    assert round_to_e2m1(above).tolist() == list(E2M1_VALUES[1:])
    assert round_to_e2m1(below).tolist() == list(E2M1_VALUES[:-1])


def test_codes_and_packing_are_inverse() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert e2m1_values(codes).tolist() == [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    assert torch.equal(e2m1_codes(e2m1_values(codes)), codes)
    packed = pack_codes(codes.view(2, 8))
    assert packed[0].tolist() == [0x10, 0x32, 0x54, 0x76] and torch.equal(unpack_codes(packed).flatten(), codes)


def test_stochastic_rounding_is_unbiased() -> None:
    """Mean of n roundings of x between neighbours a and b: x, with a standard error of sqrt((x - a)(b - x) / n)."""
    generator, n = torch.Generator().manual_seed(0), 20_000
    for a, x, b in ((0, 0.1, 0.5), (0.5, 0.7, 1), (1.5, 1.9, 2), (-3, -2.25, -2), (3, 3.9, 4), (-6, -5.5, -4)):
        rounded = round_to_e2m1(torch.full((n,), x), generator)
        assert set(rounded.tolist()) == {a, b}
        error = math.sqrt((x - a) * (b - x) / n)
        assert abs(rounded.double().mean().item() - x) < 5 * error
    for exact in (*E2M1_VALUES, 7.0):
        assert (round_to_e2m1(torch.full((100,), exact), generator) == min(exact, 6)).all()


# ---- NVFP4


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), spread=st.integers(0, 12), scales=st.sampled_from(["max", "mse", "four_over_six"]))
def test_fake_quantisation_is_quantisation_and_back(seed: int, spread: int, scales: Any) -> None:
    x = random(3, 64, seed=seed) * 2.0 ** torch.linspace(-spread, spread, 64)
    quantized = quantize_nvfp4(x, scales=scales)
    assert torch.equal(fake_nvfp4(x, scales=scales), quantized.dequantize())
    assert torch.equal(
        fake_nvfp4(x, global_scale=quantized.global_scale, scales=quantized.scales), quantized.dequantize()
    )
    again = quantize_with_scales(quantized.dequantize(), quantized.scales, quantized.global_scale)
    assert torch.equal(again.dequantize(), quantized.dequantize())
    assert fake_nvfp4(x.bfloat16(), scales=scales).dtype == torch.bfloat16


@pytest.mark.parametrize("scales", ["max", "mse", "four_over_six"])
def test_a_stack_with_a_scale_a_matrix_is_its_matrices_one_by_one(scales: Any) -> None:
    stack = random(3, 8, 32) * torch.tensor([1.0, 30.0, 0.01]).view(3, 1, 1)
    global_scale = global_scale_of(stack.abs().amax((1, 2), keepdim=True), scales)
    together = quantize_nvfp4(stack, global_scale=global_scale, scales=scales)
    for index, matrix in enumerate(stack):
        alone = quantize_nvfp4(matrix, scales=scales)
        assert torch.equal(together.codes[index], alone.codes)
        assert torch.equal(together.scales[index].float(), alone.scales.float())
        assert torch.equal(together.dequantize()[index], alone.dequantize())
        assert torch.equal(together.global_scale[index].squeeze(), alone.global_scale)


def test_the_sweep_and_four_over_six_never_have_a_larger_error_than_the_maximum() -> None:
    """The sweep tries the scale of the maximum as well; four-over-six does with its own global scale."""
    for seed, power in ((0, 1), (1, 3)):
        x = random(64, 64, seed=seed).sign() * random(64, 64, seed=seed).abs() ** power
        blocks = x.unflatten(-1, (-1, 16))

        def errors(scales: Any, x: Tensor = x, blocks: Tensor = blocks) -> Tensor:
            return (fake_nvfp4(x, scales=scales).unflatten(-1, (-1, 16)) - blocks).double().square().sum(-1)

        by_max, by_mse = errors("max"), errors("mse")
        assert (by_mse <= by_max * (1 + 1e-6)).all() and by_mse.sum() < 0.95 * by_max.sum()
        global_scale = global_scale_of(x.abs().amax(), "four_over_six")
        chosen = fake_nvfp4(x, global_scale=global_scale, scales="four_over_six").unflatten(-1, (-1, 16))
        six = fake_nvfp4(x, global_scale=global_scale, scales="max").unflatten(-1, (-1, 16))
        assert ((chosen - blocks).square().sum(-1) <= (six - blocks).square().sum(-1)).all()


def test_a_calibrated_global_scale_that_is_too_small_saturates() -> None:
    x = torch.full((1, 16), 100.0)
    out = fake_nvfp4(x, global_scale=global_scale_of(torch.tensor(1.0)))
    assert torch.allclose(out, torch.ones_like(x)) and choose_scales(x, torch.tensor(1e-9)).float().item() == 448


@pytest.mark.parametrize("scales", ["max", "mse", "four_over_six"])
def test_a_step_below_the_numbers_of_fp32_makes_no_nan(scales: Any) -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 2.0**-133, 2.0**-148
    assert not fake_nvfp4(x, scales=scales).isnan().any()


def test_candidates_are_all_positive_values_of_e4m3() -> None:
    subnormal = [m * 2.0**-9 for m in range(1, 8)]
    normal = [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)][:-1]  # the last one is NaN
    assert e4m3_candidates().tolist() == subnormal + normal and len(e4m3_candidates()) == 126


def test_what_does_not_divide_into_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 16"):
        quantize_nvfp4(torch.ones(2, 24))
    with pytest.raises(ValueError, match="blocks of 32"):
        mx.quantize_mxfp8(torch.ones(2, 48))


def test_a_value_that_is_not_finite_shows() -> None:
    for bad in (torch.nan, torch.inf):
        x = torch.ones(2, 32)
        x[0, 3] = bad
        for back in (fake_nvfp4(x), fake_nvfp4(x, scales="mse"), fake_nvfp4(x, scales="four_over_six"), fake_fp8(x)):
            assert back.isnan().any()
        assert not mx.fake_mxfp8(x).isfinite().all()


# ---- FP8 and MX


def test_fp8_scales_along_an_axis_or_as_calibrated() -> None:
    x = random(6, 40) * torch.arange(1, 7).unsqueeze(1)
    for axis, others in ((0, 1), (1, 0), (-1, 0)):
        fp8 = quantize_fp8(x, axis)
        scale = x.abs().amax(others, keepdim=True) / 448
        assert torch.equal(fp8.scale, scale)
        assert torch.equal(fp8.dequantize(), (x / scale).to(torch.float8_e4m3fn).float() * scale)
    calibrated = quantize_fp8(x, scale=torch.tensor(0.001))
    assert calibrated.dequantize().abs().max() == torch.tensor(448.0) * torch.tensor(0.001)
    assert fake_fp8(x.bfloat16()).dtype == torch.bfloat16


def test_mx_scales_are_the_least_power_of_two_that_holds_the_block() -> None:
    amax = torch.cat([torch.logspace(-30, 30, 200, base=2), 448 * 2.0 ** torch.arange(-8, 8), torch.tensor([449.0])])
    x = torch.zeros(len(amax), 32)
    x[:, 5] = -amax
    scales = mx.exponents(x, 448.0).squeeze(-1).int() - 127
    assert (448 * 2.0**scales >= amax).all() and (448 * 2.0 ** (scales - 1) < amax).all()
    assert mx.exponents(torch.zeros(1, 32), 448.0).item() == 0
    assert mx.quantize_mxfp8(torch.zeros(1, 32)).dequantize().abs().max() == 0


# ---- the table of docs/architecture/quantization.md

PAGE = Path(__file__).parents[4] / "docs/architecture/quantization.md"


def table_of_formats() -> dict[str, list[str]]:
    rows = {}
    for line in PAGE.read_text().split("### Bits and errors")[1].split("\n\n")[2].splitlines()[2:]:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[name] = cells
    return rows


def test_effective_bits_in_the_docs_are_those_of_what_is_stored() -> None:
    """Bits of a weight [64, 4096] as stored, over its values; one scale for all of a tensor does not show."""
    x = random(64, 4096)
    nvfp4, mxfp8, mxfp4, fp8 = quantize_nvfp4(x), mx.quantize_mxfp8(x), mx.quantize_mxfp4(x), quantize_fp8(x)
    stored = {
        "NVFP4": [nvfp4.codes, nvfp4.scales],
        "MXFP4": [mxfp4.codes, mxfp4.scales],
        "MXFP8": [mxfp8.codes, mxfp8.scales],
        "FP8": [fp8.codes],
        "BF16": [x.bfloat16()],
    }
    for name, (bits, *_) in table_of_formats().items():
        tensors = stored[name.split(",")[0]]
        assert float(bits) == 8 * sum(t.numel() * t.element_size() for t in tensors) / x.numel()


def test_errors_of_normal_numbers_in_the_docs() -> None:
    x = random(1024, 1024)
    fakes = {
        "NVFP4": fake_nvfp4(x),
        "NVFP4, mse": fake_nvfp4(x, scales="mse"),
        "NVFP4, four over six": fake_nvfp4(x, scales="four_over_six"),
        "MXFP4": mx.quantize_mxfp4(x).dequantize(),
        "MXFP8": mx.fake_mxfp8(x),
        "FP8": fake_fp8(x),
        "BF16": x.bfloat16().float(),
    }
    rows = table_of_formats()
    assert set(rows) == set(fakes)
    for name, back in fakes.items():
        error, stated = ((back - x).norm() / x.norm()).item(), rows[name][3].removesuffix(" %")
        digits = len(stated.split(".")[1])
        assert f"{100 * error:.{digits}f}" == stated, name


def test_worst_relative_errors_in_the_docs() -> None:
    """The fractions of the table are reached by blocks of many magnitudes, to 1 %, and never exceeded."""
    rows = table_of_formats()
    formats: dict[str, Callable[[Tensor], Tensor]] = {
        "NVFP4": fake_nvfp4,
        "MXFP4": lambda x: mx.quantize_mxfp4(x).dequantize(),
        "MXFP8": mx.fake_mxfp8,
        "FP8": fake_fp8,
        "BF16": lambda x: x.bfloat16().float(),
    }
    # With a largest value in its block that is the format's own times a power of two, all else is in steps of that.
    largest = {"NVFP4": 6.0, "MXFP4": 6.0, "MXFP8": 448.0, "FP8": 448.0, "BF16": 448.0}
    smallest = {"NVFP4": 1.0, "MXFP4": 1.0, "MXFP8": 2.0**-6, "FP8": 2.0**-6, "BF16": 2.0**-6}
    for name, fake in formats.items():
        beside = torch.zeros(20_000, 32)
        beside[:, 0], beside[:, 16] = largest[name], largest[name]
        beside[:, 20] = torch.logspace(math.log2(smallest[name]), math.log2(largest[name]), 20_000, base=2)
        alone = torch.zeros(20_000, 32)  # blocks of which nothing is known but that their scale is a normal E4M3 value
        alone[:, 20] = torch.logspace(math.log2(6 * 2**-6), math.log2(2688), 20_000, base=2)
        if name in ("NVFP4", "FP8"):  # the largest value of the tensor
            beside[0, 0] = {"NVFP4": 2688.0, "FP8": 448.0}[name]
        if name == "FP8":
            alone = alone[-1:]
        for column, x in ((1, beside[1:]), (2, alone)):
            whole = torch.cat([beside[:1], x]) if name == "NVFP4" else x
            errors = ((fake(whole) - whole).abs() / whole)[-len(x) :, 20].double()
            stated = float(Fraction(rows[name][column]))
            assert 0.99 * stated <= errors.max() <= stated * (1 + 1e-6) + 1e-7, (name, column)
