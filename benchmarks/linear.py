#!/usr/bin/env python
"""fp32 matrix products of a linear layer and its gradient: oneDNN (`kernels/linear.py`) beside PyTorch's own.

    python benchmarks/linear.py
    python benchmarks/linear.py --threads 1

A second table has the products of 16 experts of 128 x 128 (`kernels/experts.py`): in fp32 one by one, and at once, in
bf16 with operands given in bf16, or in fp32 with the few rows of a decoding step.

T tokens, K inputs, N outputs: y = x W^T, dx = dy W, dW = dy^T x. The two are interleaved; the best of all rounds is
printed, as GFLOP/s, because the question is what each library can do. A last line says what a new shape costs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from models import machine
from process import restart_with_cpu_settings

from nemotron.stack.models.kernels.experts import choose_implementation, dispatch
from nemotron.stack.models.kernels.linear import HAS_ONEDNN, matmul_nt

EXPERTS, WIDTH = 16, 128
SHAPES = [(2048, 128, 648), (2048, 128, 2048), (2048, 256, 1288), (2048, 256, 4096), (512, 128, 128)]


def seconds(call: Callable[[], object]) -> float:
    """One call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    restart_with_cpu_settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    print(machine())
    if not HAS_ONEDNN:
        sys.exit("this build of torch has no oneDNN for x86")
    print(f"{'T, K, N':>16s}" + "".join(f"{name:>24s}" for name in ("y = x W^T", "dx = dy W", "dW = dy^T x")))
    print(f"{'':16s}" + f"{'PyTorch oneDNN ratio':>24s}" * 3)
    for tokens, inner, outer in SHAPES:
        x, weight, dy = torch.randn(tokens, inner), torch.randn(outer, inner), torch.randn(tokens, outer)
        products: list[tuple[Callable[[], object], Callable[[], object]]] = [
            (partial(torch.mm, x, weight.T), partial(matmul_nt, x, weight)),
            (partial(torch.mm, dy, weight), partial(matmul_nt, dy, weight.T)),
            (partial(torch.mm, dy.T, x), partial(matmul_nt, dy.T, x.T)),
        ]
        line = f"{f'{tokens}, {inner}, {outer}':>16s}"
        for own, onednn in products:
            best = [float("inf"), float("inf")]
            for _ in range(40):
                best = [min(best[0], seconds(own)), min(best[1], seconds(onednn))]
            own_rate, onednn_rate = (2 * tokens * inner * outer / value / 1e9 for value in best)
            line += f"{f'{own_rate:.0f} {onednn_rate:.0f} {onednn_rate / own_rate:.2f}x':>24s}"
        print(line)
    print(f"\n{'rows an expert':>16s}{'fp32 one by one, us':>24s}{'at once, us':>24s}{'ratio':>12s}")
    for rows in (256, 128, 64, 32, 16, 8, 2):
        dtype = torch.bfloat16 if rows >= 16 else torch.float32  # as training and decoding have them
        x, weight = torch.randn(EXPERTS * rows, WIDTH), torch.randn(EXPERTS, WIDTH, WIDTH)
        chosen = torch.arange(EXPERTS).repeat_interleave(rows).unsqueeze(1)  # every expert gets as many
        singly = dispatch(chosen, EXPERTS, *choose_implementation(x, rows, WIDTH))
        multiple, _ = choose_implementation(x.to(dtype), rows, WIDTH)
        batched = dispatch(chosen, EXPERTS, multiple, "batched_mm")
        calls = (partial(singly.products, x, weight), partial(batched.products, x.to(dtype), weight.to(dtype)))
        best = [float("inf"), float("inf")]
        for _ in range(40):
            best = [min(so_far, seconds(call)) for so_far, call in zip(best, calls, strict=True)]
        precision = "bf16" if dtype == torch.bfloat16 else "fp32"
        print(f"{rows:16d}{best[0] * 1e6:24.0f}{best[1] * 1e6:19.0f} {precision}{best[0] / best[1]:11.2f}x")
    x, weight = torch.randn(4096, 128), torch.randn(128, 128)
    first = [seconds(partial(matmul_nt, x[:rows], weight)) for rows in range(1000, 1100)]
    again = [seconds(partial(matmul_nt, x[:rows], weight)) for rows in range(1000, 1100)]
    print(f"a shape seen for the first time costs {(sum(first) - sum(again)) * 10:.2f} ms more than later")


if __name__ == "__main__":
    main()
