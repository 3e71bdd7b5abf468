#!/usr/bin/env python
"""Packing sequence lengths into rows of 4,096 tokens: seconds and efficiency of every algorithm, on one core.

    python benchmarks/packing.py

The lengths are lognormal with mean 664 (sigma 1) before they are clipped to 1 .. 4,096. Beside them the textbook
first fit, in which every item looks through all open bins: measured for 10,000 lengths, and what that extrapolates to
for more, since its cost grows with their square. Times are processor seconds, which other work on the machine disturbs
least, the median of three. Memory is the peak of Python's and numpy's allocations while packing the largest number (a
run of its own, as tracing slows it down).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from nemotron.data_prep.chat.bin_packing import first_fit_decreasing, pack_lengths
from nemotron.kit.schemas.conversations import BinPacking

MEAN, SIGMA, CAPACITY, ROUNDS = 664, 1.0, 4096, 3
NAIVE = 10_000


def lengths_of(count: int) -> NDArray[np.int64]:
    """Lognormal lengths, clipped to the capacity."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count)
    return np.clip(drawn, 1, CAPACITY).astype(np.int64)


def naive_first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The textbook: every item looks through all bins, in the order of their opening."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for item, length in enumerate(lengths):
        for number, room in enumerate(rooms):
            if room >= length:
                bins[number].append(item)
                rooms[number] -= length
                break
        else:
            bins.append([item])
            rooms.append(capacity - length)
    return bins


def seconds(work: Callable[[], object]) -> float:
    """Median processor seconds of several calls."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    """Print a table a count, then the textbook beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    counts = parser.parse_args().counts
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    algorithms: tuple[BinPacking, ...] = get_args(BinPacking)
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    print(f"{platform.machine()}, one of {os.cpu_count()} cores; {versions}; median of {ROUNDS}")
    print(f"lognormal lengths, mean {MEAN}, sigma {SIGMA:g}, clipped to {CAPACITY}")
    for count in counts:
        lengths = lengths_of(count)
        print(f"\n{count:,} lengths, mean {lengths.mean():.0f} once clipped")
        for name in algorithms:
            report = pack_lengths(lengths, CAPACITY, name).report()
            took = seconds(lambda lengths=lengths, name=name: pack_lengths(lengths, CAPACITY, name))  # type: ignore[misc]
            memory = ""
            if count == max(counts):
                tracemalloc.start()
                pack_lengths(lengths, CAPACITY, name)
                memory = f", {tracemalloc.get_traced_memory()[1] / 2**20:4.0f} MiB"
                tracemalloc.stop()
            print(
                f"  {name:30s} {took:7.3f} s  {report.efficiency:8.3%} full, {report.bins:,} bins "
                f"(at least {report.lower_bound:,}){memory}"
            )
    lengths = np.sort(lengths_of(NAIVE))[::-1]
    listed = lengths.tolist()
    took = seconds(lambda: naive_first_fit(listed, CAPACITY))
    ours = seconds(lambda: first_fit_decreasing(lengths, CAPACITY))
    same = [members.tolist() for members in first_fit_decreasing(lengths, CAPACITY)] == naive_first_fit(
        listed, CAPACITY
    )
    print(
        f"\ntextbook first-fit decreasing, {NAIVE:,} sorted lengths: {took:.2f} s, {took / ours:,.0f}x ours; ", end=""
    )
    print("the same bins" if same else "OTHER BINS")
    shuffled = lengths_of(NAIVE).tolist()
    took = seconds(lambda: naive_first_fit(shuffled, CAPACITY))
    print(f"textbook first fit, {NAIVE:,} lengths in random order: {took:.2f} s; extrapolated, not measured: ", end="")
    print(", ".join(f"{count:,}: {took * (count / NAIVE) ** 2 / 60:,.1f} min" for count in counts if count > NAIVE))


if __name__ == "__main__":
    main()
