"""What packing sequences into bins of one capacity gives: who lies where, how full the bins are, the lower bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nemo_runspec.words import counted

Lengths = NDArray[np.integer] | Sequence[int]


@dataclass(frozen=True, slots=True)
class BinsReport:
    """How well sequences were packed. `efficiency` is tokens / (bins x capacity).

    No packing of the same sequences can need fewer bins than `lower_bound`.
    """

    items: int
    tokens: int
    bins: int
    lower_bound: int
    efficiency: float

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{counted(self.items, 'sequence')}, {self.tokens} tokens in {counted(self.bins, 'bin')} "
            f"(at least {self.lower_bound} needed), {self.efficiency:.2%} full"
        )


@dataclass(frozen=True, slots=True)
class Bins:
    """Sequences in bins, as flat int64 arrays: bin b holds `items[offsets[b] : offsets[b + 1]]`, as placed.

    `lengths`: of each of `items`.

    >>> from nemotron.data_prep.chat.bin_packing import best_fit
    >>> bins = best_fit([5, 8, 2, 5], capacity=10)
    >>> [members.tolist() for members in bins]
    [[0, 3], [1, 2]]
    """

    capacity: int
    items: NDArray[np.int64]  # [N]
    lengths: NDArray[np.int64]  # [N]
    offsets: NDArray[np.int64]  # [B + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """The sequences of every bin, in the order in which they were placed."""
        return (self.items[begin:end] for begin, end in pairwise(self.offsets.tolist()))

    def report(self) -> BinsReport:
        """Counts, efficiency and lower bound."""
        tokens = int(self.lengths.sum())
        return BinsReport(
            items=len(self.items),
            tokens=tokens,
            bins=len(self),
            lower_bound=lower_bound(self.lengths, self.capacity),
            efficiency=tokens / (len(self) * self.capacity),
        )


def check_lengths(lengths: Lengths, capacity: int) -> NDArray[np.int64]:
    """The lengths as an array [N].

    ValueError: a capacity below 1; no lengths; lengths that are not whole numbers, are below 1, or exceed the capacity
    (named with their index).
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, not {capacity}")
    values = np.asarray(lengths)
    if not values.size:
        raise ValueError("no lengths: there is nothing to pack")
    if values.dtype.kind not in "iu":
        raise ValueError(f"lengths must be whole numbers, not {values.dtype}")
    if values.min() < 1:
        item = int(np.argmax(values < 1))
        raise ValueError(f"item {item} has length {values[item]}; a sequence to pack has at least one token")
    if values.max() > capacity:
        item = int(np.argmax(values > capacity))
        raise ValueError(f"item {item} has length {values[item]}, more than the capacity {capacity}")
    return values.astype(np.int64)


def bins_of(
    lengths: NDArray[np.int64], capacity: int, order: NDArray[np.int64], bin_of: NDArray[np.int64], num_bins: int
) -> Bins:
    """Bins from placements in the order in which they were made: item `order[i]` went into bin `bin_of[i]`."""
    items = order[np.argsort(bin_of, kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(bin_of, minlength=num_bins))]).astype(np.int64)
    return Bins(capacity, items, lengths[items], offsets)


def longest_first(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Indices by decreasing length; equal ones in the order given."""
    shortfall = capacity - lengths
    # numpy sorts 16-bit integers by radix, in linear time.
    return np.argsort(shortfall.astype(np.uint16) if capacity <= 0xFFFF else shortfall, kind="stable")


def runs_of(values: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Neighbours of equal length as (lengths, counts)."""
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    return values[starts].tolist(), np.diff(starts, append=len(values)).tolist()


def lower_bound(lengths: NDArray[np.int64], capacity: int) -> int:
    """Bins that no packing of these lengths (1 .. capacity) can do without: L2 of Martello & Toth (1990, 8.3).

    For every k <= capacity / 2: lengths above capacity - k lie alone among those of at least k; lengths above half the
    capacity lie in different bins; and what of the lengths k .. capacity / 2 does not fit beside the latter needs
    bins of its own. k = 0 gives tokens / capacity, rounded up. O(N log N).
    """
    ordered = np.sort(lengths)
    sums = np.concatenate([[0], np.cumsum(ordered)])
    half = int(np.searchsorted(ordered, capacity // 2, side="right"))  # ordered[half:] is above half the capacity
    ks = np.concatenate([[0], np.unique(ordered[:half])])
    smallest = np.searchsorted(ordered, ks, side="left")
    alone = np.searchsorted(ordered, capacity - ks, side="right")  # ordered[alone:] > capacity - k
    shared = alone - half
    room_beside = shared * capacity - (sums[half + shared] - sums[half])
    excess = np.maximum(0, sums[half] - sums[smallest] - room_beside)
    return int((len(ordered) - half + -(-excess // capacity)).max())
