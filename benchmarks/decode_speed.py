#!/usr/bin/env python
"""Greedy decoding beside Hugging Face's `generate`: same weights, same prompts, same tokens, one process.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/decode_speed.py
    OMP_WAIT_POLICY=PASSIVE python benchmarks/decode_speed.py --models 14M --batches 1 16 --rounds 9

Prompts of 32 tokens, 128 new ones, no early stop, fp32 on the CPU. For every batch size, short trials find Hugging
Face's fastest setting of experts, attention and cache; then both sides take turns, so that whatever else the machine
does hits both, and the median of the rounds' ratios is printed with the lowest and the highest. Both sides must
generate the same tokens: of random weights a few tokens in 100,000 are ties that rounding decides, so a row may go its
own way from where the two candidates' logits, computed in float64, differ by less than 1e-5. Ours also records
log-probabilities and entropies; `sampled` is ours at temperature 1.

Memory: the peak of a fresh process that loads one model and generates once, and how much of it the generation added.
What bounds a step: its share of the matmul peak, and the weights, states and keys that it must read or write at least,
as a share of the speed of copying memory. Both peaks are measured in the same run.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from models import build, huggingface_twin, machine
from process import forget_peak, resident, restart_with_cpu_settings

from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.models.published.parameters import count_parameters
from nemotron.stack.training.flops import forward_flops_per_token
from nemotron.stack.training.matmul_peak import measure_peak_flops

PROMPT_TOKENS, NEW_TOKENS = 32, 128
TRIAL_TOKENS, TRIAL_ROUNDS = 16, 3
# Hugging Face's settings: (experts_implementation, attn_implementation, cache_implementation).
SETTINGS = [
    ("eager", "sdpa", None),
    ("grouped_mm", "sdpa", None),
    ("batched_mm", "sdpa", None),
    ("grouped_mm", "eager", None),
    ("grouped_mm", "sdpa", "static"),
]

Generate = Callable[[], list[list[int]]]


def ours(model: NemotronH, prompts: list[list[int]], new_tokens: int, temperature: float = 0.0) -> list[list[int]]:
    """This project's side."""
    return generate(model, prompts, new_tokens, temperature=temperature, stop_token_ids=()).tokens


def theirs(
    twin: Any, prompts: list[list[int]], new_tokens: int, experts: str, attention: str, cache: str | None
) -> list[list[int]]:
    """Hugging Face's side: no stop token, no outputs but the tokens."""
    twin.set_experts_implementation(experts)
    twin.set_attn_implementation(attention)
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        out = twin.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, num_beams=1,
            use_cache=True, cache_implementation=cache, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=False, output_scores=False, output_attentions=False, output_hidden_states=False,
        )  # fmt: skip
    tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return tokens


def make_prompts(config: NemotronHConfig, batch: int) -> list[list[int]]:
    """Random tokens, the same on every call."""
    source = torch.Generator().manual_seed(batch)
    prompts: list[list[int]] = torch.randint(config.vocab_size, (batch, PROMPT_TOKENS), generator=source).tolist()
    return prompts


def take_turns(sides: dict[Any, Generate], rounds: int) -> tuple[dict[Any, list[float]], dict[Any, list[list[int]]]]:
    """Seconds of every round of every side, and the tokens of the last."""
    seconds: dict[Any, list[float]] = {side: [] for side in sides}
    tokens: dict[Any, list[list[int]]] = {}
    for _ in range(rounds):
        for side, call in sides.items():
            start = time.perf_counter()
            tokens[side] = call()
            seconds[side].append(time.perf_counter() - start)
    return seconds, tokens


def fastest_setting(twin: Any, prompts: list[list[int]]) -> tuple[str, str, str | None]:
    """Which of SETTINGS decodes these prompts fastest."""
    sides: dict[Any, Generate] = {
        setting: partial(theirs, twin, prompts, TRIAL_TOKENS, *setting) for setting in SETTINGS
    }
    take_turns(sides, 1)
    seconds, _ = take_turns(sides, TRIAL_ROUNDS)
    return min(SETTINGS, key=lambda setting: min(seconds[setting]))


def bytes_per_step(config: NemotronHConfig, batch: int) -> float:
    """Bytes that a step in the middle of a generation must move: weights once, states read and written, keys read."""
    counts = count_parameters(config)
    # Of E experts, K chosen at random by each of B tokens: the share that somebody chose.
    visited = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** batch
    weights = counts.total - counts.embedding - counts.routed_experts * (1 - visited)
    states = 2 * config.hybrid_override_pattern.count("M") * config.mamba_inner_size * config.ssm_state_size
    keys = config.hybrid_override_pattern.count("*") * 2 * config.num_key_value_heads * config.head_dim
    return 4 * (weights + batch * (states + keys * (PROMPT_TOKENS + NEW_TOKENS / 2)))


def measure_copy_bandwidth() -> float:
    """Bytes read and written a second by copying 128 MB, the best of several."""
    source, target = torch.ones(1 << 25), torch.empty(1 << 25)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best


def compare(name: str, batch: int, rounds: int) -> str:
    """Measure one model at one batch size; a line of the table."""
    model = build(name).eval()
    twin = huggingface_twin(model).eval()
    prompts = make_prompts(model.config, batch)
    setting = fastest_setting(twin, prompts)
    sides: dict[Any, Generate] = {
        "ours": partial(ours, model, prompts, NEW_TOKENS),
        "theirs": partial(theirs, twin, prompts, NEW_TOKENS, *setting),
        "sampled": partial(ours, model, prompts, NEW_TOKENS, 1.0),
    }
    take_turns(sides, 1)
    seconds, tokens = take_turns(sides, rounds)
    equal_rows = check_tokens(model, prompts, tokens["ours"], tokens["theirs"])
    ratios = [their / our for their, our in zip(seconds["theirs"], seconds["ours"], strict=True)]
    rate = {side: batch * NEW_TOKENS / statistics.median(values) for side, values in seconds.items()}
    flops = forward_flops_per_token(model.config, PROMPT_TOKENS + NEW_TOKENS)
    # The prompt's tokens are computed too, all at once: 1.25 forward passes of a token for each new one.
    of_peak = rate["ours"] * (1 + PROMPT_TOKENS / NEW_TOKENS) * flops / measure_peak_flops()
    of_copy = rate["ours"] / batch * bytes_per_step(model.config, batch) / measure_copy_bandwidth()
    peaks = [memory(side, name, batch, setting) for side in ("ours", "theirs")]
    return (
        f"{batch:5d}{rate['ours']:10.0f}{rate['sampled']:9.0f}{rate['theirs']:13.0f}"
        f"{f'{statistics.median(ratios):.2f}x ({min(ratios):.2f} .. {max(ratios):.2f})':>24s}"
        f"{equal_rows:8d}{of_peak:8.0%}{of_copy:6.0%}   {peaks[0]:>12s}{peaks[1]:>13s}"
        f"   {' '.join(str(part) for part in setting if part)}"
    )


def check_tokens(
    model: NemotronH, prompts: list[list[int]], our_tokens: list[list[int]], their_tokens: list[list[int]]
) -> int:
    """How many rows are equal; exits where one differs and not because of a tie."""
    exact, equal_rows = copy.deepcopy(model).double(), 0
    for row, (our, their) in enumerate(zip(our_tokens, their_tokens, strict=True)):
        step = next((i for i in range(NEW_TOKENS) if our[i] != their[i]), None)
        if step is None:
            equal_rows += 1
            continue
        with torch.inference_mode():
            logits_V = exact(torch.tensor([prompts[row] + our[:step]])).logits[0, -1]
        gap = float(logits_V[our[step]] - logits_V[their[step]])
        if abs(gap) > 1e-5:
            sys.exit(f"row {row}, step {step}: token {our[step]} here, {their[step]} there, logits differ by {gap:.1e}")
    return equal_rows


def memory(side: str, name: str, batch: int, setting: tuple[str, str, str | None]) -> str:
    """Peak MB of a fresh process, and how many of them one generation added."""
    arguments = [sys.executable, __file__, "--memory", side, name, str(batch), *(str(part) for part in setting)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def print_memory(side: str, name: str, batch: int, experts: str, attention: str, cache: str) -> None:
    """The child process of `memory`."""
    model: Any = build(name).eval()
    prompts = make_prompts(model.config, batch)
    if side == "theirs":
        model = huggingface_twin(model).eval()  # frees ours
        decode: Callable[..., Any] = partial(
            theirs, experts=experts, attention=attention, cache=None if cache == "None" else cache
        )
    else:
        decode = ours
    decode(model, prompts[:1], 2)
    forget_peak()
    before = resident("VmRSS")
    decode(model, prompts, NEW_TOKENS)
    peak = resident("VmHWM")
    print(f"{peak:.0f} (+{peak - before:.0f})")


def main() -> None:
    """Print a table a model."""
    restart_with_cpu_settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["1.9M", "14M"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        side, name, batch, *setting = args.memory
        print_memory(side, name, int(batch), *setting)
        return
    print(machine())
    print(f"matmul peak {measure_peak_flops() / 1e9:.0f} GFLOP/s, copying {measure_copy_bandwidth() / 1e9:.0f} GB/s")
    for name in args.models:
        total, active = build(name).num_parameters()
        print(
            f"\n{name}: {total} parameters, {active} active; "
            f"{PROMPT_TOKENS} + {NEW_TOKENS} tokens, {args.rounds} rounds"
        )
        print(
            f"{'':5s}{'tokens/s':>10s}{'':46s}{'equal':>8s}{'share of':>14s}   peak MB (+ added)\n"
            f"{'batch':5s}{'ours':>10s}{'sampled':>9s}{'transformers':>13s}{'ratio (min .. max)':>24s}{'rows':>8s}"
            f"{'matmul':>8s}{'copy':>6s}   {'ours':>12s}{'transformers':>13s}   transformers' fastest setting"
        )
        for batch in args.batches:
            print(compare(name, batch, args.rounds), flush=True)


if __name__ == "__main__":
    main()
