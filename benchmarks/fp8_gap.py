#!/usr/bin/env python
"""What FP8 training costs in loss: a small dense hybrid trained in fp32, bf16 and emulated blockwise FP8, side by side.

    OMP_NUM_THREADS=1 python benchmarks/fp8_gap.py

The model has the shape of Nemotron Nano 2: M, - and * blocks without experts. It learns bytes of this Python's standard
library. A seed gives all precisions the same initial weights and the same batches, so their losses differ by rounding
alone; how far bf16 is from fp32 says how much of the rest is chance. Held-out loss is measured in the precision that
was trained in. "fp8, all blocks" leaves no block in bf16. Then, at the weights that fp32 reached: how far the gradient
of one batch is from that in fp32, which no chance of training blurs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch
from models import machine
from text import library_lines
from torch import Tensor

from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.quantization.fp8 import train_in_fp8
from nemotron.stack.training.losses import next_token_loss

CONFIG = NemotronHConfig(
    "M-M-M*-M-M-M*-M-", vocab_size=256, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    mamba_num_heads=4, mamba_head_dim=64, ssm_state_size=32, n_groups=1, chunk_size=32, intermediate_size=384,
)  # fmt: skip
# How many blocks at the start and at the end stay in bf16; None: no FP8.
PRECISIONS: dict[str, int | None] = {"fp32": None, "bf16": None, "fp8": 4, "fp8, all blocks": 0}
BATCH, LENGTH, HELD_OUT, LR = 4, 128, 32, 2e-3


def batches(stream: Tensor, steps: int, seed: int) -> Iterator[Tensor]:
    """Windows of LENGTH + 1 bytes, [BATCH, LENGTH + 1] a step."""
    starts = torch.randint(len(stream) - LENGTH, (steps, BATCH), generator=torch.Generator().manual_seed(seed))
    for row in starts:
        yield torch.stack([stream[start : start + LENGTH + 1] for start in row.tolist()])


def build(precision: str) -> NemotronH:
    """The model as `precision` trains it."""
    model, in_bf16 = NemotronH(CONFIG), PRECISIONS[precision]
    if in_bf16 is not None:
        train_in_fp8(model, in_bf16, in_bf16)
    return model


def loss_of(model: NemotronH, precision: str, ids: Tensor) -> Tensor:
    """Nats a byte, mean over all of them."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
        logits = model(ids[:, :-1]).logits
    return next_token_loss(logits, ids[:, 1:])


def train(precision: str, steps: int, seed: int, stream: Tensor) -> NemotronH:
    """`steps` of AdamW: warm-up over a tenth of them, linear decay over the last fifth."""
    torch.manual_seed(seed)
    model = build(precision).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    for step, ids in enumerate(batches(stream, steps, seed)):
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / (steps / 10), (steps - step) / (steps / 5))
        loss_of(model, precision, ids).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def gradient(precision: str, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Of the loss, all parameters in one vector."""
    model = build(precision)
    model.load_state_dict(weights)
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss_of(model, precision, ids), list(model.parameters()))]
    )


def main() -> None:
    """Print the losses of every seed, then the mean gaps to bf16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="updates of 4 x 128 bytes a run")
    parser.add_argument("--seeds", type=int, default=3, help="2 or more")
    args = parser.parse_args()
    print(machine())
    data = np.frombuffer("".join(library_lines()).encode(), np.uint8)
    stream = torch.from_numpy(data.astype(np.int64))
    cut = len(stream) // 20  # the last 5 % are held out
    held_out = torch.cat(list(batches(stream[-cut:], HELD_OUT // BATCH, seed=0)))
    millions = NemotronH(CONFIG).num_parameters()[0] / 1e6
    print(f"{millions:.2f} M parameters, {args.steps} steps of {BATCH} x {LENGTH} bytes")
    losses: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    for seed in range(args.seeds):
        for name in PRECISIONS:
            start = time.process_time()
            model = train(name, args.steps, seed, stream[:-cut])
            with torch.no_grad():
                losses[name].append(loss_of(model, name, held_out).item())
            if name == "fp32":
                weights = model.state_dict()
            seconds = time.process_time() - start
            print(
                f"seed {seed}  {name:16s} {losses[name][-1]:.4f} nats a byte  {seconds:5.1f} s of processor time",
                flush=True,
            )
    for name in PRECISIONS:
        gaps = [100 * (loss / other - 1) for loss, other in zip(losses[name], losses["bf16"], strict=True)]
        mean, deviation = statistics.mean(gaps), statistics.stdev(gaps)
        loss = statistics.mean(losses[name])
        print(f"{name:16s} {loss:.4f}, {mean:+.2f} % beside bf16 (standard deviation {deviation:.2f})")
    exact = gradient("fp32", weights, held_out[:BATCH])
    for name in ("bf16", "fp8", "fp8, all blocks"):
        error = (gradient(name, weights, held_out[:BATCH]) - exact).norm() / exact.norm()
        print(f"{name:16s} gradient off by {100 * error:.1f} %")


if __name__ == "__main__":
    main()
