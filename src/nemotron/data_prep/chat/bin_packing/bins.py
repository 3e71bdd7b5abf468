"""What packing sequences into bins of one capacity gives: who lies where, how full the bins are, the lower bound."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.integer] | Iterable[int]
TooLong = Literal["refuse", "cut"]


@dataclass(frozen=True, slots=True)
class BinsReport:
    """How well sequences were packed. `efficiency` is tokens / (bins x capacity).

    No packing of the same pieces can need fewer bins than `lower_bound`. `cut_items` sequences were longer than the
    capacity and lost `cut_tokens` tokens at their ends: 0 unless that was asked for.
    """

    items: int
    pieces: int
    tokens: int
    bins: int
    lower_bound: int
    efficiency: float
    cut_items: int
    cut_tokens: int

    def __str__(self) -> str:
        """One line for people."""
        pieces = f" in {self.pieces} pieces" if self.pieces != self.items else ""
        cut = f"; {self.cut_items} cut at their ends, {self.cut_tokens} tokens lost" if self.cut_items else ""
        return (
            f"{self.items} sequences{pieces}, {self.tokens} tokens in {self.bins} bins "
            f"(at least {self.lower_bound} needed), {self.efficiency:.2%} full{cut}"
        )


@dataclass(frozen=True, slots=True)
class Bins:
    """Sequences in bins, as flat int64 arrays: bin b holds the pieces `offsets[b]` .. `offsets[b + 1]`, as placed.

    Piece p is the tokens `begins[p]` .. `begins[p] + lengths[p]` of sequence `items[p]`. Only `concatenate` cuts a
    sequence into several pieces; everywhere else a sequence is one piece and begins at 0.

    >>> from nemotron.data_prep.chat.bin_packing import best_fit
    >>> bins = best_fit([5, 8, 2, 5], capacity=10)
    >>> [members.tolist() for members in bins]
    [[0, 3], [1, 2]]
    """

    capacity: int
    items: NDArray[np.int64]  # [P]
    begins: NDArray[np.int64]  # [P]
    lengths: NDArray[np.int64]  # [P]
    offsets: NDArray[np.int64]  # [B + 1]
    cut_items: int = 0
    cut_tokens: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        """The sequences that bin `number` holds, in the order in which they were placed. IndexError past the last."""
        if not 0 <= number < len(self):
            raise IndexError(f"bin {number} of {len(self)}")
        return self.items[self.offsets[number] : self.offsets[number + 1]]

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return (self.items[begin:end] for begin, end in pairwise(self.offsets.tolist()))

    def report(self) -> BinsReport:
        """Counts, efficiency and lower bound."""
        tokens = int(self.lengths.sum())
        return BinsReport(
            items=int(np.count_nonzero(self.begins == 0)),
            pieces=len(self.items),
            tokens=tokens,
            bins=len(self),
            lower_bound=lower_bound(self.lengths, self.capacity),
            efficiency=tokens / (len(self) * self.capacity),
            cut_items=self.cut_items,
            cut_tokens=self.cut_tokens,
        )


@dataclass(frozen=True, slots=True)
class CheckedLengths:
    """Lengths between 1 and the capacity, int64 [N], and what had to be cut off to make them so."""

    values: NDArray[np.int64]
    capacity: int
    cut_items: int
    cut_tokens: int


def check_capacity(capacity: int) -> None:
    """ValueError unless it is a whole number above 0."""
    if isinstance(capacity, bool) or not isinstance(capacity, (int, np.integer)) or capacity < 1:
        raise ValueError(f"capacity must be a whole number above 0, not {capacity!r}")


def check_lengths(lengths: Lengths, capacity: int, too_long: TooLong = "refuse") -> CheckedLengths:
    """The lengths as an array. With `too_long="cut"` a length above the capacity counts as the capacity.

    ValueError: capacity not a whole number above 0; no lengths; lengths that are not whole numbers, are below 1, or
    exceed the capacity (named with their index).
    """
    check_capacity(capacity)
    if too_long not in ("refuse", "cut"):
        raise ValueError(f"too_long must be refuse or cut, not {too_long!r}")
    given = lengths if isinstance(lengths, np.ndarray) else np.array(list(lengths))
    if given.ndim != 1:
        raise ValueError(f"lengths must be one-dimensional, not of shape {given.shape}")
    if given.size == 0:
        raise ValueError("no lengths: there is nothing to pack")
    if given.dtype.kind not in "iu":
        raise ValueError(f"lengths must be whole numbers, not {given.dtype}")
    if given.min() < 1:
        item = int(np.argmax(given < 1))
        raise ValueError(f"item {item} has length {given[item]}; a sequence to pack has at least one token")
    cut = given > capacity
    if not cut.any():
        return CheckedLengths(given.astype(np.int64), int(capacity), 0, 0)
    item = int(np.argmax(cut))
    if too_long == "refuse":
        others = f" ({np.count_nonzero(cut)} such items)" if np.count_nonzero(cut) > 1 else ""
        raise ValueError(f"item {item} has length {given[item]}, more than the capacity {capacity}{others}")
    values = np.minimum(given, capacity).astype(np.int64)
    return CheckedLengths(values, int(capacity), int(np.count_nonzero(cut)), int((given[cut] - capacity).sum()))


def bins_of(checked: CheckedLengths, order: NDArray[np.int64], bin_of: NDArray[np.int64], num_bins: int) -> Bins:
    """Bins from placements in the order in which they were made: item `order[i]` went into bin `bin_of[i]`."""
    items = order[np.argsort(bin_of, kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(bin_of, minlength=num_bins))]).astype(np.int64)
    begins = np.zeros(len(items), np.int64)
    return Bins(checked.capacity, items, begins, checked.values[items], offsets, checked.cut_items, checked.cut_tokens)


def longest_first(checked: CheckedLengths) -> NDArray[np.int64]:
    """Indices by decreasing length; equal ones in the order given."""
    shortfall = checked.capacity - checked.values
    # numpy sorts 16-bit integers by radix, in linear time.
    return np.argsort(shortfall.astype(np.uint16) if checked.capacity <= 0xFFFF else shortfall, kind="stable")


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
