"""Two lanes: halves of a batch, or of anything else that comes in independent parts, at once on two threads.

OpenMP's threads share the work of each operation and wait for each other after it; two lanes wait for each other once
a step. On an idle machine both are about as fast. Where another process has one of two cores, OpenMP's two threads take
twice as long as one, and two lanes no longer than one (`benchmarks/lanes.py`). It is data parallelism inside one
process, on one copy of the weights; PyTorch's (`DistributedDataParallel`) takes processes, each with a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from threading import Event
from typing import TypeVar

import torch
from torch import Tensor, nn

from nemotron.stack.training.threads import fix_order_of_sums

LANES = 2

Part = TypeVar("Part")
Result = TypeVar("Result")


class Stopped(BaseException):
    """Another lane has failed, or the process is to end. No `except Exception` on the way takes it for a failure."""


class Lanes:
    """Works on parts at once; an operation then has one thread, here and in the thread that makes the lanes.

    Results depend on how the parts are cut, never on `threads`: with 1 the lanes take turns. Where a part fails, or a
    signal arrives, those that nobody has begun are dropped and `poll` stops the others; then the error is raised. The
    work may read what both lanes share, and write nothing to it.

    Args:
        threads: 1 or 2.
    """

    def __init__(self, threads: int = LANES) -> None:
        fix_order_of_sums()  # for a phase with OpenMP's threads that follows: it has to be set before the first product
        torch.set_num_threads(1)
        self._threads = threads
        self._open()

    def _open(self) -> None:
        self._stopped = Event()
        self._pool = ThreadPoolExecutor(self._threads, "lane", torch.set_num_threads, (1,))

    def poll(self) -> None:
        """Raise `Stopped` where the result is no longer wanted: long work asks now and then."""
        if self._stopped.is_set():
            raise Stopped

    def map(self, work: Callable[[Part], Result], parts: Iterable[Part]) -> list[Result]:
        """`work` of every part, in their order. A lane that is free takes the next one."""
        if self._stopped.is_set():  # not before: a thread that a signal kept from being counted has time to see it
            self._open()
        try:
            futures = [self._pool.submit(work, part) for part in parts]
            failed, pending = list[Future[Result]](), set(futures)
            while pending and not failed:  # a second at a time: Python overlooks a signal that comes as a wait begins
                ended, pending = wait(pending, timeout=1, return_when=FIRST_EXCEPTION)
                failed = [future for future in futures if future in ended and future.exception()]
            if failed:
                failed[0].result()  # raises
            return [future.result() for future in futures]
        except BaseException:
            self._stopped.set()
            self._pool.shutdown(cancel_futures=True)  # waits for what has begun
            raise

    def add_gradients(
        self, model: nn.Module, loss_of: Callable[[Part], Tensor], parts: Sequence[Part], divisor: float = 1.0
    ) -> Tensor:
        """Add the gradient of (the sum of the parts' losses) / `divisor` to that of `model`; returns that mean.

        Parts go to the lanes by turns, each lane adds up its own in their order, then the sums of the two are added;
        without parts nothing is. `loss_of` may measure as well: of a vector [n] the first is the loss, and all means
        come back.

        Raises:
            ValueError: the model has buffers, which both lanes would write to (a load of experts that is counted).
        """
        if next(model.buffers(), None) is not None:
            raise ValueError(f"{type(model).__name__} has buffers: two forward passes at once would write to them")
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

        def gradients(lane: Sequence[Part]) -> tuple[Tensor, list[Tensor]]:
            total, sums = torch.zeros(()), list[Tensor]()
            for part in lane:
                self.poll()
                losses = loss_of(part) / divisor
                of_part = torch.autograd.grad(losses.reshape(-1)[0], parameters, materialize_grads=True)
                total = total + losses.detach()
                sums = [*of_part] if not sums else [a + b for a, b in zip(sums, of_part, strict=True)]
            return total, sums

        if not parts:
            return torch.zeros(())
        (total, sums), *others = self.map(gradients, [parts[i::LANES] for i in range(min(LANES, len(parts)))])
        for other, more in others:
            total, sums = total + other, [a + b for a, b in zip(sums, more, strict=True)]
        for parameter, gradient in zip(parameters, sums, strict=True):
            # In the layout of the weight, as `backward` leaves it: the fused AdamW reads both by position in memory.
            so_far = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = so_far.add_(gradient)
        return total
