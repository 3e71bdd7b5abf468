"""Data parallelism under torchrun, as little of it as a loop needs: who am I, sum this over all ranks.

Gradients are summed, not averaged: a loop divides its loss by the token count of the global batch, which gives every
token the same weight on any number of ranks. With one process every function here does nothing.

Every rank holds the whole model here (DDP), and gradients are summed in one message after the last micro-batch. The
wrapper `torch.nn.parallel.DistributedDataParallel` sends them in buckets while backward still runs, but regroups the
buckets after the first step: with three ranks or more the sums are then taken in another order than after a resume,
which would no longer be bit-exact. Where communication costs much, shard instead (`sharding.py`): that overlaps.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Before any group exists: its functions keep, as the default of an argument, the group of the moment of the import, and
# torch.optim imports it late. A group that is kept is never destroyed: Gloo's threads run on, and now and then abort
# the interpreter at its end.
import torch.distributed.nn
from torch import nn

from nemo_runspec.errors import UserError
from nemo_runspec.gpus import visible_gpus
from nemotron.kit.schemas.training import check_divides

T = TypeVar("T")
Name = TypeVar("Name")


@dataclass(frozen=True)
class Ranks:
    """This process among its peers, and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.rank == 0

    def check_divides(self, key: str, count: int) -> None:
        """UserError naming the config key where `count` of something cannot be spread evenly over all ranks."""
        try:
            check_divides(key, count, self.world_size)
        except ValueError as error:
            hint = f"a multiple of {self.world_size}; on a CPU the config's run.processes says how many"
            raise UserError(str(error), hint) from None


ALONE = Ranks(0, 1, torch.device("cpu"))


def start_distributed() -> Ranks:
    """Join the process group that torchrun describes in the environment; alone without one.

    A CUDA device per local rank where there is one, with NCCL; else CPU with gloo. UserError: more ranks than devices.
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        if local_rank >= (count := torch.cuda.device_count()):
            raise UserError(
                f"process {local_rank} of this machine has no GPU of its own: PyTorch sees {count}",
                f"torchrun --nproc-per-node {count}, run.processes={count}, or CUDA_VISIBLE_DEVICES= for the CPU",
            )
        torch.cuda.set_device(device)
    elif rank == 0 and (count := visible_gpus()):
        print(f"GPUs: {count}, of which torch {torch.__version__} sees none: training on the CPU", file=sys.stderr)
    if world_size > 1:
        # Ranks wait for the slowest one's answers and tests; NCCL's own limit is ten minutes, gloo's is this.
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=30))
        if not cuda:  # a sharded model keeps the group for as long as a script holds it
            atexit.register(stop_distributed)
    return Ranks(rank, world_size, device)


def use_deterministic_cuda() -> None:
    """Let GPUs add up in the same order each time, as a CPU does: else the gradient of attention, summed by atomic
    additions, differs from run to run, and a resumed run ends with other weights."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it PyTorch refuses to multiply
    torch.use_deterministic_algorithms(True)
    # Filling memory that an operation then writes would only show mistakes.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def stop_distributed() -> None:
    """Leave the process group, if any. Its threads end with it, unless a sharded model is still held."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:  # caches of FSDP2's tensors, which keep the group
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    gc.collect()  # FSDP2's modules refer to each other in circles


def sum_over_ranks(tensors: Iterable[torch.Tensor]) -> None:
    """Replace each tensor by its sum over all ranks, in place, in one message per dtype."""
    if not dist.is_initialized():
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        flat = torch.cat([tensor.flatten() for tensor in group])
        dist.all_reduce(flat)
        for tensor, summed in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.copy_(summed.view_as(tensor))


def sum_metrics(values: Mapping[Name, torch.Tensor | float], ranks: Ranks) -> dict[Name, float]:
    """Each of `values`, scalars, summed over all ranks in one message, in float64.

    All ranks call it with the same names in the same order: a rank that has nothing to count passes zeros. Without
    names, as where no source holds text out for validation, there is nothing to send.
    """
    if not values:
        return {}
    sums = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=ranks.device) for v in values.values()])
    sum_over_ranks([sums])
    return dict(zip(values, sums.tolist(), strict=True))


def max_metrics(values: Mapping[Name, float], ranks: Ranks) -> dict[Name, float]:
    """The largest of each of `values` over all ranks, in one message, in float64. Names as in `sum_metrics`."""
    maxima = torch.tensor(list(values.values()), dtype=torch.float64, device=ranks.device)
    if dist.is_initialized():
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
    return dict(zip(values, maxima.tolist(), strict=True))


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a DTensor, of which this rank holds a part (`sharding.py`)."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Any) -> torch.Tensor:
    """A tensor of a model or optimiser, whole; of a sharded one all ranks must call this together."""
    whole: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def sum_gradients(model: nn.Module) -> None:
    """Sum every gradient over all ranks; those of a sharded model are summed already.

    A parameter without one on some rank (nothing to do there in this step) counts as zero, so that all ranks send
    messages of the same shape; one without on all ranks keeps none, and the optimiser leaves it, as in one process.
    """
    if not dist.is_initialized():
        return
    parameters = [p for p in model.parameters() if p.requires_grad and not is_sharded(p)]
    if not parameters:
        return
    has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    has_gradient = has_gradient.to(parameters[0].device)
    dist.all_reduce(has_gradient)
    gradients = []
    for parameter, count in zip(parameters, has_gradient.tolist(), strict=True):
        if count:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    sum_over_ranks(gradients)


def divide_gradients(model: nn.Module, divisor: torch.Tensor) -> None:
    """Divide all gradients by a scalar: of a loss whose denominator is known only after the last micro-batch."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(divisor)


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their norm together is at most `max_norm`; the norm before, a scalar on every rank.

    Call it when they are summed. Of a sharded model each rank holds a part of them, and the norm is that of the whole.
    """
    return full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))


def deal(batches: Iterable[T], ranks: Ranks) -> Iterator[tuple[T, bool]]:
    """This rank's share of `batches`, each with True: every `world_size`-th one.

    All ranks get equally many, since those that share a sharded model must call it together: where the batches do not
    go round in the last turn, a rank gets the last batch with False, and must not count it. One turn is in memory.
    """
    remaining = iter(batches)
    while turn := list(islice(remaining, ranks.world_size)):
        yield turn[min(ranks.rank, len(turn) - 1)], ranks.rank < len(turn)


def message_device() -> torch.device:
    """Where a tensor must lie to be sent: NCCL sends from the GPU, gloo from the CPU."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def from_rank_0(number: int) -> int:
    """The number that rank 0 was called with, on every rank."""
    if not dist.is_initialized():
        return number
    message = torch.tensor([number], device=message_device())
    dist.broadcast(message, src=0)
    return int(message.item())


def least_of_ranks(number: int) -> int:
    """The smallest of the numbers that the ranks were called with, on every rank; each has been called by then."""
    if not dist.is_initialized():
        return number
    message = torch.tensor([number], device=message_device())
    dist.all_reduce(message, op=dist.ReduceOp.MIN)
    return int(message.item())


def gather_bytes(message: bytes) -> list[bytes]:
    """What each rank was called with, by rank; of any length."""
    if not dist.is_initialized():
        return [message]
    device = message_device()
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(message)], device=device))
    longest = max(1, *(int(length) for length in lengths))  # no tensor is made of an empty buffer
    padded = torch.frombuffer(bytearray(message.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
    messages = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(messages, padded)
    pairs = zip(messages, lengths, strict=True)
    return [of_rank[: int(length)].cpu().numpy().tobytes() for of_rank, length in pairs]


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on at least one rank: a signal may reach only some of them, but all must stop together."""
    return least_of_ranks(int(not flag)) == 0
