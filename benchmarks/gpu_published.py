#!/usr/bin/env python
"""What the published Nano 3 takes on this machine's GPU, with random weights: gradients of adapters, and decoding.

    python benchmarks/gpu_published.py

63 GB of bf16 weights are made on the GPU, without a file. Gradients are those of `nemotron nano3 sft -c lora`: rows
of 2,048 tokens of which seven in ten are trained, adapters of rank 32, each block computed again in the backward pass.
Medians of the rounds, the lowest and the highest in brackets. `--device cpu`, on the first blocks and short rows, only
shows that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace

import torch
from gpu_steps import Ways, compare, compare_decoding, kernel_by_kernel
from models import machine

from nemotron.kit.schemas.peft import PeftConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.presets import PRESETS
from nemotron.stack.training.distributed import use_deterministic_cuda
from nemotron.stack.training.lora import add_lora
from nemotron.stack.training.losses import selected_loss_sum
from nemotron.stack.training.sharding import recompute_activations

DOCUMENTS = 5  # of a packed row


def main() -> None:
    """Decoding of 1, 64 and 512 rows, then gradients of 1, 2 and 4 rows at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    device, rounds = args.device, args.rounds
    config, length, decoded, micro_batches = PRESETS["nano3-30b"], 2048, [1, 64, 512], [1, 2, 4]
    if device == "cpu":
        config = replace(config, hybrid_override_pattern="ME*", hidden_size=64, moe_intermediate_size=64)
        length, decoded, micro_batches = 32, [1], [1]

    use_deterministic_cuda()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = NemotronH(config).eval()
    torch.set_default_dtype(torch.float32)
    total, active = model.num_parameters()
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{machine()}\n{name}; {total / 1e9:.1f} B parameters, {active / 1e9:.1f} B active, bf16")

    ways: Ways = {"as it is": contextlib.nullcontext, "launched kernel by kernel": kernel_by_kernel}
    for count in decoded:
        seconds = compare_decoding(model, count, ways, rounds, device)
        print(f"{count / seconds:,.0f} tokens/s")

    add_lora(model, PeftConfig(peft_scheme="lora", dim=32, alpha=32))
    recompute_activations(model, "full")
    model.train()
    for rows in micro_batches:
        ids_BL = torch.randint(config.vocab_size, (rows, length + 1), device=device)
        answers_BL = torch.rand(rows, length, device=device) < 0.7
        seq_idx_BL = (torch.arange(length, device=device) * DOCUMENTS // length).expand(rows, -1)

        def gradient() -> int:
            with torch.autocast(device, torch.bfloat16):
                logits_TV = model(ids_BL[:, :-1], seq_idx_BL, answers_BL).logits  # noqa: B023
            selected_loss_sum(logits_TV, ids_BL[:, 1:][answers_BL]).backward()  # noqa: B023
            return 1

        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        way: Ways = {"adapters": contextlib.nullcontext}
        seconds = compare(f"gradient of {rows} x {length}", gradient, way, rounds, device)
        peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
        print(f"{rows * length / seconds:,.0f} tokens/s, peak memory {peak:.1f} GB")


if __name__ == "__main__":
    main()
