"""Modified first-fit decreasing (Johnson & Garey 1985, "A 71/60 theorem for bin packing")."""

from __future__ import annotations

from bisect import bisect_left

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
from nemotron.data_prep.chat.bin_packing.firstfit import first_fit_runs


def modified_first_fit_decreasing(lengths: Lengths, capacity: int) -> Bins:
    """First-fit decreasing that first finds good company for the sequences longer than half a bin.

    At most 71/60 of the fewest bins possible, and one bin. Sequences are large (over 1/2 of the capacity), medium (over
    1/3), small (over 1/6) or tiny, and are placed in five phases:

    1. A bin for each large one, the largest first.
    2. Forward through the bins: the largest medium one that fits, if one does.
    3. Backward through the bins without a medium one: if the two smallest small ones fit, the smallest of them and
       the largest that fits with it.
    4. Forward through the bins, whatever fits: the largest that does, again and again.
    5. First-fit decreasing of the rest, in bins of their own.

    NeMo-RL's packer of this name follows the same phases, but looks only into the emptiest bin in phase 5.
    """
    values = check_lengths(lengths, capacity)
    order = longest_first(values, capacity)
    sizes, counts = runs_of(values[order])  # decreasing
    # Items of a run are used up in the order given; `used` of them are placed. Item `begin` + `used` comes next.
    begin = (np.cumsum(counts) - counts).tolist()
    used = [0] * len(sizes)
    # Placements in the order in which they are made: `taken` items from position `position` on, into bin `into`.
    position: list[int] = []
    taken: list[int] = []
    into: list[int] = []

    def place(run: int, number: int, count: int = 1) -> None:
        position.append(begin[run] + used[run])
        taken.append(count)
        into.append(number)
        used[run] += count

    first_medium, first_small, first_tiny = (
        sum(share * size > capacity for size in sizes) for share in (2, 3, 6)
    )  # runs by class: [0, first_medium) large, [first_medium, first_small) medium, [first_small, first_tiny) small

    # --- 1. Large ------------------------------------------------------------------------------------------------
    room: list[int] = []
    for run in range(first_medium):
        for _ in range(counts[run]):
            place(run, len(room))
            room.append(capacity - sizes[run])
    # --- 2. Medium: rooms grow, so what fitted once goes on fitting: a stack whose top is the largest that fits ------
    without_medium: list[int] = []
    fitting: list[int] = []
    next_medium = first_small - 1
    for number in range(len(room)):
        while next_medium >= first_medium and sizes[next_medium] <= room[number]:
            fitting.append(next_medium)
            next_medium -= 1
        if not fitting:
            without_medium.append(number)
            continue
        run = fitting[-1]
        place(run, number)
        room[number] -= sizes[run]
        if used[run] == counts[run]:
            fitting.pop()
    # --- 3. Small, two by two: rooms shrink and the smallest grows, so what was too large for the second stays it ----
    low, high = first_tiny - 1, first_small  # runs of the smallest and of the largest that may still be used
    for number in reversed(without_medium):
        while low >= high and used[low] == counts[low]:
            low -= 1
        while high <= low and (sizes[high] > room[number] - sizes[low] or used[high] == counts[high]):
            high += 1
        if high > low or (high == low and counts[low] - used[low] < 2):
            break
        for run in (low, high):
            place(run, number)
            room[number] -= sizes[run]
    # --- 4. Anything that fits ------------------------------------------------------------------------------------
    shrinking = [-size for size in sizes]
    # The first run at or after this one that has items left, or a step on the way to it (union-find).
    nearest = [run if used[run] < counts[run] else run + 1 for run in range(len(sizes))] + [len(sizes)]
    for number in range(len(room)):
        while True:
            run = bisect_left(shrinking, -room[number])
            while nearest[run] != run:
                nearest[run] = run = nearest[nearest[run]]
            if run == len(sizes):
                break
            count = min(counts[run] - used[run], room[number] // sizes[run])
            place(run, number, count)
            room[number] -= count * sizes[run]
            if used[run] == counts[run]:
                nearest[run] = run + 1
    # --- 5. The rest ------------------------------------------------------------------------------------------------
    rest = [run for run in range(len(sizes)) if used[run] < counts[run]]
    last, num_last = first_fit_runs([sizes[run] for run in rest], [counts[run] - used[run] for run in rest], capacity)
    placed = _ranges(position, taken)
    unplaced = np.ones(len(order), np.bool_)
    unplaced[placed] = False
    positions = np.concatenate([placed, np.flatnonzero(unplaced)])
    bin_of = np.concatenate([np.repeat(np.array(into, np.int64), taken), len(room) + last])
    return bins_of(values, capacity, order[positions], bin_of, len(room) + num_last)


def _ranges(starts: list[int], lengths: list[int]) -> NDArray[np.int64]:
    """The numbers of all ranges start .. start + length, one range after another: int64."""
    counts = np.array(lengths, np.int64)
    shifts = np.array(starts, np.int64) - (np.cumsum(counts) - counts)
    return np.repeat(shifts, counts) + np.arange(int(counts.sum()))
