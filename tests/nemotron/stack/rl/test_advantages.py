"""Group-relative advantages against numbers worked out by hand and against the formula written as a loop."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron.stack.rl.advantages import clip_advantages, group_advantages


def advantages(rewards: list[list[float]], normalize: bool, leave_one_out: bool = True) -> list[list[float]]:
    tensor = torch.tensor(rewards, dtype=torch.float32)
    return group_advantages(tensor, ~tensor.isnan(), leave_one_out=leave_one_out, normalize=normalize).tolist()


def slow(group: list[float], normalize: bool, leave_one_out: bool) -> list[float]:
    """One completion at a time, from the definition."""
    out = []
    for i, reward in enumerate(group):
        compared = [r for j, r in enumerate(group) if not math.isnan(r) and (j != i or not leave_one_out)]
        if math.isnan(reward) or not compared:
            out.append(0.0)
            continue
        value = reward - statistics.fmean(compared)
        std = statistics.stdev(compared) if len(compared) > 1 else 0.0
        out.append(value / (std + 1e-6) if normalize and std > 0 else value)
    return out


def test_sixteen_completions_by_hand() -> None:
    """Of 15 others of whom k are right the mean is k/15 and the variance k/15 (1 - k/15) 15/14."""
    lone_success, lone_failure = [1.0] + [0.0] * 15, [0.0] + [1.0] * 15
    two = [1.0, 1.0] + [0.0] * 14
    assert advantages([lone_success], True)[0][0] == 1.0  # the others are equal: nothing to divide by
    assert advantages([lone_failure], True)[0][0] == -1.0
    std = math.sqrt(1 / 15 * 14 / 15 * 15 / 14)
    assert advantages([lone_success], True)[0][1] == pytest.approx(-1 / 15 / std, rel=1e-5)
    assert advantages([two], True)[0][0] == pytest.approx(14 / 15 / std, rel=1e-5)  # 3.61
    assert advantages([lone_success], True, False)[0][0] == pytest.approx(3.75, rel=1e-5)  # 15/16 over 1/4
    assert advantages([lone_success], False, False)[0][0] == pytest.approx(15 / 16)


def test_two_completions_are_never_normalised() -> None:
    assert advantages([[0.2, 0.8]], True)[0] == pytest.approx([-0.6, 0.6])
    assert advantages([[0.2, 0.8]], True, False)[0] == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_others_have_no_deviation(dtype: torch.dtype) -> None:
    """E[x^2] - E[x]^2 in float32 gives the one reward of 1.0 among 31 of 0.1 an advantage of 28,110 instead of 0.9."""
    for count, value in itertools.product((3, 4, 7, 16, 31, 32), (0.01, 0.1, 0.35, 0.55, 0.9, 99.1)):
        for lone in (0, count // 2, count - 1):
            rewards = torch.full((1, count), value, dtype=dtype)
            rewards[0, lone] = 1.0
            ours = group_advantages(rewards, torch.ones_like(rewards, dtype=torch.bool))
            assert ours[0, lone] == rewards[0, lone] - rewards[0, lone - 1]


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_failed_verification_is_neither_a_zero_nor_a_baseline(normalize: bool, leave_one_out: bool) -> None:
    (with_error,) = advantages([[1, math.nan, 0, 1]], normalize, leave_one_out)
    (without,) = advantages([[1, 0, 1]], normalize, leave_one_out)
    assert with_error == pytest.approx([without[0], 0, without[1], without[2]])
    assert with_error != advantages([[1, 0, 0, 1]], normalize, leave_one_out)[0]
    # Whatever stands where the mask says "invalid" does not matter.
    rewards = torch.tensor([[1.0, 77.0, 0.0, 1.0]])
    valid = torch.tensor([[True, False, True, True]])
    ours = group_advantages(rewards, valid, leave_one_out=leave_one_out, normalize=normalize)
    assert ours[0].tolist() == pytest.approx(with_error)


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("group", [[1.0] * 4, [0.0] * 4, [0.1] * 7, [math.nan] * 3, [math.nan, 1.0, math.nan]])
def test_groups_that_tell_nothing_are_exactly_zero(group: list[float], normalize: bool, leave_one_out: bool) -> None:
    """Exactly: the packer leaves such rollouts out."""
    assert advantages([group], normalize, leave_one_out) == [[0.0] * len(group)]


@settings(max_examples=200)
@given(
    groups=st.integers(2, 9).flatmap(
        lambda n: st.lists(
            st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0, math.nan]), min_size=n, max_size=n),
            min_size=1,
            max_size=4,
        )
    ),
    normalize=st.booleans(),
    leave_one_out=st.booleans(),
)
def test_equals_the_definition(groups: list[list[float]], normalize: bool, leave_one_out: bool) -> None:
    actual = advantages(groups, normalize, leave_one_out)
    for row, group in zip(actual, groups, strict=True):
        assert row == pytest.approx(slow(group, normalize, leave_one_out), rel=1e-5, abs=1e-5)


def test_a_clip_may_have_one_bound() -> None:
    values = torch.tensor([-7.0, -1.0, 3.0, 9.0])
    assert clip_advantages(values, -5, 5).tolist() == [-5, -1, 3, 5]
    assert clip_advantages(values, None, 5).tolist() == [-7, -1, 3, 5]
    assert clip_advantages(values, -5, None).tolist() == [-5, -1, 3, 9]
    assert torch.equal(clip_advantages(values, None, None), values)
