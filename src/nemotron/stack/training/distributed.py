"""Data parallelism under torchrun, as little of it as a loop needs: who am I, sum this over all ranks.

Gradients are summed, not averaged: a loop divides its loss by the token count of the global batch, which gives every
token the same weight on any number of ranks. With one process every function here does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


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


def start_distributed() -> Ranks:
    """Join the process group that torchrun describes in the environment; alone without one.

    A CUDA device per local rank where there is one, with NCCL; else CPU with gloo.
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    return Ranks(rank, world_size, device)


def stop_distributed() -> None:
    """Leave the process group, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()


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


def sum_gradients(model: nn.Module) -> None:
    """Sum every gradient over all ranks. A parameter without one on some rank (an expert that no token chose) counts
    as zero there, so that all ranks send messages of the same shape."""
    if not dist.is_initialized():
        return
    gradients = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    sum_over_ranks(gradients)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether `flag` is true on at least one rank: a signal may reach only some of them, but all must stop together."""
    if not dist.is_initialized():
        return flag
    flags = torch.tensor([float(flag)], device=device)
    dist.all_reduce(flags)
    return bool(flags.item() > 0)
