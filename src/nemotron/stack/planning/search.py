"""The smallest layout that fits: fewest GPUs first, then the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nemo_runspec.errors import UserError
from nemotron.stack.planning.layout import Layout, check, with_parallel
from nemotron.stack.planning.memory import training_memory
from nemotron.stack.planning.speed import Gpu, iteration_seconds

# Allocator, CUDA context, NCCL: of the memory, kept free. In Megatron-Bridge's study of recomputation (skills/
# nemo-mbridge-perf-activation-recompute at 067f987d) 40 GB were reserved for 36.6 GB allocated.
RESERVE = 0.1
SIZES = (1, 2, 4, 8, 16, 32, 64)


def usable_bytes(gpu: Gpu) -> float:
    """Memory of a GPU that a plan may fill."""
    return 1e9 * gpu.memory_gb * (1 - RESERVE)


def fits(layout: Layout, gpu: Gpu) -> bool:
    """Whether its fullest GPU has room."""
    return training_memory(layout).total <= usable_bytes(gpu)


def smallest(layout: Layout, gpu: Gpu, most_nodes: int = 256) -> Layout | None:
    """The layout of the same training with the fewest nodes, a power of two; TP stays within NVLink. None: none up to
    `most_nodes`."""
    nodes = 1
    while nodes <= most_nodes:
        fitting = [each for each in layouts(replace(layout, gpus=nodes * gpu.node), gpu) if fits(each, gpu)]
        if fitting:
            return min(fitting, key=lambda each: iteration_seconds(each, gpu))
        nodes *= 2
    return None


def layouts(layout: Layout, gpu: Gpu) -> Iterator[Layout]:
    """Every layout of so many GPUs that divides."""
    long = layout.seq_len > 16_384
    experts = SIZES if "E" in layout.model.hybrid_override_pattern else (1,)
    for tensor in (size for size in SIZES if size <= 8):
        for pipeline in (size for size in SIZES if size <= layout.gpus):
            for context in SIZES if long else (1,):
                if layout.gpus % (tensor * pipeline * context):
                    continue
                for expert in (size for size in experts if size <= gpu.domain):
                    candidate = with_parallel(
                        layout, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
                        context_parallel_size=context, expert_model_parallel_size=expert,
                        expert_tensor_parallel_size=1, sequence_parallel=tensor > 1,
                    )  # fmt: skip
                    candidate = replace(candidate, virtual=1)
                    try:
                        check(candidate)
                    except UserError:
                        continue
                    yield candidate
