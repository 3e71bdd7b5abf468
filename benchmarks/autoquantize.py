#!/usr/bin/env python
"""What formats cost a small Super 3 in agreement with itself, and what AutoQuantize's choice of layers wins back.

    OMP_NUM_THREADS=1 python benchmarks/autoquantize.py

The tiny super3 (LatentMoE, without multi-token prediction) learns bytes of this Python's standard library. Then all
matrices of its mixers are quantised, weights and activations: every one in the same format, or by AutoQuantize under a
budget of bits a weight, beside random choices under the same budget. Measured is the forward KL divergence from the
unquantised model on held-out bytes, and how well the sum of scores ranks the random choices by it.
"""

from __future__ import annotations

import argparse
import random
import statistics
from functools import partial

import numpy as np
import torch
from fp8_gap import BATCH, HELD_OUT, LENGTH, LR, batches
from models import machine
from text import library_lines
from torch import Tensor

from nemotron.kit.schemas.quantization import Precision, QuantAlgo, WeightScales
from nemotron.stack.compression.importance import spearman
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.quantization.autoquantize import (
    BITS,
    Candidates,
    Group,
    candidates,
    fisher_scores,
    group_matrices,
    in_format,
    search,
)
from nemotron.stack.quantization.calibration import calibrate
from nemotron.stack.quantization.layers import Packed, Quantization, layer_kinds, matrix, quantize
from nemotron.stack.training.loaders import Batch
from nemotron.stack.training.losses import next_token_loss

CONFIG = NemotronHConfig(
    "MEM*EME", vocab_size=256, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    mamba_num_heads=4, mamba_head_dim=64, ssm_state_size=32, n_groups=1, chunk_size=32, n_routed_experts=32,
    num_experts_per_tok=4, moe_latent_size=64, moe_intermediate_size=128, moe_shared_expert_intermediate_size=128,
)  # fmt: skip
BUDGETS = (4.75, 5.4, 6.0)  # bits a weight; 4.75 is that of the published checkpoint
CALIBRATION, RANDOM_PLANS = 8, 20  # batches; choices a budget


def train(steps: int, seed: int, stream: Tensor) -> NemotronH:
    """`steps` of AdamW: warm-up over a tenth of them, linear decay over the last fifth."""
    torch.manual_seed(seed)
    model = NemotronH(CONFIG).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    for step, ids in enumerate(batches(stream, steps, seed)):
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / (steps / 10), (steps - step) / (steps / 5))
        out = model(ids[:, :-1])
        (next_token_loss(out.logits, ids[:, 1:]) + 1e-4 * out.load_balancing_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.update_expert_bias()
    return model.eval()


@torch.no_grad()
def divergence(model: NemotronH, quantization: Quantization, held_out: Tensor) -> float:
    """Mean forward KL of the quantised model from the model itself over held-out bytes, in thousandths of a nat."""
    logp = model(held_out[:, :-1]).logits.log_softmax(-1)
    with in_format(model, quantization):
        logq = model(held_out[:, :-1]).logits.log_softmax(-1)
    return 1e3 * (logp.exp() * (logp - logq)).sum(-1).mean().item()


def as_planned(plan: dict[str, QuantAlgo], groups: list[Group], formats: Candidates) -> Quantization:
    """The candidates of a plan in one."""
    packed: dict[str, Packed] = {}
    input_scales: dict[str, Tensor] = {}
    for group in groups:
        if (algorithm := plan.get(group.matrices[0])) is not None:
            packed |= formats[group.name][algorithm].packed
            input_scales |= formats[group.name][algorithm].input_scales
    return Quantization(plan, packed, input_scales, {}, "FP32")


def loss_of(model: NemotronH, ids: Tensor) -> Tensor:
    """Nats a byte, mean over all of them."""
    return next_token_loss(model(ids[:, :-1]).logits, ids[:, 1:])


def random_plan(model: NemotronH, groups: list[Group], budget: float, source: random.Random) -> dict[str, QuantAlgo]:
    """NVFP4, and in random order groups in FP8 or BF16 as long as they fit."""
    sizes = {group.name: sum(matrix(model, name).numel() for name in group.matrices) for group in groups}
    left = (budget - float(BITS["NVFP4"])) * sum(sizes.values())
    plan: dict[str, QuantAlgo] = {}
    for group in source.sample(groups, len(groups)):
        chosen: Precision = source.choice(("FP8", "BF16"))
        more = float(BITS[chosen] - BITS["NVFP4"]) * sizes[group.name]
        if more <= left:
            left -= more
        else:
            chosen = "NVFP4"
        if chosen != "BF16":
            plan |= dict.fromkeys(group.matrices, chosen)
    return plan


def main() -> None:
    """Print the divergences of every seed, then their means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="updates of 4 x 128 bytes")
    parser.add_argument("--seeds", type=int, default=3, help="2 or more")
    args = parser.parse_args()
    print(machine())
    stream = torch.from_numpy(np.frombuffer("".join(library_lines()).encode(), np.uint8).astype(np.int64))
    cut = len(stream) // 20  # the last 5 % are held out
    held_out = torch.cat(list(batches(stream[-cut:], HELD_OUT // BATCH, seed=0)))
    print(f"{NemotronH(CONFIG).num_parameters()[0] / 1e6:.2f} M parameters, {args.steps} steps of {BATCH} x {LENGTH}")
    results: dict[str, list[float]] = {}
    for seed in range(args.seeds):
        model = train(args.steps, seed, stream[:-cut])
        calibration = list(batches(stream[:-cut], CALIBRATION, seed=seed + 1000))
        rows = [Batch(ids[:, :-1], ids[:, 1:], torch.ones_like(ids[:, 1:])) for ids in calibration]
        amax = calibrate(model, rows, kv_cache=False)
        names = [name for name in layer_kinds(CONFIG) if name != "lm_head"]
        here = {"loss, nats a byte": loss_of(model, held_out).item()}
        alike: tuple[tuple[str, QuantAlgo, WeightScales], ...] = (
            ("FP8", "FP8", "max"),
            ("NVFP4, max", "NVFP4", "max"),
            ("NVFP4, mse", "NVFP4", "mse"),
            ("NVFP4, four over six", "NVFP4", "four_over_six"),
            ("NVFP4 weights alone, mse", "W4A16_NVFP4", "mse"),
        )
        for name, algorithm, scales in alike:
            quantization = quantize(model, dict.fromkeys(names, algorithm), amax, scales, ssm_state="FP32")
            here[name] = divergence(model, quantization, held_out)

        groups = group_matrices(names)
        formats = candidates(model, groups, ["NVFP4", "FP8"], amax, "mse")
        scores = fisher_scores(model, groups, formats, calibration, partial(loss_of, model))
        source, sums, divergences = random.Random(seed), [], []
        for budget in BUDGETS:
            chosen = as_planned(search(model, groups, scores, budget), groups, formats)
            here[f"AutoQuantize, {budget} bits"] = divergence(model, chosen, held_out)
            plans = [random_plan(model, groups, budget, source) for _ in range(RANDOM_PLANS)]
            by_chance = [divergence(model, as_planned(plan, groups, formats), held_out) for plan in plans]
            here[f"random choice, {budget} bits: mean"] = statistics.mean(by_chance)
            here[f"random choice, {budget} bits: best of {RANDOM_PLANS}"] = min(by_chance)
            divergences += by_chance
            for plan in plans:
                in_plan = ((group.name, plan.get(group.matrices[0])) for group in groups)
                sums.append(sum(scores[name][algorithm] for name, algorithm in in_plan if algorithm is not None))
        here["rank correlation of scores and divergences"] = spearman(sums, divergences)
        for name, value in here.items():
            results.setdefault(name, []).append(value)
            print(f"seed {seed}  {name:45s} {value:8.3f}", flush=True)
    for name, values in results.items():
        print(f"{name:45s} {statistics.mean(values):8.3f} (standard deviation {statistics.stdev(values):.3f})")


if __name__ == "__main__":
    main()
