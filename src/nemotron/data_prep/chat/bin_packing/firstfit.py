"""First fit: into the first bin, in the order of opening, that still has room."""

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


def first_fit_decreasing(lengths: Lengths, capacity: int) -> Bins:
    """The longest sequences first, each into the first bin that still holds it.

    At most 11/9 of the fewest bins possible, and 6/9 of a bin (Dósa 2007).
    """
    values = check_lengths(lengths, capacity)
    order = longest_first(values, capacity)
    bin_of, num_bins = first_fit_runs(*runs_of(values[order]), capacity)
    return bins_of(values, capacity, order, bin_of, num_bins)


def first_fit_shuffle(lengths: Lengths, capacity: int, seed: int) -> Bins:
    """The sequences in a random order, which their number and `seed` alone decide, each into the first bin it fits.

    Bins get less full than after sorting, but come in no order of length. ValueError for a negative seed.
    """
    values = check_lengths(lengths, capacity)
    order = shuffled(len(values), seed)
    bin_of, num_bins = _first_fit(values[order].tolist(), capacity)
    return bins_of(values, capacity, order, bin_of, num_bins)


def shuffled(count: int, seed: int) -> NDArray[np.int64]:
    """The numbers below `count` in a random order."""
    # numpy promises to keep the raw stream of a bit generator as it is, but not what Generator.permutation makes of it.
    return np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")


def first_fit_runs(sizes: list[int], counts: list[int], capacity: int) -> tuple[NDArray[np.int64], int]:
    """First fit of runs of equal sizes, the sizes strictly decreasing: (bin of each item in order, number of bins).

    Because sizes only shrink, a bin with room r waits until they are down to r, and from then on is a candidate for as
    long as it has room for the present size. So no item ever looks at a bin into which it does not fit.
    """
    room: list[int] = []
    waiting: dict[int, list[int]] = {}  # room -> the bins that have it: less than the present size
    waiting_rooms: list[int] = []  # heap of the keys of `waiting`, negated
    candidates: list[int] = []  # heap of the bins with room for the present size
    bins: list[int] = []
    placed: list[int] = []  # how many items went into the bin at the same place in `bins`
    smallest = sizes[-1] if sizes else 0  # a bin with less room is done

    for size, count in zip(sizes, counts, strict=True):
        while waiting_rooms and -waiting_rooms[0] >= size:
            for number in waiting.pop(-heappop(waiting_rooms)):
                heappush(candidates, number)
        while count and candidates:
            number = candidates[0]
            fit = room[number] // size
            bins.append(number)
            if fit > count:
                placed.append(count)
                room[number] -= count * size
                count = 0  # the bin still has room for one more of this size: it stays a candidate
                break
            heappop(candidates)
            placed.append(fit)
            count -= fit
            room[number] = left = room[number] - fit * size
            if left < smallest:
                continue
            if left in waiting:
                waiting[left].append(number)
            else:
                waiting[left] = [number]
                heappush(waiting_rooms, -left)
        if not count:
            continue
        # No candidate is left: new bins, each with as many of this size as it holds, the last one with the rest.
        in_each = capacity // size
        full, rest = divmod(count, in_each)
        left = capacity - in_each * size
        opened = range(len(room), len(room) + full)
        bins += opened
        placed += [in_each] * full
        room += [left] * full
        if full and left >= smallest:
            if left not in waiting:
                heappush(waiting_rooms, -left)
            waiting.setdefault(left, []).extend(opened)
        if rest:
            heappush(candidates, len(room))
            bins.append(len(room))
            placed.append(rest)
            room.append(capacity - rest * size)
    return np.repeat(np.array(bins, np.int64), placed), len(room)


def _first_fit(sizes: list[int], capacity: int) -> tuple[NDArray[np.int64], int]:
    """First fit in the order given: (bin of each item, number of bins).

    The leaves of a binary tree are the rooms of all bins, also of those not yet opened; a node is the larger of its two
    children. Going down, the left child is taken wherever its room is enough.
    """
    # The contents of two bins exceed the capacity, or the later one would not have been opened: so this is enough.
    leaves = 1 << min(len(sizes), 2 * sum(sizes) // capacity + 1).bit_length()
    tree = [capacity] * (2 * leaves)
    bin_of: list[int] = []
    for size in sizes:
        node = 1
        while node < leaves:
            node += node
            if tree[node] < size:
                node += 1
        bin_of.append(node - leaves)
        largest = tree[node] - size
        tree[node] = largest
        while node > 1:
            sibling = tree[node ^ 1]
            if sibling > largest:
                largest = sibling
            node >>= 1
            if tree[node] == largest:
                break
            tree[node] = largest
    return np.array(bin_of, np.int64), max(bin_of) + 1
