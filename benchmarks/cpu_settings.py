#!/usr/bin/env python
"""What the launcher's CPU settings (`nemo_runspec.execution.local.CPU_SETTINGS`) are worth for a small model.

    python benchmarks/cpu_settings.py

The settings act when a process starts, so each variant is a process of its own; rounds are interleaved, and the ratio
of the medians over all rounds is printed. A step is forward, backward and AdamW of the tiny model on 8 x 128 tokens.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from nemo_runspec.execution.local import CPU_SETTINGS

ROUNDS = 3
STEP = """
import time, torch
from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.training.losses import next_token_loss
from nemotron.stack.training.optim import build_optimizer

torch.manual_seed(0)
model = NemotronH(NemotronHConfig(mamba_num_heads=4, mamba_head_dim=64, chunk_size=32, n_groups=1,
                                  moe_shared_expert_intermediate_size=128))
optimizer = build_optimizer(model, AdamWConfig(lr=1e-3, adam_beta2=0.95, weight_decay=0.1))
ids = torch.randint(0, 2048, (8, 129))
for step in range(25):
    if step == 5:
        start = time.perf_counter()
    next_token_loss(model(ids[:, :-1]).logits, ids[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()
print((time.perf_counter() - start) / 20)
"""


def seconds_a_step(settings: dict[str, str]) -> float:
    """Mean seconds of a training step in a fresh process that has only these settings."""
    environment = {name: value for name, value in os.environ.items() if name not in CPU_SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", STEP], env=environment | settings, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    """Measure all variants in turn, several times, and print medians and ratios."""
    openmp = {name: value for name, value in CPU_SETTINGS.items() if not name.startswith("MALLOC")}
    malloc = {name: value for name, value in CPU_SETTINGS.items() if name.startswith("MALLOC")}
    variants = {
        "all settings": CPU_SETTINGS,
        "OMP_WAIT_POLICY=PASSIVE alone": {"OMP_WAIT_POLICY": "PASSIVE"},
        "without the malloc settings": openmp,
        "without the OpenMP settings": malloc,
        "none": {},
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, settings in variants.items():
            seconds[name].append(seconds_a_step(settings))
    best = statistics.median(seconds["all settings"])
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}; median of {ROUNDS} processes each")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:32s} {median * 1e3:7.1f} ms a step   {median / best:5.2f}x")


if __name__ == "__main__":
    main()
