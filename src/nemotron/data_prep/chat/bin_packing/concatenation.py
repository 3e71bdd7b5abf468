"""Concatenation: sequences one after another, cut wherever a bin ends."""

from __future__ import annotations

import numpy as np

from nemotron.data_prep.chat.bin_packing.bins import Bins, Lengths, check_lengths


def concatenate(lengths: Lengths, capacity: int) -> Bins:
    """All sequences one after another, cut every `capacity` tokens: only the last bin has room left.

    The way of pretraining: what follows a cut has lost its beginning, so this is not for conversations.
    """
    values = check_lengths(lengths, capacity, are_cut=True)
    ends = np.cumsum(values)
    first_bins, last_bins = (ends - values) // capacity, (ends - 1) // capacity
    pieces = last_bins - first_bins + 1
    items = np.repeat(np.arange(len(values)), pieces)
    nth = np.arange(len(items)) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of the pieces of its sequence
    in_bin = first_bins[items] + nth
    # A piece begins where its sequence does, or where its bin does.
    starts = np.where(nth == 0, (ends - values)[items], in_bin * capacity)
    offsets = np.append(0, np.cumsum(np.bincount(in_bin)))
    return Bins(capacity, items, starts - (ends - values)[items], np.diff(starts, append=ends[-1]), offsets)
