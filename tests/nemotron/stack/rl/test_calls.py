"""Calls of a step of RL: each prompt in one of them, and the same rollouts whoever draws them, and in which order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_runspec.errors import UserError
from nemo_runspec.installation import install_line
from nemotron.data_prep.tokens.tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from nemotron.recipes.nano3.stage2_rl.schema import RLConfig
from nemotron.stack.environments import generate_tasks
from nemotron.stack.models import NemotronH
from nemotron.stack.rl.calls import (
    Call,
    Drawn,
    RolloutSettings,
    cut_into_calls,
    draw_call,
    last_request,
    merge_calls,
)
from nemotron.stack.rl.ray_workers import Job, open_workers
from nemotron.stack.rl.rollouts import Rollout
from nemotron.stack.training.distributed import ALONE

TASKS = generate_tasks("multiple_choice", "train", 5, 0)
SETTINGS = RolloutSettings("nano3", False, "bubblewrap", None, 3, 6, 1, 64, stop_token_ids=[1])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 8))
def test_every_prompt_is_in_one_call_beside_others_of_like_length(lengths: list[int], size: int) -> None:
    prompts = [list(range(length)) for length in lengths]
    calls = cut_into_calls(TASKS[:1] * len(prompts), prompts, size, [42, 7, 1])
    assert sorted(index for call in calls for index in call.indices) == list(range(len(prompts)))
    assert [len(prompt) for call in calls for prompt in call.prompts] == sorted(lengths)
    assert all(call.prompts == [prompts[index] for index in call.indices] for call in calls)
    assert {len(call.indices) for call in calls[:-1]} <= {size} and len(calls[-1].indices) <= size
    assert len({call.seed for call in calls}) == len(calls)
    # numpy takes missing words for zeros: the first call's seed is that of (seed, step, rank)
    assert calls[0].seed == np.random.SeedSequence([42, 7, 1]).generate_state(1)[0]


def test_results_are_merged_in_the_order_of_the_prompts() -> None:
    def rollout(prompt_index: int, name: int) -> Rollout:
        return Rollout(prompt_index, [], [name], [], 0.0, False, None, [])

    calls = [Call([2, 0], [], [], 1), Call([1], [], [], 2)]
    drawn = [
        Drawn([rollout(0, 20), rollout(0, 21), rollout(1, 0), rollout(1, 1)], ["a"]),
        Drawn([rollout(0, 10)], ["b"]),
    ]
    merged = merge_calls(calls, drawn)
    assert [(r.prompt_index, r.completion_ids[0]) for r in merged.rollouts] == [
        (0, 0),
        (0, 1),
        (1, 10),
        (2, 20),
        (2, 21),
    ]
    assert merged.errors == ["a", "b"]


def test_a_call_draws_the_same_alone_and_after_others(small_model: Callable[..., NemotronH]) -> None:
    tokenizer = train_tokenizer(["A B C D"], MIN_VOCAB_SIZE)
    model = small_model("ME*", vocab_size=tokenizer.get_vocab_size()).eval()
    prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3], [8, 9]]
    calls = cut_into_calls(TASKS, prompts, 2, [42, 0, 0])
    in_order = merge_calls(calls, [draw_call(call, model, tokenizer, SETTINGS) for call in calls])
    worker = deepcopy(model)
    by_others = {call.seed: draw_call(call, worker, tokenizer, SETTINGS) for call in reversed(calls)}
    assert merge_calls(calls, [by_others[call.seed] for call in calls]) == in_order
    assert [r.prompt_index for r in in_order.rollouts] == [index for index in range(5) for _ in range(3)]
    assert all(r.prompt_ids == prompts[r.prompt_index] and r.reward is not None for r in in_order.rollouts)
    assert len({tuple(r.completion_ids) for r in in_order.rollouts}) > 5


def test_workers_that_cannot_be_are_refused(
    small_model: Callable[..., NemotronH], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    session: Any = SimpleNamespace(ranks=ALONE)
    job = Job(small_model("M").config, "", SETTINGS, {}, runs_programs=False, bf16=False, device="cpu", num_threads=1)
    with open_workers(0, 1, session, job) as nobody:
        assert nobody is None
    with pytest.raises(UserError, match="rollout_workers 3: a step has work for 2"), open_workers(3, 2, session, job):
        pass
    with (
        pytest.raises(UserError, match="needs Ray, which is not installed") as caught,
        open_workers(2, 2, session, job),
    ):
        pass
    assert caught.value.hint == install_line("ray")


def test_the_number_of_workers_is_no_part_of_a_run_s_fingerprint() -> None:
    assert "cluster" in RLConfig.neutral_keys


def test_effort_is_asked_for_in_the_last_request() -> None:
    asked = [
        {"role": "user", "content": "low"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    assert last_request(replace(TASKS[0], messages=asked)) == "b" and last_request(TASKS[0]) == TASKS[0].prompt
