#!/usr/bin/env python
"""Plain against speculative decoding: acceptance length and wall clock, side by side in one process.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/speculative.py
    python benchmarks/speculative.py --models super3-rlhf-model-tiny super3-mtp-healing-model-tiny

Without models it trains one of 14 M parameters with a multi-token prediction block for 150 seconds on sentences of a
small grammar, as bytes, and decodes 96 tokens behind other sentences. With models, each by name or folder, it decodes
their answers to tasks of the evaluation split, which no data holds; two models show what healing adds.

Both ways of decoding take turns, batch by batch; the ratio of a round is that of its two sums. Printed are the median
and the range over rounds, and greedy how many rows came out the same. What a round of drafting costs beside a plain
step decides whether it pays: for the tokens of the acceptance length it needs a verification of k+1 tokens and k
applications of the block.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from models import MODELS, machine

from nemotron.kit import Checkpoint
from nemotron.kit.schemas.difficulty import DEFAULT_FAMILIES
from nemotron.stack.environments import generate_tasks
from nemotron.stack.evaluation.model import load_tokenizer, stop_token_ids
from nemotron.stack.evaluation.scoring import prompt_text
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.models.decoding.speculative import Acceptance, generate_speculative
from nemotron.stack.training.losses import mtp_loss, next_token_loss

DRAFTS = (1, 2, 3, 5, 7)
NEW_TOKENS = 96
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


def train(size: str, seconds: float) -> NemotronH:
    """The model after `seconds` of AdamW on 8 x 128 bytes a step, loss of multi-token prediction x 0.3."""
    torch.manual_seed(0)
    config = replace(MODELS[size], vocab_size=256, num_nextn_predict_layers=1, mtp_num_layers=2)
    source, model = random.Random(0), NemotronH(config).train()
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


def task_prompts(model: Checkpoint, count: int, families: list[str]) -> list[list[int]]:
    """Tasks of the evaluation split under the model's chat template, of these families in turn."""
    per_family = -(-count // len(families))
    by_family = [generate_tasks(family, "eval", per_family) for family in families]
    tasks = [task for of_turn in zip(*by_family, strict=True) for task in of_turn][:count]
    texts = [prompt_text(task, model.template) for task in tasks]
    return [encoding.ids for encoding in load_tokenizer(model.path).encode_batch(texts, add_special_tokens=False)]


def measure(
    model: NemotronH, prompts: list[list[int]], stops: list[int], batch: int, temperature: float, rounds: int
) -> None:
    """Print a line for plain decoding in batches of this size, and one for each number of drafts."""
    batches = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    rates: dict[int, list[float]] = {k: [] for k in (0, *DRAFTS)}  # tokens a second, a round
    acceptances = {k: Acceptance(0, [0] * k) for k in DRAFTS}
    same = dict.fromkeys(DRAFTS, 0)
    for index in range(rounds + 1):  # the first one warms up
        seconds, tokens = dict.fromkeys(rates, 0.0), dict.fromkeys(rates, 0)
        for number, some in enumerate(batches):
            plain: list[list[int]] = []
            for k in rates:
                source = torch.Generator().manual_seed(1000 * index + number)
                start = time.perf_counter()
                if k == 0:
                    out = generate(
                        model, some, NEW_TOKENS, temperature=temperature, stop_token_ids=stops, generator=source
                    )
                    plain = out.tokens
                else:
                    out, acceptance = generate_speculative(
                        model, some, NEW_TOKENS, k, temperature, stop_token_ids=stops, generator=source
                    )
                seconds[k] += time.perf_counter() - start
                tokens[k] += sum(map(len, out.tokens))
                if k and index:
                    acceptances[k].rounds += acceptance.rounds
                    for depth, kept in enumerate(acceptance.accepted):
                        acceptances[k].accepted[depth] += kept
                if k and index == rounds:
                    same[k] = same[k] + sum(one == other for one, other in zip(out.tokens, plain, strict=True))
        if index:
            for k in rates:
                rates[k].append(tokens[k] / seconds[k])
    mode = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    print(f"batch {batch:2d}, {mode}: plain {statistics.median(rates[0]):8.0f} tokens/s")
    for k in DRAFTS:
        ratios = [fast / slow for fast, slow in zip(rates[k], rates[0], strict=True)]
        by_draft = " ".join(f"{rate:.2f}" for rate in acceptances[k].rates)
        rows_same = f", {same[k]} of {len(prompts)} rows the same" if temperature == 0 else ""
        print(
            f"  {k} drafts  {statistics.median(ratios):4.2f}x plain ({min(ratios):.2f} to {max(ratios):.2f})   "
            f"acceptance length {acceptances[k].length:.2f} (by draft {by_draft}){rows_same}"
        )


def main() -> None:
    """Train or load, then measure every batch size, greedy and at temperature 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[], help="by name or folder; default: train one")
    parser.add_argument("--families", nargs="+", default=list(DEFAULT_FAMILIES), help="of the tasks; default: six")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16], help="default: 1 4 16")
    parser.add_argument("--size", choices=list(MODELS), default="14M", help="of the model to train; default: 14M")
    parser.add_argument("--train-seconds", type=float, default=150, help="default: 150")
    parser.add_argument("--prompts", type=int, default=16, help="default: 16")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    args = parser.parse_args()
    print(machine())
    if not args.models:
        source, model = random.Random(1), train(args.size, args.train_seconds)
        prompts = [list(text(source, 160)[80:120]) for _ in range(args.prompts)]
        for batch in args.batches:
            measure(model, prompts, [], batch, 0.0, args.rounds)
    for name in args.models:
        made = Checkpoint.load(path=Path(name)) if Path(name).is_dir() else Checkpoint.load(name)
        model = NemotronH.from_pretrained(made.path).eval()
        print(f"{made.ref}, {len(model.config.hybrid_override_pattern)} blocks of width {model.config.hidden_size}")
        prompts, stops = task_prompts(made, args.prompts, args.families), stop_token_ids(made.path, made.template)
        for batch in args.batches:
            for temperature in (0.0, 1.0):
                measure(model, prompts, stops, batch, temperature, args.rounds)


if __name__ == "__main__":
    main()
