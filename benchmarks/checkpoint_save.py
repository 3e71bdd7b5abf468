#!/usr/bin/env python
"""How long a training step waits for a checkpoint: written by the loop, or in the background (`checkpoint.async_save`).

    python benchmarks/checkpoint_save.py                     # 14 M and 0.18 B parameters, 2 GB of disk, several minutes
    python benchmarks/checkpoint_save.py --models 14M --folder /some/disk

A checkpoint is weights, AdamW moments and step counts, 12 bytes a parameter, fsynced. Saves of both kinds alternate.
The stall is the time in `Checkpoints.save`; for the background kind also how long the writing then takes, and how much
slower the steps beside it are: the two share processor and memory.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from models import MODELS, machine
from process import restart_with_cpu_settings

from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.training.checkpoint import Checkpoints
from nemotron.stack.training.losses import next_token_loss
from nemotron.stack.training.optim import build_optimizer

SIZES = {
    "14M": MODELS["14M"],
    # nano3 pretrain -c small
    "180M": NemotronHConfig(
        "MEM*EMEMEM*EME", vocab_size=8192, hidden_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        mamba_num_heads=16, mamba_head_dim=64, ssm_state_size=64, n_groups=4, chunk_size=128, n_routed_experts=32,
        num_experts_per_tok=4, moe_intermediate_size=768, moe_shared_expert_intermediate_size=1536,
    ),
}  # fmt: skip
ROUNDS = 3
BATCH, LENGTH = 2, 256


def measure(config: NemotronHConfig, folder: Path) -> None:
    """Train, save, and print medians and ratios for one model."""
    torch.manual_seed(0)
    model = NemotronH(config).train()
    optimizer = build_optimizer(model, AdamWConfig(lr=1e-4, adam_beta2=0.95, weight_decay=0.1))
    ids = torch.randint(0, config.vocab_size, (BATCH, LENGTH + 1))

    def step() -> float:
        start = time.perf_counter()
        next_token_loss(model(ids[:, :-1]).logits, ids[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    step()
    alone = [step() for _ in range(3)]
    beside: list[float] = []
    stall: dict[str, list[float]] = {"sync": [], "async": []}
    writing = []
    with (
        Checkpoints(folder / "sync", "run", keep_last=1) as in_loop,
        Checkpoints(folder / "async", "run", keep_last=1, async_save=True) as in_background,
    ):
        for save in range(1, ROUNDS + 2):
            for kind, checkpoints in (("sync", in_loop), ("async", in_background)):
                start = time.perf_counter()
                checkpoints.save(save, model, optimizer, {})
                stall[kind].append(time.perf_counter() - start)
                while kind == "async" and checkpoints.is_writing:
                    beside.append(step())
                checkpoints.wait()
                if kind == "async":
                    writing.append(time.perf_counter() - start)
                else:
                    alone.append(step())
    size = sum(file.stat().st_size for file in (folder / "sync").rglob("*.safetensors"))
    step_seconds = statistics.median(alone)
    first = stall["async"][0]
    sync, background = (statistics.median(stall[kind][1:]) for kind in ("sync", "async"))
    print(f"\n{model.num_parameters()[0] / 1e6:.1f} M parameters, {size / 1e6:.0f} MB; medians of {ROUNDS} saves")
    print(f"  a step of {BATCH} x {LENGTH} tokens      {step_seconds:8.3f} s")
    print(f"  stall, written by the loop   {sync:8.3f} s  {sync / step_seconds:6.2f} steps")
    print(f"  stall, in the background     {background:8.3f} s  {background / step_seconds:6.2f} steps", end="")
    print(f"  {sync / background:5.1f}x less (the first, into fresh memory, {first:.3f} s)")
    slower = statistics.median(beside) / step_seconds if beside else float("nan")
    print(f"  writing takes {statistics.median(writing[1:]):.3f} s, during which steps are {slower:.2f}x as long")


def main() -> None:
    """Print a block a model."""
    restart_with_cpu_settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    options = parser.parse_args()
    print(machine())
    for name in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            measure(SIZES[name], Path(folder))


if __name__ == "__main__":
    main()
