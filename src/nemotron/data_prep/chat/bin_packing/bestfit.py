"""Best fit: into the bin that will have least room left; among equals into the one opened first."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from nemotron.data_prep.chat.bin_packing.bins import (
    Bins,
    Lengths,
    bins_of,
    check_lengths,
    longest_first,
    runs_of,
)


def best_fit(lengths: Lengths, capacity: int) -> Bins:
    """Each sequence, in the order given, into the fullest bin that still holds it.

    With sequences in random order this wastes little more than the decreasing algorithms, and does not sort by length.
    """
    values = check_lengths(lengths, capacity)
    bin_of, num_bins = _best_fit_runs(*runs_of(values), capacity)
    return bins_of(values, capacity, np.arange(len(bin_of)), bin_of, num_bins)


def best_fit_decreasing(lengths: Lengths, capacity: int) -> Bins:
    """The longest sequences first, each into the fullest bin that still holds it."""
    values = check_lengths(lengths, capacity)
    order = longest_first(values, capacity)
    bin_of, num_bins = _best_fit_runs(*runs_of(values[order]), capacity)
    return bins_of(values, capacity, order, bin_of, num_bins)


class _Rooms:
    """A set of numbers 0 .. capacity that finds its smallest member at or above a given one.

    Two levels of bits, each about the square root of the capacity wide, as van Emde Boas trees have them.
    """

    def __init__(self, capacity: int) -> None:
        self._shift = (capacity.bit_length() + 1) // 2
        self._low = [0] * ((capacity >> self._shift) + 1)  # the members of each block
        self._high = 0  # which blocks have members

    def add(self, room: int) -> None:
        block = room >> self._shift
        self._low[block] |= 1 << (room - (block << self._shift))
        self._high |= 1 << block

    def remove(self, room: int) -> None:
        """Take out a member."""
        block = room >> self._shift
        self._low[block] ^= 1 << (room - (block << self._shift))
        if not self._low[block]:
            self._high ^= 1 << block

    def at_least(self, room: int) -> int:
        """The smallest member that is `room` or more; -1 if there is none."""
        block = room >> self._shift
        bits = self._low[block] >> (room - (block << self._shift))
        if bits:
            return room + (bits & -bits).bit_length() - 1
        blocks = self._high >> (block + 1)
        if not blocks:
            return -1
        block += (blocks & -blocks).bit_length()
        bits = self._low[block]
        return (block << self._shift) + (bits & -bits).bit_length() - 1


def _best_fit_runs(sizes: list[int], counts: list[int], capacity: int) -> tuple[NDArray[np.int64], int]:
    """Best fit of runs of equal sizes: (bin of each item in order, number of bins).

    A bin that takes one item of a run becomes the fullest that still holds the next, so it takes as many as fit; and
    then comes the next bin with equal room, if there is one.
    """
    rooms = _Rooms(capacity)
    bins_with: dict[int, list[int]] = {}  # room -> heap of the open bins that have it; its keys are `rooms`
    bins: list[int] = []
    placed: list[int] = []  # how many items went into the bin at the same place in `bins`
    smallest = min(sizes)  # a bin with less room is done
    num_bins = 0

    def keep(room: int, numbers: list[int]) -> None:
        """Remember that these bins, in increasing order, have this room."""
        if room < smallest:
            return
        same = bins_with.get(room)
        if same is None:
            bins_with[room] = numbers
            rooms.add(room)
        else:
            for number in numbers:
                heappush(same, number)

    for size, count in zip(sizes, counts, strict=True):
        while count:
            room = rooms.at_least(size)
            if room < 0:  # new bins, each with as many of this size as it holds, the last one with the rest
                in_each = capacity // size
                full, rest = divmod(count, in_each)
                if full:
                    opened = list(range(num_bins, num_bins + full))
                    bins += opened
                    placed += [in_each] * full
                    num_bins += full
                    keep(capacity - in_each * size, opened)
                if rest:
                    bins.append(num_bins)
                    placed.append(rest)
                    keep(capacity - rest * size, [num_bins])
                    num_bins += 1
                break
            same = bins_with[room]
            fit = room // size
            if count >= fit:
                wanted = min(count // fit, len(same))
                taken = [heappop(same) for _ in range(wanted)]
                placed += [fit] * wanted
                count -= fit * wanted
                room_left = room - fit * size
            else:
                taken = [heappop(same)]
                placed.append(count)
                room_left = room - count * size
                count = 0
            bins += taken
            if not same:
                del bins_with[room]
                rooms.remove(room)
            keep(room_left, taken)
    return np.repeat(np.array(bins, np.int64), placed), num_bins
