"""Stochastic rounding to FP16 against all of its random bits, and generation with a rounded state."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.models.mamba2 import Mamba2
from nemotron.stack.quantization.ssm_state import fp16_state, round_to_fp16

ALL_BITS = torch.arange(1 << 13)
PROMPTS = [[5, 9, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


def neighbours(x: float) -> tuple[float, float]:
    """The FP16 values a <= x <= b, by torch's own cast."""
    nearest = torch.tensor(x).half()
    if nearest.item() == x:
        return x, x
    other = torch.nextafter(nearest, torch.tensor(math.copysign(math.inf, x - nearest.item())).half())
    low, high = sorted((nearest.item(), other.item()))
    return low, high


NORMAL = [1.0003, -1.0003, 0.1, 3.14159274, -1000.123, 65000.77, 2**-14 * 1.3, 0.5 + 2**-24, 1.5, -2.0, 65504.0]


@pytest.mark.parametrize("x", NORMAL)
def test_the_mean_over_all_random_bits_is_the_number_itself(x: float) -> None:
    """And the two values are the neighbours of FP16: unbiased without a statistical test, in float64."""
    x = torch.tensor(x).item()
    rounded = round_to_fp16(torch.full((len(ALL_BITS),), x), ALL_BITS)
    assert torch.equal(rounded.half().float(), rounded)
    assert set(rounded.tolist()) == set(neighbours(x))
    assert rounded.double().mean().item() == x


@pytest.mark.parametrize("x", [1e-5, -1e-5, 3e-8, 1e-9, 2**-24, 0.0])
def test_below_the_normal_numbers_it_is_within_two_to_the_minus_37(x: float) -> None:
    x = torch.tensor(x).item()
    rounded = round_to_fp16(torch.full((len(ALL_BITS),), x), ALL_BITS)
    assert set(rounded.tolist()) <= set(neighbours(x))
    assert abs(rounded.double().mean().item() - x) <= 2**-37


def test_values_of_fp16_stay_large_ones_saturate_and_nan_shows() -> None:
    codes = torch.arange(1 << 16).to(torch.int32).to(torch.uint16).view(torch.float16).float()
    finite = codes[codes.isfinite()]
    for bits in (0, 1, 4096, 8191):
        assert torch.equal(round_to_fp16(finite, torch.full(finite.shape, bits)), finite)
    large = torch.tensor([7e4, -1e30, math.inf, math.nan])
    assert round_to_fp16(large, torch.full((4,), 8191)).tolist()[:3] == [65504, -65504, 65504]
    assert round_to_fp16(large, torch.zeros(4)).isnan().tolist() == [False, False, False, True]


def test_small_additions_survive_on_average_only_when_rounding_is_stochastic() -> None:
    """100 times 2^-13 on 1, where half a step of FP16 is 2^-11."""
    generator = torch.Generator().manual_seed(0)
    round_state, state, nearest = fp16_state(generator), torch.ones(4096), torch.ones(4096)
    for _ in range(100):
        state = round_state(state + 2**-13)
        nearest = (nearest + 2**-13).half().float()
    assert (nearest == 1).all()
    # A step goes up by 2^-10 with probability 1/8, each time: the count is binomial(100, 1/8).
    mean, deviation = 1 + 100 / 2**13, 2**-10 * math.sqrt(100 * (1 / 8) * (7 / 8))
    assert abs(state.mean().item() - mean) < 5 * deviation / math.sqrt(4096)
    assert state.std().item() == pytest.approx(deviation, rel=0.05)


def keep_state(model: NemotronH, round_state: Callable[[Tensor], Tensor] | None) -> NemotronH:
    for block in model.blocks():
        if isinstance(block.mixer, Mamba2):
            block.mixer.round_state = round_state
    return model


def test_generation_with_an_fp32_state_is_what_it_was(small_model: Callable[..., NemotronH]) -> None:
    """A rounding that changes nothing changes no token and no bit of a log-probability."""
    model = small_model("MEM*E-", seed=5)

    def run(round_state: Callable[[Tensor], Tensor] | None) -> tuple[list[list[int]], list[list[float]]]:
        generator = torch.Generator().manual_seed(0)
        keep_state(model, round_state)
        out = generate(model, PROMPTS, 12, stop_token_ids=(), generator=generator, samples_per_prompt=2)
        return out.tokens, out.logprobs

    assert run(None) == run(lambda state: state) == run(torch.clone)


def test_the_state_between_steps_is_fp16_and_outputs_come_from_the_one_before_rounding(
    small_model: Callable[..., NemotronH],
) -> None:
    model = small_model("M*M", seed=3)
    states: list[Tensor] = []
    round_state = fp16_state(torch.Generator().manual_seed(1))

    def watch(state: Tensor) -> Tensor:
        rounded = round_state(state)
        assert (rounded - state).abs().max() > 0 and torch.equal(rounded.half().float(), rounded)
        states.append(rounded)
        return rounded

    def run(round_state: Callable[[Tensor], Tensor] | None) -> list[list[float]]:
        return generate(keep_state(model, round_state), PROMPTS, 12, 0, stop_token_ids=()).logprobs

    plain, rounded = run(None), run(watch)
    assert len(states) == 2 * 12  # two `M` blocks: after the prompts, and after each step but that of the last token
    for one, other in zip(plain, rounded, strict=True):
        assert one[0] == other[0]
        assert one != other and one == pytest.approx(other, abs=0.02)
    assert run(fp16_state(torch.Generator().manual_seed(1))) == rounded
