"""Decoding steps on a GPU, replayed: the hundreds of kernels of a step, of some microseconds each, as one CUDA graph.

A graph is recorded once and then does the same to the same memory. So what a step writes stays where it is, and the
slot that keys are written to is a tensor, `Cache.slot_1`: keys are read up to a power of two, those that are not there
yet behind a mask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from nemotron.stack.models.decoding.cache import Cache

# With more rows a GPU computes longer than it takes to launch a step's kernels.
MAX_ROWS = 1024
# Steps on unchanged memory before one is recorded, which takes as long as a step: they also load the kernels.
STEPS_BEFORE = 2

# The stream that a thread records on: cuBLAS keeps memory for each stream that it has seen.
_threads = threading.local()


class ReplayedStep:
    """`step`, int64 [B] -> logits [B, V], as a CUDA graph where that is faster: few rows, often the same ones."""

    def __init__(self, step: Callable[[Tensor], Tensor], cache: Cache) -> None:
        self.step, self.cache = step, cache
        self.memory: tuple[int, ...] = ()  # what the graph would read and write
        self.count = 0  # of steps on it
        self.has_room = True  # for what a graph computes in, which is its own
        self.graph: torch.cuda.CUDAGraph | None = None
        self.input_ids_B: Tensor
        self.logits_BV: Tensor

    def __call__(self, input_ids_B: Tensor) -> Tensor:
        """Raises IndexError where the cache is full."""
        cache = self.cache
        if len(input_ids_B) > MAX_ROWS:
            cache.slot_1 = None
            return self.step(input_ids_B)
        if cache.length == cache.capacity:
            raise IndexError(f"the cache has room for {cache.capacity} tokens")
        if cache.slot_1 is None:
            cache.slot_1 = torch.empty(1, dtype=torch.int64, device=input_ids_B.device)
        cache.slot_1.fill_(cache.length)
        memory = (len(input_ids_B), cache.window, *(tensor.data_ptr() for tensor in cache.tensors()))
        if memory != self.memory:
            self.memory, self.count, self.graph = memory, 0, None
        self.count += 1
        if self.graph is None and self.count > STEPS_BEFORE and self.has_room:
            self.record(input_ids_B)
        if self.graph is None:
            return self.step(input_ids_B)
        self.input_ids_B.copy_(input_ids_B)
        self.graph.replay()
        cache.length += 1
        return self.logits_BV.clone()

    def record(self, input_ids_B: Tensor) -> None:
        """Record the step without taking it. (`torch.cuda.graph` would also collect garbage and free cached memory.)"""
        device, length = input_ids_B.device, self.cache.length
        if not hasattr(_threads, "stream"):
            _threads.stream = torch.cuda.Stream(device)
        graph, stream = torch.cuda.CUDAGraph(), _threads.stream
        self.input_ids_B = input_ids_B.clone()
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")  # another thread may train meanwhile
                try:
                    self.logits_BV = self.step(self.input_ids_B)
                finally:  # Ctrl-C, too: a graph that is dropped half-way takes the allocator with it
                    graph.capture_end()
            self.graph = graph
        except torch.OutOfMemoryError:
            self.has_room = False
        finally:
            self.cache.length = length
        torch.cuda.current_stream(device).wait_stream(stream)
