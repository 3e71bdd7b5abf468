"""Rollouts drawn ahead of the trainer: which weights draw which, and that a stopped run goes on to the same weights."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load, save
from torch import Tensor

from nemotron.kit.stop import StopRequested
from nemotron.recipes.nano3.stage2_rl.schema import RLConfig
from nemotron.stack.environments import Task
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.rl import rollout_buffer
from nemotron.stack.rl.grpo import Batch, step_metrics, token_advantages, update
from nemotron.stack.rl.rollout_buffer import RolloutBuffer
from nemotron.stack.rl.rollouts import Rollout
from nemotron.stack.rl.shaping import Message
from nemotron.stack.training.distributed import ALONE, Ranks

STEPS = 4
PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3]]
ANSWER = [5, 6]


def config(**changed: Any) -> RLConfig:
    policy: dict[str, Any] = {"model_name": Path("model"), "max_total_sequence_length": 24, "max_grad_norm": 1e9}
    policy["generation"] = {"max_new_tokens": 6}
    run, grpo = {"model": "model", "data": "data"}, {"num_generations_per_prompt": 4, "num_prompts_per_step": 4}
    few = {"run": run, "policy": policy, "data": {"path": "d"}, "grpo": grpo, "env": {"families": {"math": 1}}}
    return RLConfig.model_validate(few | changed)


def make_model(small_model: Callable[..., NemotronH]) -> NemotronH:
    return small_model("ME*", seed=3, vocab_size=40, initializer_range=0.4)


@pytest.fixture
def initial(small_model: Callable[..., NemotronH]) -> NemotronH:
    return make_model(small_model)


def tasks(step: int) -> list[Task]:
    return [Task("math", f"{step}.{index}", "", {}, "") for index in range(len(PROMPTS))]


def draw(model: NemotronH, step: int, poll: Callable[[], None]) -> Batch:
    """Completions with an answer of their environment behind them; rewards depend on what was sampled."""
    source = torch.Generator().manual_seed(step)
    out = generate(model, PROMPTS, 6, stop_token_ids=(11,), generator=source, samples_per_prompt=4, poll=poll)
    rollouts = [
        Rollout(
            i // 4, PROMPTS[i // 4], [*ids, *ANSWER], out.logprobs[i], out.entropies[i], False, float(sum(ids) % 2),
            [Message(len(ids), True), Message(len(ANSWER), False)],
        )
        for i, ids in enumerate(out.tokens)
    ]  # fmt: skip
    return Batch(tasks(step), rollouts, ["no verdict"], ["math"])


class Trainer:
    """The loop of `rlvr.py` without its surroundings; `weights`: those after each number of updates."""

    def __init__(
        self, model: NemotronH, max_age: int, draw: Any = draw, ranks: Ranks = ALONE, autocast: Any = None
    ) -> None:
        self.model, self.cfg, self.step = model, config(), 0
        self.session: Any = SimpleNamespace(
            model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), ranks=ranks,
            autocast=autocast or nullcontext(), stop=SimpleNamespace(poll=lambda: None), last_step=STEPS,
        )  # fmt: skip
        self.buffer = RolloutBuffer(self.cfg, self.session, max_age, tasks, draw)
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.records: list[dict[str, float]] = []

    def train(self, end: int = STEPS) -> None:
        while self.step < end:
            self.weights[self.step] = deepcopy(self.model.state_dict())
            batch = self.buffer.take(self.step)
            advantages, without_gradient = token_advantages(batch.rollouts, self.cfg.grpo)
            _, record = update(self.cfg, self.session, None, batch.rollouts, advantages)
            self.cfg.grpo.max_error_rate = 1.0
            metrics = step_metrics(self.cfg.grpo, ALONE, batch, record, without_gradient)
            self.records.append(metrics | self.buffer.metrics(self.step, metrics))
            self.step += 1


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert all(torch.equal(one[name], other[name]) for name in one | other)


@dataclass
class Unbroken:
    """A run that nobody stopped, and the weights that drew the batch of each step."""

    trainer: Trainer
    generators: dict[int, dict[str, Tensor]]


@pytest.fixture(scope="module")
def unbroken(small_model: Callable[..., NemotronH]) -> dict[int, Unbroken]:
    """By the largest age."""
    runs = {}
    for max_age in (1, 2):
        generators: dict[int, dict[str, Tensor]] = {}

        def noting(model: NemotronH, step: int, poll: Callable[[], None], noted: Any = generators) -> Batch:
            noted[step] = deepcopy(model.state_dict())
            return draw(model, step, poll)

        trainer = Trainer(make_model(small_model), max_age, noting)
        with trainer.buffer:
            trainer.train()
        runs[max_age] = Unbroken(trainer, generators)
    return runs


@pytest.mark.parametrize("max_age", [1, 2])
def test_a_step_trains_on_what_the_weights_of_the_largest_age_sampled(
    unbroken: dict[int, Unbroken], max_age: int
) -> None:
    trainer, generators = unbroken[max_age].trainer, unbroken[max_age].generators
    assert not all(torch.equal(trainer.weights[0][name], trainer.weights[1][name]) for name in trainer.weights[0])
    for step in range(STEPS):
        assert_same(generators[step], trainer.weights[max(0, step - max_age)])
    ages = [record["avg_trajectory_age"] for record in trainer.records]
    assert ages == [min(step, max_age) for step in range(STEPS)]
    # What was generated is what its own weights say; the trainer's have moved on, but for the first step.
    assert all(record["token_mult_prob_error"] <= 1 + 1e-6 for record in trainer.records)
    assert [record["num_mismatched_tokens"] for record in trainer.records] == [0] * STEPS
    lags = [record["policy_lag"] for record in trainer.records]
    assert lags[0] <= 1 + 1e-6
    assert all(lag > 1 + 1e-4 for lag in lags[1:]), lags
    assert all(abs(record["sampling_importance_ratio"] - 1) > 1e-6 for record in trainer.records[1:])


def test_tokens_of_another_policy_are_counted_also_after_a_checkpoint(initial: NemotronH) -> None:
    def apart(model: NemotronH, step: int, poll: Callable[[], None]) -> Batch:
        batch = draw(model, step, poll)
        for rollout in batch.rollouts[:3]:
            rollout.logprobs[0] -= math.log(1.1)
        return batch

    trainer, again = Trainer(initial, 1, apart), Trainer(initial, 1, apart)
    with trainer.buffer, again.buffer:
        trainer.buffer.take(0)
        metrics = trainer.buffer.metrics(0, {"token_mult_prob_error": 1.0})
        again.buffer.restore(0, trainer.buffer.tensors(0))
        restored = again.buffer.metrics(0, {"token_mult_prob_error": 1.0})
    assert metrics["num_mismatched_tokens"] == restored["num_mismatched_tokens"] == 3
    assert metrics == restored


@pytest.mark.parametrize(
    ("max_age", "is_drawn", "stop_at"), [(1, False, 2), (2, True, 2), (2, False, 1), (2, False, 0)]
)
def test_a_stopped_run_ends_with_the_weights_of_an_unbroken_one(
    initial: NemotronH, unbroken: dict[int, Unbroken], max_age: int, is_drawn: bool, stop_at: int
) -> None:
    """Whether a checkpoint finds the batches ahead drawn or being drawn, which a signal cuts short."""
    expected = unbroken[max_age].trainer

    def cut_short(model: NemotronH, step: int, poll: Callable[[], None]) -> Batch:
        if step >= stop_at and not is_drawn:
            raise StopRequested(15)
        return draw(model, step, poll)

    first = Trainer(deepcopy(initial), max_age, cut_short)
    with first.buffer:
        first.train(stop_at)
        if is_drawn:
            first.buffer.take(stop_at)
            for pending in first.buffer.pending.values():
                pending.future.result()
        else:
            with pytest.raises(StopRequested):
                first.buffer.take(stop_at)
        tensors = load(save(first.buffer.tensors(stop_at)))
    second = Trainer(first.model, max_age)
    second.step = stop_at
    with second.buffer:
        second.buffer.restore(stop_at, tensors)
        second.train()
    assert_same(expected.model.state_dict(), second.model.state_dict())
    assert expected.records[stop_at:] == second.records
    kinds = {name.split(".")[0] for name in tensors}
    assert kinds == ({"batch"} if is_drawn else {"weights"} if stop_at else set())


def test_a_buffer_of_two_processes_is_dealt_out_to_one(initial: NemotronH, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw(initial, 0, lambda: None)

    def of_rank(rank: int) -> Callable[..., Batch]:
        rollouts = [rollout for rollout in whole.rollouts if rollout.prompt_index % 2 == rank]
        return lambda *_: Batch([], rollouts, [f"of rank {rank}"], ["math"])

    messages: list[bytes] = []
    monkeypatch.setattr(rollout_buffer, "gather_bytes", lambda message: [*messages, message])
    for rank in range(2):
        trainer = Trainer(deepcopy(initial), 1, of_rank(rank), Ranks(rank, 2, torch.device("cpu")))
        trainer.session.last_step = 1
        with trainer.buffer:
            trainer.buffer.take(0)
            tensors = trainer.buffer.tensors(0)
        messages.append(bytes(tensors[f"batch.0.{rank}"].tolist()))
    alone = Trainer(deepcopy(initial), 1)
    with alone.buffer:
        alone.buffer.restore(0, tensors)
        assert alone.buffer.take(0) == Batch(tasks(0), whole.rollouts, ["of rank 0", "of rank 1"], ["math"])
    second = Trainer(deepcopy(initial), 1, ranks=Ranks(1, 2, torch.device("cpu")))
    with second.buffer:
        second.buffer.restore(0, tensors)
        batch = second.buffer.take(0)
    assert [rollout.completion_ids for rollout in batch.rollouts] == [
        rollout.completion_ids for rollout in whole.rollouts if rollout.prompt_index % 2 == 1
    ]
    assert [rollout.prompt_index for rollout in batch.rollouts] == [0] * 4 + [1] * 4


def test_the_end_of_the_block_cuts_generation_short(initial: NemotronH) -> None:
    begun, threads = threading.Event(), []

    def endless(model: NemotronH, step: int, poll: Callable[[], None]) -> Batch:
        threads.append(threading.current_thread())
        while True:
            begun.set()
            poll()

    trainer = Trainer(deepcopy(initial), 2, endless)
    with pytest.raises(KeyError), trainer.buffer:
        trainer.buffer._begin(0, initial.state_dict())
        assert begun.wait(60)
        raise KeyError
    threads[0].join(60)
    assert not threads[0].is_alive() and len(threads) == 1


def test_rollouts_of_older_weights_have_to_be_weighted() -> None:
    ahead = {"num_generations_per_prompt": 4, "num_prompts_per_step": 4, "async_grpo": {"enabled": True}}
    assert config(grpo=ahead).grpo.async_grpo.max_trajectory_age_steps == 1
    unweighted = {"use_importance_sampling_correction": False, "truncated_importance_sampling_type": None}
    bounds = {"truncated_importance_sampling_ratio": None, "truncated_importance_sampling_ratio_min": None}
    with pytest.raises(ValidationError, match=r"needs loss_fn\.use_importance_sampling_correction: true"):
        config(grpo=ahead, loss_fn=unweighted | bounds)
    assert not config(loss_fn=unweighted | bounds).grpo.async_grpo.enabled


def test_generation_leaves_the_trainer_its_rounded_weights(initial: NemotronH) -> None:
    """PyTorch's cache of them is one for all threads: emptied within an update, it would change the gradients' bits."""
    weight = torch.ones(2, 2, requires_grad=True)
    trainer = Trainer(initial, 1, autocast=torch.autocast("cpu", torch.bfloat16))
    with trainer.buffer, torch.autocast("cpu", torch.bfloat16):
        first = weight @ weight
        trainer.buffer.take(0)
        second = weight @ weight
    rounded = [product.grad_fn.next_functions[0][0] for product in (first, second) if product.grad_fn]
    assert rounded[0] is rounded[1]
