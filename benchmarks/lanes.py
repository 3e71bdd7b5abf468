#!/usr/bin/env python
"""Two halves of a batch at once on two threads (`stack/training/lanes.py`) beside OpenMP's two threads, and beside one.

    python benchmarks/lanes.py
    python benchmarks/lanes.py --busy     # while another process computes on one core

Three kinds of work on Nano 2's tiny model with random weights: the gradient of pretraining's batch, 8 x 128 tokens;
that of SFT's, 2 rows of 384 with packed documents; and drawing 256 answers of 32 tokens. Rounds are interleaved, with
some seconds of each variant in a round, since OpenMP takes a while to change its number of threads. Printed are the
median over the rounds of how many times as fast as one thread a variant is, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from models import machine
from process import restart_with_cpu_settings
from torch import Tensor

from nemotron.recipes.nano2.stage0_pretrain.training import ARCHITECTURE
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.training.lanes import Lanes
from nemotron.stack.training.losses import next_token_loss

Rows = tuple[Tensor, Tensor | None]
"""Token ids [B, L + 1], and the document of each token [B, L] where there are several."""
PROMPT, NEW_TOKENS = 32, 32


def main() -> None:
    """Measure every variant of every work in turn; print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each variant in a round")
    parser.add_argument("--busy", action="store_true", help="with another process that computes")
    args = parser.parse_args()
    restart_with_cpu_settings()
    print(machine() + (", another process computes" if args.busy else ""))
    with another_process() if args.busy else nullcontext():
        for name, (whole, halves) in works().items():
            rates: dict[str, list[float]] = {"one thread": [], "OpenMP, two threads": [], "two lanes": []}
            for _ in range(args.rounds):
                for variant, (threads, work) in zip(rates, ((1, whole), (2, whole), (1, halves)), strict=True):
                    torch.set_num_threads(threads)
                    rates[variant].append(times_a_second(work, args.seconds))
            for variant in ("OpenMP, two threads", "two lanes"):
                ratios = [rate / one for rate, one in zip(rates[variant], rates["one thread"], strict=True)]
                spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
                print(f"{name}: {variant} {statistics.median(ratios):.2f} x one thread ({spread})", flush=True)


def works() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Each work, whole and in two lanes."""
    torch.manual_seed(0)
    model, lanes = NemotronH(ARCHITECTURE), Lanes()
    vocab = model.config.vocab_size
    documents_BL = (torch.arange(384) // 65).expand(2, -1)
    prompts = torch.randint(vocab, (256, PROMPT)).tolist()

    def loss_sum(rows: Rows) -> Tensor:
        ids_BL, seq_idx_BL = rows
        return next_token_loss(model(ids_BL[:, :-1], seq_idx_BL).logits, ids_BL[:, 1:])

    def gradient(rows: Rows) -> tuple[Callable[[], object], Callable[[], object]]:
        ids_BL, seq_idx_BL = rows
        documents = (None, None) if seq_idx_BL is None else seq_idx_BL.chunk(2)
        halves = [*zip(ids_BL.chunk(2), documents, strict=True)]

        def whole() -> None:
            model.zero_grad()
            loss_sum(rows).backward()

        def in_lanes() -> None:
            model.zero_grad()
            lanes.add_gradients(model, loss_sum, halves, 2)

        return whole, in_lanes

    def answer(part: list[list[int]]) -> object:
        return generate(model, part, NEW_TOKENS, temperature=1.0, generator=torch.Generator().manual_seed(0))

    return {
        "pretraining, 8 x 128": gradient((torch.randint(vocab, (8, 129)), None)),
        "SFT, 2 x 384 packed": gradient((torch.randint(vocab, (2, 385)), documents_BL)),
        "decoding, 256 answers": (lambda: answer(prompts), lambda: lanes.map(answer, [prompts[:128], prompts[128:]])),
    }


def times_a_second(work: Callable[[], object], seconds: float) -> float:
    """After a warm-up of a third as long, which is not counted."""
    for limit in (seconds / 3, seconds):
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < limit:
            work()
            count += 1
    return count / (time.perf_counter() - start)


@contextmanager
def another_process() -> Iterator[None]:
    """A process that multiplies matrices on one thread until the end."""
    code = "import torch; torch.set_num_threads(1); a = torch.randn(512, 512)\nwhile True: a @ a"
    other = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        other.kill()
        other.wait()


if __name__ == "__main__":
    main()
