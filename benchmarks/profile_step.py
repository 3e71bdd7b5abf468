#!/usr/bin/env python
"""What a training step of the tiny models spends its time on: time, FLOPs and bytes of every kind of operation.

    python benchmarks/profile_step.py
    python benchmarks/profile_step.py --threads 2 --steps rl --top 30
    python benchmarks/profile_step.py --precision fp32    # else what `mixed_precision: auto` is here

Three steps: pretraining (8 x 128 tokens), SFT (the same, packed documents, loss on answers only), and RL (64 groups of
16 completions, then the update). Every operator is timed as it runs, in processor seconds of all threads: other work
on the machine then counts little. FLOPs are those of the products, two a multiply-add, and one an element of everything
else; bytes are those of all operands, as if nothing stayed in a cache. So a rate may lie above the main memory's: the
machine's own rates, for a matmul, an addition in main memory and one in the cache, are measured between the steps.
What lies between the operators is Python, autograd and the optimiser's loop.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from models import machine
from process import restart_with_cpu_settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import nemotron.recipes.nano3 as nano3
from nemotron.kit.schemas.optimizer import AdamWConfig
from nemotron.kit.schemas.rl import ClippedPGLossConfig
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.rl.losses import grpo_loss
from nemotron.stack.rl.rollouts import Rollout, pack_rollouts
from nemotron.stack.rl.shaping import Message
from nemotron.stack.training.distributed import clip_gradients
from nemotron.stack.training.losses import next_token_loss, selected_loss_sum
from nemotron.stack.training.optim import build_optimizer
from nemotron.stack.training.precision import multiplies_bf16

TINY = Path(nano3.__file__).parent / "stage0_pretrain/config/tiny.yaml"
ROWS, LENGTH, DOCUMENT = 8, 128, 40  # rows of a batch, their tokens, and the mean length of packed documents
GROUPS, SAMPLES, CALL, PROMPT, NEW_TOKENS, ROLLOUT_ROW = 64, 16, 16, 40, 64, 256  # of an RL step
STOP_IDS = range(95)  # of 2,048: random weights then end a completion after 21 tokens, as the trained ones do
WITH_GRADIENT = 0.72  # of the groups; in the others all completions have the same reward
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "_linear_pointwise"}

Step = Callable[[], object]


@dataclass
class Cost:
    """What all calls of an operator cost."""

    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


class Operators(TorchDispatchMode):
    """Counts what each operator costs while it is active, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: dict[str, Cost] = defaultdict(Cost)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.process_time_ns()
        out = func(*args, **(kwargs or {}))
        seconds = (time.process_time_ns() - start) / 1e9
        name = func.overloadpacket.__name__
        read, written = list(tensors([*args, *(kwargs or {}).values()])), list(tensors([out]))
        cost = self.costs[name]
        cost.calls += 1
        cost.seconds += seconds
        if not (func.is_view or name.startswith("empty") or name in ("_unsafe_view", "detach")):
            cost.bytes += sum(map(num_bytes, read)) + sum(map(num_bytes, written))
            cost.flops += num_flops(name, read, written)
        return out


def tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, also in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


def num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor; what is only expanded counts once."""
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numbers *= size if stride else 1
    return numbers * tensor.element_size()


def num_flops(name: str, read: list[Tensor], written: list[Tensor]) -> float:
    """FLOPs of one call, as the head of this file counts them."""
    if name in PRODUCTS:
        matrices = [tensor for tensor in read if tensor.dim() >= 2]
        return 2.0 * sum(tensor.numel() for tensor in written) * matrices[0].shape[-1]
    if "attention" in name:  # of causal scores and their product with the values; backward has five products for two
        query = read[0] if "backward" not in name else read[1]
        products = 2 if "backward" not in name else 5
        return products * query.numel() * query.shape[-2]
    return max((tensor.numel() for tensor in (*read, *written)), default=0)


def build() -> tuple[NemotronH, torch.optim.Optimizer]:
    """The model of `-c tiny` with random weights, and its optimiser."""
    torch.manual_seed(0)
    model = NemotronH(NemotronHConfig(**yaml.safe_load(TINY.read_text())["model"])).train()
    return model, build_optimizer(model, AdamWConfig(lr=1e-3, adam_beta2=0.95, weight_decay=0.1))


def update(model: NemotronH, optimizer: torch.optim.Optimizer) -> None:
    """What follows the gradients in every training loop."""
    clip_gradients(model, 1.0).item()
    optimizer.step()
    optimizer.zero_grad()
    model.update_expert_bias()


def pretraining(autocast: torch.autocast) -> dict[str, Step]:
    """A step on random tokens."""
    model, optimizer = build()
    ids_BL = torch.randint(0, model.config.vocab_size, (ROWS, LENGTH + 1))

    def step() -> None:
        with autocast:
            out = model(ids_BL[:, :-1])
        (next_token_loss(out.logits, ids_BL[:, 1:]) + 1e-4 * out.load_balancing_loss).backward()
        update(model, optimizer)

    return {"pretraining": step}


def sft(autocast: torch.autocast) -> dict[str, Step]:
    """A step on packed documents, of which four tokens in ten are answers."""
    model, optimizer = build()
    ids_BL = torch.randint(0, model.config.vocab_size, (ROWS, LENGTH + 1))
    seq_idx_BL = (torch.rand(ROWS, LENGTH) < 1 / DOCUMENT).long().cumsum(1)
    answers_BL = torch.rand(ROWS, LENGTH) < 0.4

    def step() -> None:
        with autocast:
            out = model(ids_BL[:, :-1], seq_idx_BL, answers_BL)
        loss = selected_loss_sum(out.logits, ids_BL[:, 1:][answers_BL]) / answers_BL.sum()
        (loss + 1e-4 * out.load_balancing_loss).backward()
        update(model, optimizer)

    return {"SFT": step}


def rl(autocast: torch.autocast) -> dict[str, Step]:
    """Generating the completions of a step, and the update."""
    model, optimizer = build()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(PROMPT // 2, PROMPT * 3 // 2, (GROUPS,), generator=generator).sort().values.tolist()
    prompts = [torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    rollouts: list[Rollout] = []

    def rollout() -> None:
        rollouts.clear()
        generator.manual_seed(0)
        for start in range(0, GROUPS, CALL):
            with autocast:
                out = generate(
                    model, prompts[start : start + CALL], NEW_TOKENS, stop_token_ids=STOP_IDS,
                    generator=generator, samples_per_prompt=SAMPLES,
                )  # fmt: skip
            for row, tokens in enumerate(out.tokens):
                index = start + row // SAMPLES
                message = Message(num_tokens=len(tokens), generated=True)
                rollouts.append(Rollout(index, prompts[index], tokens, out.logprobs[row], 0.0, False, 0.0, [message]))

    def train() -> None:
        counted = int(WITH_GRADIENT * GROUPS)
        of_tokens = [[float(r.prompt_index < counted)] * len(r.completion_ids) for r in rollouts]
        for micro in pack_rollouts(rollouts, of_tokens, ROLLOUT_ROW, ROWS):
            with autocast:
                logp_T = micro.logprobs(model)
            loss = grpo_loss(
                logp_T, micro.advantages_T, ClippedPGLossConfig(),
                logp_old_T=logp_T.detach(), logp_generator_T=micro.logp_generator_T,
            )  # fmt: skip
            (loss.loss / len(rollouts)).backward()
        update(model, optimizer)

    return {"RL, completions": rollout, "RL, update": train}


def rates() -> tuple[float, float, float]:
    """What this machine does in a processor second now: GFLOP/s of a matmul, GB/s of main memory and of the cache."""
    left, right = torch.ones(512, 512), torch.ones(512, 512)
    product = per_second(partial(torch.mm, left, right), 2e-9 * 512**3)
    memory, cache = (
        per_second(partial(torch.add, torch.ones(count), torch.ones(count), out=torch.ones(count)), 12e-9 * count)
        for count in (1 << 24, 1 << 17)
    )
    return product, memory, cache


def per_second(call: Callable[[], object], amount: float, limit: float = 0.05) -> float:
    """`amount` of one call over its processor seconds."""
    calls, start = 0, time.process_time()
    while (used := time.process_time() - start) < limit or calls < 2:
        call()
        calls += 1
    return amount * calls / used


def report(name: str, step: Step, rounds: int, top: int) -> None:
    """Print the table of one step."""
    plain, wall, machine_rates, operators = [], [], [], Operators()
    for _ in range(rounds):
        machine_rates.append(rates())
        start, used = time.perf_counter(), time.process_time()
        step()
        plain.append(time.process_time() - used)
        wall.append(time.perf_counter() - start)
        with operators:
            step()
    product, memory, cache = (statistics.median(values) for values in zip(*machine_rates, strict=True))
    total = statistics.median(plain)
    print(
        f"\n{name}: {total * 1e3:.1f} ms of processor time ({min(plain) * 1e3:.1f}-{max(plain) * 1e3:.1f}), "
        f"{statistics.median(wall) * 1e3:.1f} ms on the clock"
    )
    print(f"this machine: matmul {product:.0f} GFLOP/s, memory {memory:.1f} GB/s, cache {cache:.0f} GB/s")
    columns = {"calls": 7, "ms": 8, "share": 7, "MFLOP": 8, "MB": 8, "GFLOP/s": 9, "GB/s": 7, "of matmul": 11}
    print(f"{'':30s}" + "".join(f"{name:>{width}s}" for name, width in columns.items()))
    rows = sorted(operators.costs.items(), key=lambda row: -row[1].seconds)
    others = Cost()
    for _, cost in rows[top:]:
        others = Cost(*(mine + more for mine, more in zip(vars(others).values(), vars(cost).values(), strict=True)))
    inside = sum(cost.seconds for _, cost in rows) / rounds
    for label, cost in [*rows[:top], (f"{len(rows) - len(rows[:top])} others", others)]:
        milliseconds, seconds = cost.seconds / rounds * 1e3, max(cost.seconds, 1e-9)
        share = f"{milliseconds / 1e3 / total:7.0%}{cost.flops / rounds / 1e6:8.0f}{cost.bytes / rounds / 1e6:8.0f}"
        achieved = f"{cost.flops / seconds / 1e9:9.1f}{cost.bytes / seconds / 1e9:7.1f}"
        of_matmul = f"{cost.flops / seconds / 1e9 / product:11.0%}" if label in PRODUCTS else ""
        shown = label.removeprefix("_scaled_dot_product_")[:29]
        print(f"{shown:30s}{cost.calls / rounds:7.0f}{milliseconds:8.1f}{share}{achieved}{of_matmul}")
    print(f"{'between operators':30s}{'':7s}{max(0.0, total - inside) * 1e3:8.1f}{max(0.0, 1 - inside / total):7.0%}")


def main() -> None:
    """Profile the steps that were asked for."""
    restart_with_cpu_settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", choices=("pretrain", "sft", "rl"), default=["pretrain", "sft", "rl"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9, help="of a training step; an RL step takes a third of them")
    parser.add_argument("--top", type=int, default=16, help="operators in a table")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bf16 = args.precision == "bf16" or (args.precision == "auto" and multiplies_bf16(torch.device("cpu")))
    print(machine() + (", bf16" if bf16 else ", fp32"))
    for make in ({"pretrain": pretraining, "sft": sft, "rl": rl}[name] for name in args.steps):
        steps = make(torch.autocast("cpu", torch.bfloat16, enabled=bf16))
        for step in steps.values():
            step()  # once without a clock: kernels are compiled, memory is mapped
        for name, step in steps.items():
            report(name, step, max(1, args.rounds // (3 if make is rl else 1)), args.top)


if __name__ == "__main__":
    main()
