#!/usr/bin/env python
"""What nano3's `small` takes on this machine's GPU: an update of 32 rows of 1,024 tokens, and a token of decoding.

    python benchmarks/gpu_steps.py

Each choice stands beside what it was chosen over, in turns in one process, in bf16: the experts as PyTorch's grouped
product or one by one, sums in one order or in any; steps of decoding as a recorded graph or kernel by kernel, and
attention without cuDNN or with it. Medians of the rounds, the lowest and the highest in brackets. `--device cpu`, on
fewer and shorter rows, only shows that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import yaml
from models import machine

from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.recipes.nano3 import stage0_pretrain
from nemotron.recipes.nano3.stage0_pretrain.schema import ModelConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding import replay, steps
from nemotron.stack.models.decoding.cache import Cache
from nemotron.stack.models.decoding.steps import prefill, step
from nemotron.stack.models.kernels import experts
from nemotron.stack.models.published.config_json import config_from_dict
from nemotron.stack.training.distributed import use_deterministic_cuda
from nemotron.stack.training.flops import training_flops_per_token
from nemotron.stack.training.losses import next_token_loss
from nemotron.stack.training.matmul_peak import measure_peak_flops
from nemotron.stack.training.optim import build_optimizer

SMALL = Path(stage0_pretrain.__file__).parent / "config/small.yaml"
PROMPT_TOKENS, NEW_TOKENS = 64, 16
Ways = dict[str, Callable[[], contextlib.AbstractContextManager[object]]]


@contextlib.contextmanager
def any_order() -> Iterator[None]:
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


def kernel_by_kernel() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(replay, "MAX_ROWS", 0)


@contextlib.contextmanager
def cudnn() -> Iterator[None]:
    with kernel_by_kernel(), mock.patch.object(steps, "without_cudnn", lambda device: contextlib.nullcontext()):
        yield


def one_by_one() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(experts, "choose_implementation", lambda *of: (1, "eager"))


def compare(label: str, run: Callable[[], int], ways: Ways, rounds: int, device: str) -> float:
    """Print milliseconds of each way, for each of the units that `run` returns; the seconds of the first way."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1 + rounds):  # the first one warms up
        for name, way in ways.items():
            with way():
                synchronize(device)
                began = time.perf_counter()
                units = run()
                synchronize(device)
                if number:
                    seconds[name].append((time.perf_counter() - began) / units)
    for name, values in seconds.items():
        low, high = min(values) * 1e3, max(values) * 1e3
        print(f"{label}, {name}: {statistics.median(values) * 1e3:.1f} ms ({low:.1f} to {high:.1f})", flush=True)
    return statistics.median(next(iter(seconds.values())))


def compare_decoding(model: NemotronH, count: int, ways: Ways, rounds: int, device: str) -> float:
    """`compare` of a token of `count` rows, each way on a cache of its own: the turn that warms up records a graph."""
    prompts_BL = torch.randint(model.config.vocab_size, (count, PROMPT_TOKENS), device=device)
    seconds = []
    for name, way in ways.items():
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16):
            capacity = PROMPT_TOKENS + NEW_TOKENS * (1 + rounds)
            logits_BV, cache = prefill(model, prompts_BL, torch.ones_like(prompts_BL).bool(), capacity)
            decode = partial(take_steps, model, logits_BV.argmax(-1), cache)
            seconds.append(compare(f"a token of {count} rows", decode, {name: way}, rounds, device))
            cache.step = None
    return seconds[0]


def take_steps(model: NemotronH, input_ids_B: torch.Tensor, cache: Cache) -> int:
    for _ in range(NEW_TOKENS):
        step(model, input_ids_B, cache)
    return NEW_TOKENS


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Training, then decoding 64 rows and 2,048."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    device, rounds = args.device, args.rounds
    rows, length, decoded = (32, 1024, (64, 2048)) if device == "cuda" else (1, 128, (4,))

    use_deterministic_cuda()
    torch.manual_seed(0)
    config = config_from_dict(ModelConfig.model_validate(yaml.safe_load(SMALL.read_text())["model"]).model_dump())
    model = NemotronH(config).to(device).train()
    total, active = model.num_parameters()
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{machine()}\n{name}; {total / 1e6:.0f} M parameters, {active / 1e6:.0f} M active, bf16")

    optimizer = build_optimizer(model, AdamWConfig(lr=1e-3, adam_beta2=0.95, weight_decay=0.1))
    ids_BL = torch.randint(config.vocab_size, (rows, length + 1), device=device)

    def update() -> int:
        with torch.autocast(device, torch.bfloat16):
            logits_BLV = model(ids_BL[:, :-1]).logits
        next_token_loss(logits_BLV, ids_BL[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1

    label = f"update of {rows} x {length}"
    training: Ways = {
        "as it is": contextlib.nullcontext, "experts one by one": one_by_one, "sums in any order": any_order,
    }  # fmt: skip
    seconds = compare(label, update, training, rounds, device)
    rate, peak = rows * length / seconds, measure_peak_flops(device, torch.bfloat16)
    share = rate * training_flops_per_token(config, length) / peak
    print(f"{rate:,.0f} tokens/s, {share:.0%} of {peak / 1e12:.1f} TFLOP/s, the matmul peak measured in this run")

    model.eval()
    torch.use_deterministic_algorithms(False)  # in a session they are on, and cuDNN is off
    decoding: Ways = {
        "as it is": contextlib.nullcontext, "launched kernel by kernel": kernel_by_kernel,
        "and with cuDNN's attention": cudnn,
    }  # fmt: skip
    for count in decoded:
        compare_decoding(model, count, decoding, rounds, device)


if __name__ == "__main__":
    main()
