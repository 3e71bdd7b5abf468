"""How many threads an update computes on: as many as make it faster, measured all the time, with the same results.

Threads wait for each other at the end of every operation. Where another process takes one of their cores, all wait for
the one without a core, a thousand times a step: two threads on two cores of which one is taken are slower than one.
So a few updates in every `PERIOD` are taken with another number of threads, in turns with the one in use, and the
faster number is kept. A clock decides, so that is only for loops whose results do not depend on the number:
`fix_order_of_sums` asks MKL for that, and `has_fixed_gradients` tries it. It also depends on the shapes: where a
thread's part of a tensor is no whole vectors of the processor, PyTorch computes the sigmoids and exponentials of its
remainder in another way, with other last bits. Numbers are powers of two, which leave remainders less often.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time

import torch

from nemotron.stack.models import NemotronH
from nemotron.stack.training.distributed import clip_gradients, full_tensor
from nemotron.stack.training.losses import mtp_loss, selected_loss_sum

PERIOD = 64  # steps from one comparison to the next
TURNS = 3  # steps with each of the two numbers in a comparison
MARGIN = 0.95  # the other number has to be faster by this much


def fix_order_of_sums() -> None:
    """Let MKL add up in one order on any number of threads ("strict" conditional numerical reproducibility).

    MKL reads the variable at its first product: call this before. A value that is set already stays.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def has_fixed_gradients(model: NemotronH, shape: tuple[int, int], packed: bool, autocast: torch.autocast) -> bool:
    """Whether a micro-batch has the same loss and gradients, bit by bit, on 1, 2, 4 ... threads up to those in use.

    Its tokens are random. A product whose long sums invite dividing them is compared as well: how many rows an expert
    gets changes with every batch. `model`, in training mode, stays as it is, without gradients.

    Args:
        shape: rows, and tokens of a row. packed: rows of several documents, with half of the tokens trained.
    """
    generator, (rows, seq_len), most = torch.Generator().manual_seed(0), shape, torch.get_num_threads()
    left, right = torch.randn(16, 4096, generator=generator), torch.randn(4096, 128, generator=generator)
    ids_BL = torch.randint(model.config.vocab_size, (rows, seq_len + 1), generator=generator)
    documents_BL = (torch.arange(seq_len) // 40).expand(rows, -1) if packed else None
    answers_BL = torch.rand(rows, seq_len, generator=generator) < 0.5 if packed else None
    labels_T = ids_BL[:, 1:].flatten() if answers_BL is None else ids_BL[:, 1:][answers_BL]
    digests = set()
    for power in range(most.bit_length()):
        torch.set_num_threads(1 << power)
        with autocast:
            out = model(ids_BL[:, :-1], documents_BL, answers_BL)
        loss = selected_loss_sum(out.logits.flatten(0, -2), labels_T) / len(labels_T) + out.load_balancing_loss
        if out.mtp_logits:
            loss = loss + mtp_loss(out.mtp_logits, ids_BL[:, 1:], documents_BL, answers_BL)
        loss.backward()
        clip_gradients(model, 1e-3)  # so low that the norm is in every gradient
        gradients = [full_tensor(p.grad) for p in model.parameters() if p.grad is not None]
        digest = hashlib.sha256()
        for tensor in (left @ right, loss.detach().reshape(1), *gradients):
            digest.update(tensor.contiguous().view(torch.uint8).numpy())
        digests.add(digest.digest())
        model.zero_grad()
        model.update_expert_bias(0.0)  # forgets the loads
    torch.set_num_threads(most)
    return len(digests) == 1


def choose_threads(model: NemotronH, shape: tuple[int, int], most: int, packed: bool = False) -> Threads:
    """For a loop of one process in fp32: at most `most` threads, or 1 where the number would change an update's bits.

    Called in training mode and before the process's first matrix product; else as `has_fixed_gradients`.
    """
    fix_order_of_sums()
    torch.set_num_threads(most)
    if most > 1 and not has_fixed_gradients(model, shape, packed, torch.autocast("cpu", enabled=False)):
        torch.set_num_threads(1)
    return Threads(torch.get_num_threads())


class Threads:
    """The number of threads of the updates of a training loop on a CPU: a power of two, at most `at_start`.

    The loop calls `begin` before and `end` after an update; anything else stays on `at_start`, any number.
    """

    def __init__(self, at_start: int) -> None:
        self.at_start = at_start
        self.most = self.count = 1 << (at_start.bit_length() - 1)
        self.steps = 0
        self._began: float | None = None
        self._seconds: dict[int, list[float]] = {}

    def begin(self) -> None:
        """Choose the threads of this update, and start the clock."""
        if self.most > 1:
            if self.steps % PERIOD == 0:
                self._seconds = {self.count: [], self._other(): []}
            torch.set_num_threads(self._of_this_step())
            self._began = time.perf_counter()

    def end(self) -> None:
        """Stop the clock, back to the threads of the start. Without a `begin` before, nothing happens."""
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
        torch.set_num_threads(self.at_start)

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
