"""Leave-one-out advantages against numbers worked out by hand and against the formula written as a loop."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron.stack.rl.advantages import leave_one_out_advantages

REWARDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0, math.nan])


def advantages(rewards: list[list[float]], normalize: bool) -> list[list[float]]:
    tensor = torch.tensor(rewards)
    return leave_one_out_advantages(tensor, ~tensor.isnan(), normalize).tolist()


def slow(group: list[float], normalize: bool) -> list[float]:
    """One completion at a time, from the definition."""
    valid = [r for r in group if not math.isnan(r)]
    if len(valid) < 2 or (normalize and statistics.stdev(valid) == 0):
        return [0.0] * len(group)
    out = []
    for i, reward in enumerate(group):
        others = [r for j, r in enumerate(group) if j != i and not math.isnan(r)]
        value = 0.0 if math.isnan(reward) else reward - statistics.fmean(others)
        out.append(value / statistics.stdev(valid) if normalize else value)
    return out


def test_by_hand() -> None:
    # One right of four: the others of the right one average 0, those of a wrong one 1/3.
    assert advantages([[1, 0, 0, 0]], False)[0] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    # Their standard deviation is sqrt((9/16 + 3/16) / 3) = 1/2.
    assert advantages([[1, 0, 0, 0]], True)[0] == pytest.approx([2, -2 / 3, -2 / 3, -2 / 3])
    assert advantages([[0.2, 0.8]], False)[0] == pytest.approx([-0.6, 0.6])
    assert advantages([[0.2, 0.8]], True)[0] == pytest.approx([-math.sqrt(2), math.sqrt(2)])
    assert advantages([[3, 1, 2]], False)[0] == pytest.approx([1.5, -1.5, 0])
    assert advantages([[3, 1, 2]], True)[0] == pytest.approx([1.5, -1.5, 0])  # standard deviation 1


@pytest.mark.parametrize("normalize", [True, False])
def test_a_failed_verification_is_neither_a_zero_nor_a_baseline(normalize: bool) -> None:
    (with_error,) = advantages([[1, math.nan, 0, 1]], normalize)
    (without,) = advantages([[1, 0, 1]], normalize)
    assert with_error == pytest.approx([without[0], 0, without[1], without[2]])
    assert with_error != advantages([[1, 0, 0, 1]], normalize)[0]
    # Whatever stands where the mask says "invalid" does not matter.
    rewards = torch.tensor([[1.0, 77.0, 0.0, 1.0]])
    valid = torch.tensor([[True, False, True, True]])
    assert leave_one_out_advantages(rewards, valid, normalize)[0].tolist() == pytest.approx(with_error)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("group", [[1.0] * 4, [0.0] * 4, [0.1] * 7, [math.nan] * 3, [math.nan, 1.0, math.nan]])
def test_groups_that_tell_nothing_are_exactly_zero(group: list[float], normalize: bool) -> None:
    (row,) = advantages([group], normalize)
    assert row == pytest.approx([0.0] * len(group), abs=1e-7)
    if normalize:
        assert row == [0.0] * len(group)  # exactly: the packer leaves such rollouts out


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
)
def test_equals_the_definition(groups: list[list[float]], normalize: bool) -> None:
    actual = advantages(groups, normalize)
    for row, group in zip(actual, groups, strict=True):
        assert row == pytest.approx(slow(group, normalize), abs=1e-5)
        assert sum(row) == pytest.approx(0, abs=1e-5)  # the deviations from the leave-one-out means cancel
