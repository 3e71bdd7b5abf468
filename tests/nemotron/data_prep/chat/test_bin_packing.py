"""Bin packing: the bins of the textbook definitions, item by item; bounds from the literature; what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron.data_prep.chat.bin_packing import (
    Bins,
    best_fit,
    best_fit_decreasing,
    first_fit_decreasing,
    first_fit_shuffle,
    lower_bound,
    modified_first_fit_decreasing,
    pack_lengths,
)
from nemotron.kit.schemas.conversations import BinPacking
from nemotron.recipes.nano3.stage1_sft.data_schema import PackingConfig

ALGORITHMS: tuple[BinPacking, ...] = get_args(BinPacking)

# --- The definitions, quadratic, each item looking at every bin -----------------------------------------------------


def by_length(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda item: -lengths[item])


def slow_first_fit(lengths: Sequence[int], capacity: int, order: Iterable[int]) -> list[list[int]]:
    bins: list[list[int]] = []
    for item in order:
        for members in bins:
            if sum(lengths[other] for other in members) + lengths[item] <= capacity:
                members.append(item)
                break
        else:
            bins.append([item])
    return bins


def slow_best_fit(lengths: Sequence[int], capacity: int, order: Iterable[int]) -> list[list[int]]:
    bins: list[list[int]] = []
    for item in order:
        rooms = [capacity - sum(lengths[other] for other in members) for members in bins]
        holding = [(room, number) for number, room in enumerate(rooms) if room >= lengths[item]]
        if holding:
            bins[min(holding)[1]].append(item)
        else:
            bins.append([item])
    return bins


def slow_mffd(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    def room(members: list[int]) -> int:
        return capacity - sum(lengths[item] for item in members)

    def smallest(items: list[int]) -> int:
        return min(items, key=lambda item: (lengths[item], item))

    def largest(items: list[int], limit: int) -> int:
        return min((item for item in items if lengths[item] <= limit), key=lambda item: (-lengths[item], item))

    items = by_length(lengths)
    bins = [[item] for item in items if 2 * lengths[item] > capacity]
    medium = [item for item in items if 2 * lengths[item] <= capacity < 3 * lengths[item]]
    small = [item for item in items if 3 * lengths[item] <= capacity < 6 * lengths[item]]
    tiny = [item for item in items if 6 * lengths[item] <= capacity]
    with_medium = []
    for members in bins:
        if medium and lengths[smallest(medium)] <= room(members):
            item = largest(medium, room(members))
            medium.remove(item)
            members.append(item)
            with_medium.append(members)
    for members in reversed(bins):
        if any(members is other for other in with_medium) or len(small) < 2:
            continue
        if sum(sorted(lengths[item] for item in small)[:2]) > room(members):
            continue
        item = smallest(small)
        small.remove(item)
        members.append(item)
        item = largest(small, room(members))
        small.remove(item)
        members.append(item)
    rest = medium + small + tiny
    for members in bins:
        while rest and lengths[smallest(rest)] <= room(members):
            item = largest(rest, room(members))
            rest.remove(item)
            members.append(item)
    return bins + slow_first_fit(lengths, capacity, sorted(rest, key=lambda item: (-lengths[item], item)))


def as_lists(bins: Bins) -> list[list[int]]:
    return [members.tolist() for members in bins]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    """Any lengths; few different ones (long runs); fractions of a bin; large ones, and small ones to go with them."""
    capacity = draw(st.integers(1, 200))
    length = st.integers(1, capacity)
    few = st.sampled_from(draw(st.lists(length, min_size=1, max_size=4)))
    parts = st.sampled_from([max(1, capacity // share + extra) for share in (2, 3, 4, 6, 7) for extra in (-1, 0, 1)])
    large_or_small = st.integers(capacity // 2 + 1, 2 * capacity // 3 + 1) | st.integers(
        capacity // 6 + 1, capacity // 3 + 1
    )
    kind = draw(st.sampled_from([length, few, parts, large_or_small, length | large_or_small]))
    lengths = draw(st.lists(kind, min_size=1, max_size=60))
    return [min(length, capacity) for length in lengths], capacity


def lognormal(count: int, capacity: int = 4096, seed: int = 0) -> np.ndarray:
    """Mean 664 before the ends are cut off."""
    drawn = np.random.default_rng(seed).lognormal(np.log(664) - 0.5, 1, count)
    return np.clip(drawn, 1, capacity).astype(np.int64)


@settings(max_examples=300)
@given(problems())
def test_bins_are_those_of_the_definitions(problem: tuple[list[int], int]) -> None:
    lengths, capacity = problem
    order = by_length(lengths)
    assert as_lists(best_fit(lengths, capacity)) == slow_best_fit(lengths, capacity, range(len(lengths)))
    assert as_lists(best_fit_decreasing(lengths, capacity)) == slow_best_fit(lengths, capacity, order)
    assert as_lists(first_fit_decreasing(lengths, capacity)) == slow_first_fit(lengths, capacity, order)
    assert as_lists(modified_first_fit_decreasing(lengths, capacity)) == slow_mffd(lengths, capacity)


@given(problems(), st.integers(0, 2**64))
def test_shuffled_first_fit_is_first_fit_in_an_order_of_its_own(problem: tuple[list[int], int], seed: int) -> None:
    lengths, capacity = problem
    # Sequences that fill a bin each stay where the shuffle puts them: so they show the order.
    order = first_fit_shuffle([1] * len(lengths), 1, seed).items.tolist()
    assert sorted(order) == list(range(len(lengths)))
    assert as_lists(first_fit_shuffle(lengths, capacity, seed)) == slow_first_fit(lengths, capacity, order)


@pytest.mark.parametrize("capacity", [4096, 70_000])  # the sort is another one above 65,535
def test_bins_are_those_of_the_definitions_among_many(capacity: int) -> None:
    lengths = lognormal(1500, capacity, seed=capacity)
    listed = lengths.tolist()
    order = by_length(listed)
    assert as_lists(best_fit(lengths, capacity)) == slow_best_fit(listed, capacity, range(len(listed)))
    assert as_lists(best_fit_decreasing(lengths, capacity)) == slow_best_fit(listed, capacity, order)
    assert as_lists(first_fit_decreasing(lengths, capacity)) == slow_first_fit(listed, capacity, order)
    assert as_lists(modified_first_fit_decreasing(lengths, capacity)) == slow_mffd(listed, capacity)


@given(problems(), st.sampled_from(ALGORITHMS))
def test_what_is_reported(problem: tuple[list[int], int], algorithm: BinPacking) -> None:
    lengths, capacity = problem
    bins = pack_lengths(lengths, capacity, algorithm, seed=3)
    assert sorted(bins.items.tolist()) == list(range(len(lengths)))
    assert all(0 < sum(lengths[item] for item in members) <= capacity for members in bins)
    assert bins.lengths.tolist() == [lengths[item] for item in bins.items]
    report = bins.report()
    assert (report.items, report.tokens) == (len(lengths), sum(lengths))
    assert report.efficiency == pytest.approx(sum(lengths) / (len(bins) * capacity))
    assert -(-sum(lengths) // capacity) <= report.lower_bound <= report.bins == len(bins)


# --- The literature -------------------------------------------------------------------------------------------------


def test_where_first_fit_decreasing_is_worst() -> None:
    # The best packing has 9 bins: six of 51 + 26 + 23 and three of 27 + 27 + 23 + 23. First-fit decreasing needs 11,
    # which is its worst ratio (Johnson 1973); the modified one does better.
    lengths = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    assert lower_bound(np.array(lengths), 100) == 9
    assert len(first_fit_decreasing(lengths, 100)) == len(best_fit_decreasing(lengths, 100)) == 11
    assert len(modified_first_fit_decreasing(lengths, 100)) == 10


@given(st.integers(2, 60).flatmap(lambda c: st.lists(st.lists(st.integers(1, c - 1), max_size=5), min_size=1).map(
    lambda cuts: (c, cuts))))  # fmt: skip
def test_guarantees_where_the_optimum_is_known(problem: tuple[int, list[list[int]]]) -> None:
    capacity, cuts = problem
    lengths: list[int] = []
    for bounds in cuts:  # full bins, cut up
        lengths += np.diff([0, *sorted(set(bounds)), capacity]).tolist()
    optimum = len(cuts)
    assert lower_bound(np.array(lengths), capacity) == optimum
    assert 9 * len(first_fit_decreasing(lengths, capacity)) <= 11 * optimum + 6  # Dósa 2007
    assert 60 * len(modified_first_fit_decreasing(lengths, capacity)) <= 71 * optimum + 60  # Yue & Zhang 1995
    for algorithm in ("best_fit", "first_fit_shuffle"):
        assert 10 * len(pack_lengths(lengths, capacity, algorithm)) <= 17 * optimum  # Dósa & Sgall 2013, 2014


@given(st.integers(1, 12).flatmap(lambda c: st.tuples(st.lists(st.integers(1, c), min_size=1, max_size=5), st.just(c))))
def test_no_packing_beats_the_lower_bound(problem: tuple[list[int], int]) -> None:
    lengths, capacity = problem
    best = len(lengths)
    for assignment in product(range(len(lengths)), repeat=len(lengths)):
        if len(set(assignment)) < best:
            fill = [0] * len(lengths)
            for number, length in zip(assignment, lengths, strict=True):
                fill[number] += length
            if max(fill) <= capacity:
                best = len(set(assignment))
    bound = lower_bound(np.array(lengths), capacity)
    assert -(-sum(lengths) // capacity) <= bound <= best
    # Martello & Toth, as printed: for each k, items above C - k, items above C / 2, and the rest of at least k.
    definition = 0
    for k in range(capacity // 2 + 1):
        alone = [s for s in lengths if s > capacity - k]
        large = [s for s in lengths if capacity - k >= s > capacity / 2]
        rest = [s for s in lengths if capacity / 2 >= s >= k]
        excess = sum(rest) - (len(large) * capacity - sum(large))
        definition = max(definition, len(alone) + len(large) + max(0, -(-excess // capacity)))
    assert bound == definition


# --- Size, order, and what is refused -------------------------------------------------------------------------------


def test_the_default_of_the_sft_data_has_not_changed() -> None:
    # Bins of the algorithm with which published data was packed.
    lengths = [1, 1, 15, 3, 5, 1, 11, 15, 13, 5, 11, 11, 5, 13, 15, 11, 1, 5, 3, 15, 1, 1, 15, 3]
    assert PackingConfig().algorithm == "best_fit"
    assert as_lists(best_fit(lengths, 32)) == [
        [0, 1, 2, 3, 4, 5, 9, 16], [6, 7, 12, 20], [8, 10, 18, 23], [11, 13], [14, 15, 17, 21], [19, 22],
    ]  # fmt: skip


def test_a_seed_gives_the_same_bins_everywhere() -> None:
    # The raw stream of PCG64 is fixed by numpy's compatibility policy.
    assert first_fit_shuffle([1] * 8, 1, seed=0).items.tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert first_fit_shuffle([1] * 8, 1, seed=1).items.tolist() != first_fit_shuffle([1] * 8, 1, seed=0).items.tolist()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_longer_than_a_bin_is_refused(algorithm: BinPacking) -> None:
    with pytest.raises(ValueError, match="item 1 has length 11, more than the capacity 10"):
        pack_lengths([3, 11, 4, 30], 10, algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("lengths", "capacity", "message"),
    [
        ([], 10, "no lengths"),
        ([3, 0], 10, "item 1 has length 0"),
        (np.array([3, -2, -3]), 10, "item 1 has length -2"),
        ([1.5], 10, "whole numbers, not float64"),
        ([1], 0, "capacity must be at least 1, not 0"),
    ],
)
def test_what_is_refused(algorithm: BinPacking, lengths: object, capacity: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_lengths(lengths, capacity, algorithm)  # type: ignore[arg-type]


def test_misspelt_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no packing algorithm 'first_fit_decresing'; did you mean first_fit_decreas"):
        pack_lengths([1], 1, "first_fit_decresing")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint16, np.int32, np.uint64])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_whole_number_type(algorithm: BinPacking, dtype: type[np.integer]) -> None:
    lengths = np.array([100, 30, 27, 99, 1, 64], dtype)
    assert as_lists(pack_lengths(lengths, 128, algorithm)) == as_lists(pack_lengths(lengths.tolist(), 128, algorithm))
