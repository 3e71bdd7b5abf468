"""Sequence lengths in, bins out: best fit and first fit, in near-linear time in Python and numpy.

Sequences stay whole, and the bins are exactly those of the textbook definition, in which every item looks through all
open bins: that takes O(N x bins). Here, for N items in B bins:

    best_fit, best_fit_decreasing    O(N log B)   bins lie in buckets by the room left; a bitset finds the bucket
    first_fit_decreasing             O(N log N)   sizes only shrink, so a bin becomes a candidate only where it fits
    first_fit_shuffle                O(N log B)   a tree of the largest rooms over the bins
    modified_first_fit_decreasing    O(N log N)   sorted stacks and pointers, then first-fit decreasing

Memory is a few arrays and lists of N numbers. Ties: sequences of equal length go in the order given; best fit prefers,
among bins with equal room, the one opened first. The same arguments give the same bins on every machine.

How long a million lengths take, and how full the bins get: `benchmarks/packing.py`.
"""

from __future__ import annotations

from typing import get_args

from nemo_runspec.errors import did_you_mean
from nemotron.data_prep.chat.bin_packing.bestfit import best_fit, best_fit_decreasing
from nemotron.data_prep.chat.bin_packing.bins import Bins, BinsReport, Lengths, lower_bound
from nemotron.data_prep.chat.bin_packing.firstfit import first_fit_decreasing, first_fit_shuffle
from nemotron.data_prep.chat.bin_packing.mffd import modified_first_fit_decreasing
from nemotron.kit.schemas.conversations import BinPacking

__all__ = [
    "Bins",
    "BinsReport",
    "best_fit",
    "best_fit_decreasing",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "lower_bound",
    "modified_first_fit_decreasing",
    "pack_lengths",
]


def pack_lengths(lengths: Lengths, capacity: int, algorithm: BinPacking, *, seed: int = 0) -> Bins:
    """Pack with the algorithm of that name. `seed` is that of `first_fit_shuffle`.

    ValueError for an unknown name, and for what `bins.check_lengths` refuses.
    """
    match algorithm:
        case "best_fit":
            return best_fit(lengths, capacity)
        case "best_fit_decreasing":
            return best_fit_decreasing(lengths, capacity)
        case "first_fit_decreasing":
            return first_fit_decreasing(lengths, capacity)
        case "first_fit_shuffle":
            return first_fit_shuffle(lengths, capacity, seed)
        case "modified_first_fit_decreasing":
            return modified_first_fit_decreasing(lengths, capacity)
    raise ValueError(f"no packing algorithm {algorithm!r}; {did_you_mean(algorithm, get_args(BinPacking))}")
