"""How many threads a step computes on: as many as make it faster, measured all the time, with the same results.

Threads wait for each other at the end of every operation. Where another process takes one of their cores, all wait for
the one without a core, a thousand times a step: two threads on two cores of which one is taken are slower than one.
So a few steps in every `PERIOD` are taken with another number of threads, in turns with the one in use, and the faster
number is kept. That may only be where the order of sums does not depend on it, which `fix_order_of_sums` asks of MKL.
Numbers are powers of two: a thread's part of a tensor is then whole vectors of the processor. Three threads would leave
remainders, for which PyTorch computes a sigmoid in another way, with other last bits.
"""

from __future__ import annotations

import os
import statistics
import time

import torch

PERIOD = 64  # steps from one comparison to the next
TURNS = 3  # steps with each of the two numbers in a comparison
MARGIN = 0.95  # the other number has to be faster by this much


def fix_order_of_sums() -> None:
    """Let MKL add up in one order on any number of threads ("strict" conditional numerical reproducibility).

    MKL reads the variable at its first product: call this before. A value that is set already stays.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def sums_are_fixed(most: int) -> bool:
    """Whether a product whose long sums invite dividing them has the same bits on one thread and on `most`."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(16, 4096, generator=generator), torch.randn(4096, 128, generator=generator)
    products = []
    for count in (1, most):
        torch.set_num_threads(count)
        products.append(left @ right)
    return torch.equal(*products)


class Threads:
    """The number of threads of a training loop on a CPU: a power of two, at most `most`.

    The loop calls `begin` before and `end` after what a step computes; anything else stays on the number in use.
    """

    def __init__(self, most: int) -> None:
        self.most = self.count = 1 << (most.bit_length() - 1)
        self.steps = 0
        self._began: float | None = None
        self._seconds: dict[int, list[float]] = {}

    def begin(self) -> None:
        """Choose the threads of this step, and start the clock."""
        if self.most > 1:
            if self.steps % PERIOD == 0:
                self._seconds = {self.count: [], self._other(): []}
            torch.set_num_threads(self._of_this_step())
            self._began = time.perf_counter()

    def end(self) -> None:
        """Stop the clock. Without a `begin` before, nothing happens."""
        if self._began is None:
            return
        position = self.steps % PERIOD
        if position < 2 * TURNS:
            self._seconds[self._of_this_step()].append(time.perf_counter() - self._began)
        if position == 2 * TURNS - 1:
            in_use, other = self._seconds
            medians = {count: statistics.median(seconds) for count, seconds in self._seconds.items()}
            if medians[other] < MARGIN * medians[in_use]:
                self.count = other
        self.steps, self._began = self.steps + 1, None
        torch.set_num_threads(self.count)

    def _of_this_step(self) -> int:
        position = self.steps % PERIOD
        in_use, other = self._seconds
        return other if position < 2 * TURNS and position % 2 else in_use if position < 2 * TURNS else self.count

    def _other(self) -> int:
        """Half as many and twice as many in turns, within 1 and `most`."""
        half, twice = self.count // 2, min(2 * self.count, self.most)
        if half == 0 or (twice != self.count and self.steps // PERIOD % 2):
            return twice
        return half
