#!/usr/bin/env python
"""Training speed beside Hugging Face's NemotronH: same weights, same batch, forward + backward + AdamW, one process.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/train_speed.py                 # CPU: fp32, and bf16 where it is faster
    python benchmarks/train_speed.py --device cuda                           # GPU, bf16 autocast

Steps of all implementations are interleaved, so that whatever else the machine does hits all of them; medians are
compared. Hugging Face runs with each of its expert implementations that is worth it, and the fastest counts. Both
sides get the loss of PyTorch, its fused AdamW, and `scaled_dot_product_attention`. Peak memory is read in a fresh
process a side: what three steps, optimiser state included, add to a process that has built the model. On a GPU
transformers without mamba-ssm and causal-conv1d runs its reference code, and says so: install both, or compare with
that in mind.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from models import MODELS, build, huggingface_twin, machine
from process import forget_peak, resident, restart_with_cpu_settings
from torch import Tensor, nn

from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.stack.training.flops import training_flops_per_token
from nemotron.stack.training.matmul_peak import measure_peak_flops
from nemotron.stack.training.optim import build_optimizer
from nemotron.stack.training.precision import multiplies_bf16

CASES = [("1.9M", 8, 256), ("14M", 4, 256), ("14M", 2, 1024)]
GPU_CASES = [("300M", 16, 2048), ("1B", 8, 2048)]
EXPERTS = ("eager", "grouped_mm")  # "batched_mm" gathers a copy of the weights for every token: 7x slower here


@dataclass(frozen=True)
class Case:
    """A model, its batch, and the precision of its products: bf16 through autocast on both sides, or fp32."""

    name: str
    batch: int
    length: int
    device: str
    bf16: bool


def make_step(side: str, case: Case) -> Callable[[], float]:
    """A function that trains one step and returns the loss; `side` is `ours` or an expert implementation of HF."""
    name, device = case.name, case.device
    ours = build(name)
    model: nn.Module = ours
    if side != "ours":
        model = huggingface_twin(ours, experts_implementation=side, attn_implementation="sdpa")
    model = model.to(device).train()
    optimizer = build_optimizer(model, AdamWConfig(lr=1e-3, adam_beta2=0.95, weight_decay=0.1))
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(0, MODELS[name].vocab_size, (case.batch, case.length + 1), generator=source).to(device)
    bf16 = torch.autocast(device, torch.bfloat16, enabled=case.bf16)

    def logits_of(inputs: Tensor) -> Tensor:
        out = model(inputs) if side == "ours" else model(input_ids=inputs, use_cache=False)
        logits: Tensor = out.logits
        return logits

    def step() -> float:
        with bf16:
            logits = logits_of(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # waits for the device

    return step


def compare(case: Case, rounds: int) -> None:
    """Print the table of one model and batch."""
    sides, name, device = ("ours", *EXPERTS), case.name, case.device
    steps = {side: make_step(side, case) for side in sides}
    first = {side: [step() for _ in range(2)] for side, step in steps.items()}
    assert all(abs(losses[1] - first["ours"][1]) < 0.02 for losses in first.values()), first
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[side].append(time.perf_counter() - start)
    peak = measure_peak_flops(device, torch.bfloat16 if case.bf16 else torch.float32)
    tokens, flops = case.batch * case.length, training_flops_per_token(MODELS[name], case.length)
    total, active = build(name).num_parameters()
    shape = f"batch {case.batch} x {case.length}, {'bf16' if case.bf16 else 'fp32'}"
    print(f"\n{name} ({total / 1e6:.1f} M parameters, {active / 1e6:.1f} M active), {shape}")
    print(f"{'':22s}{'tokens/s':>10s}{'ms a step':>11s}{'min':>8s}{'max':>8s}{'of peak':>9s}{'memory':>9s}")
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    for side, values in seconds.items():
        label = "ours" if side == "ours" else f"transformers {side}"
        print(
            f"{label:22s}{tokens / medians[side]:10.0f}{medians[side] * 1e3:11.1f}{min(values) * 1e3:8.1f}"
            f"{max(values) * 1e3:8.1f}{tokens * flops / medians[side] / peak:9.0%}"
            f"{memory(side, case):6.0f} MB"
        )
    fastest = min(EXPERTS, key=medians.__getitem__)
    print(f"ratio to the fastest of transformers: {medians[fastest] / medians['ours']:.2f}x")
    print(f"(100 % of the peak: {peak / 1e9:.0f} GFLOP/s, PyTorch's matmul of 1024^3, measured in this run)")


def memory(side: str, case: Case) -> float:
    """Peak MB that three training steps need beyond a process that has built the model."""
    words = [side, case.name, str(case.batch), str(case.length), "bf16" if case.bf16 else "fp32"]
    arguments = [sys.executable, __file__, "--device", case.device, "--memory", *words]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=os.environ | {"_SETTINGS": "1"})
    return float(done.stdout.split()[-1])


def print_memory(side: str, case: Case) -> None:
    """The child process of `memory`."""
    step = make_step(side, case)
    if case.device == "cuda":
        allocated = torch.cuda.memory_allocated()
        for _ in range(3):
            step()
        print((torch.cuda.max_memory_allocated() - allocated) / 1e6)
        return
    forget_peak()  # of building
    before = resident("VmHWM")
    for _ in range(3):
        step()
    print(resident("VmHWM") - before)


def main() -> None:
    """Measure every case of the device."""
    restart_with_cpu_settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--memory", nargs=5, metavar=("SIDE", "MODEL", "BATCH", "LENGTH", "TYPE"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.memory:
        side, name, batch, length, precision = args.memory
        print_memory(side, Case(name, int(batch), int(length), args.device, precision == "bf16"))
        return
    print(machine())
    both = (False, True) if multiplies_bf16(torch.device("cpu")) else (False,)
    for name, batch, length in CASES if args.device == "cpu" else GPU_CASES:
        for bf16 in both if args.device == "cpu" else (True,):
            compare(Case(name, batch, length, args.device, bf16), args.rounds)


if __name__ == "__main__":
    main()
