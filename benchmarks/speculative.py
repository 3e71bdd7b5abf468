#!/usr/bin/env python
"""Plain against speculative greedy decoding: acceptance length and tokens a second, side by side in one process.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/speculative.py

Trains the 1.9 M model with a multi-token prediction block for a minute on sentences of a small grammar, as bytes, then
measures both ways of decoding in turn, round after round, and prints the medians and how many rows came out the same.
What a round costs beside a plain step decides whether it pays: for the tokens of the acceptance length it needs a
verification of k+1 tokens and k applications of the block.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import replace

import torch
from models import MODELS, machine

from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.models.decoding.speculative import Acceptance, generate_speculative
from nemotron.stack.training.losses import mtp_loss, next_token_loss

CONFIG = replace(MODELS["1.9M"], vocab_size=256, num_nextn_predict_layers=1, mtp_num_layers=2)
DRAFTS = (1, 2, 3, 4)
BATCHES = (1, 16)
NEW_TOKENS, ROUNDS = 96, 5
NAMES = ("Ada", "Bruno", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana")
THINGS = ("apples", "books", "candles", "doors", "eggs", "flowers", "gloves", "horses")


def sentence(source: random.Random) -> str:
    """One of three sentences; names, things and numbers are drawn, and the last clause repeats or adds them."""
    name, other = source.sample(NAMES, 2)
    thing, a, b = source.choice(THINGS), source.randint(1, 9), source.randint(1, 9)
    return source.choice(
        (
            f"{name} has {a} {thing} and gives all of them to {other}: now {other} has {a} {thing}. ",
            f"{name} buys {a} {thing}, then {b} more, and carries {a + b} {thing} home to {other}. ",
            f"{other} asks {name} for {thing}. {name} has no {thing} and sends {other} away. ",
        )
    )


def text(source: random.Random, length: int) -> bytes:
    """`length` bytes of sentences."""
    out = b""
    while len(out) < length:
        out += sentence(source).encode()
    return out[:length]


def train(seconds: float) -> NemotronH:
    """The model after `seconds` of AdamW on 8 x 128 bytes a step, loss of multi-token prediction x 0.3."""
    torch.manual_seed(0)
    source, model = random.Random(0), NemotronH(CONFIG).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    start, step, loss = time.perf_counter(), 0, torch.zeros(())
    while time.perf_counter() - start < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * max(0.1, 1 - (time.perf_counter() - start) / seconds)
        ids = torch.tensor([list(text(source, 129)) for _ in range(8)])
        out = model(ids[:, :-1])
        loss = next_token_loss(out.logits, ids[:, 1:])
        depths = mtp_loss(out.mtp_logits, ids[:, 1:])
        (loss + 0.3 * depths + 1e-4 * out.load_balancing_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.update_expert_bias()
        step += 1
    print(
        f"trained {step} steps in {seconds:.0f} s: {loss.item():.3f} nats a byte, {depths.item():.3f} at depths 1 and 2"
    )
    return model.eval()


def measure(model: NemotronH, prompts: list[list[int]]) -> None:
    """Print a line for plain decoding and one for each number of drafts."""
    expected = generate(model, prompts, NEW_TOKENS, temperature=0, stop_token_ids=()).tokens
    tokens = len(prompts) * NEW_TOKENS
    seconds: dict[int, list[float]] = {k: [] for k in (0, *DRAFTS)}
    acceptances: dict[int, Acceptance] = {}
    same: dict[int, int] = {}
    for _ in range(ROUNDS):
        for k in seconds:
            start = time.perf_counter()
            if k == 0:
                generate(model, prompts, NEW_TOKENS, temperature=0, stop_token_ids=())
            else:
                out, acceptances[k] = generate_speculative(model, prompts, NEW_TOKENS, k, stop_token_ids=())
                same[k] = sum(one == other for one, other in zip(out.tokens, expected, strict=True))
            seconds[k].append(time.perf_counter() - start)
    plain = statistics.median(seconds[0])
    print(f"batch {len(prompts):2d}  plain     {tokens / plain:8.0f} tokens/s")
    for k in DRAFTS:
        median, acceptance = statistics.median(seconds[k]), acceptances[k]
        rates = " ".join(f"{rate:.2f}" for rate in acceptance.rates)
        print(
            f"batch {len(prompts):2d}  {k} drafts  {tokens / median:8.0f} tokens/s  {plain / median:4.2f}x plain   "
            f"acceptance length {acceptance.length:.2f} (by draft {rates}), {same[k]} of {len(prompts)} rows the same"
        )


def main() -> None:
    """Train, then measure every batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-seconds", type=float, default=60, help="default: 60")
    seconds = parser.parse_args().train_seconds
    print(machine())
    model = train(seconds)
    source = random.Random(1)
    prompts = [list(text(source, 160)[80:120]) for _ in range(max(BATCHES))]
    for batch in BATCHES:
        measure(model, prompts[:batch])


if __name__ == "__main__":
    main()
