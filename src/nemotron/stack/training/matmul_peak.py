"""The arithmetic rate that this machine really reaches, measured: the 100 % of the progress line."""

from __future__ import annotations

import time

import torch


def measure_peak_flops(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seconds: float = 0.4
) -> float:
    """FLOP/s of the best square matrix product found within about `seconds` on the current number of threads.

    The best of repeated runs, since the question is what the machine can do, not what it did beside other work. Draws
    from a generator of its own: the random state of the run stays as it is.
    """
    device = torch.device(device)
    size = 1024 if device.type == "cpu" else 8192
    generator = torch.Generator(device=device).manual_seed(0)
    left = torch.randn(size, size, generator=generator, device=device).to(dtype)
    right = torch.randn(size, size, generator=generator, device=device).to(dtype)
    _synchronize(device)
    best, deadline, runs = float("inf"), time.perf_counter() + seconds, 0
    while runs < 3 or time.perf_counter() < deadline:
        start = time.perf_counter()
        left @ right
        _synchronize(device)
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return 2.0 * size**3 / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
