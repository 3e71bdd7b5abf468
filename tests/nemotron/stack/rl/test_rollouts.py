"""Collecting rollouts in order, and packing them so that nothing is lost, misaligned or mixed up."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron.kit.schemas.rl import ClippedPGLossConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.rl.losses import grpo_loss
from nemotron.stack.rl.rollouts import (
    MicroBatch,
    Rollout,
    collect_rollouts,
    count_rollouts,
    pack_rollouts,
    rollout_rates,
)
from nemotron.stack.rl.shaping import Message

ROW_LEN = 24


@pytest.fixture
def model(small_model: Callable[..., NemotronH]) -> NemotronH:
    """Small, with weights large enough that what stands before a token decides what comes after it."""
    return small_model("MEM*-", seed=3, vocab_size=40, initializer_range=0.4).eval()


def rollout(index: int, prompt: list[int], completion: list[int]) -> Rollout:
    """Logprobs that say which rollout and which token they belong to."""
    logprobs = [-index - t / 100 for t in range(len(completion))]
    return Rollout(index, prompt, completion, logprobs, 0.5, False, 1.0, [Message(len(completion), True)])


def random_rollouts(seed: int, count: int, longest: int = ROW_LEN) -> tuple[list[Rollout], list[list[float]]]:
    """Groups of up to four sequences of at most `longest` tokens that share a prompt, some without a completion, and
    advantages of which some are 0."""
    source = random.Random(seed)
    rollouts: list[Rollout] = []
    while len(rollouts) < count:
        prompt = [source.randrange(40) for _ in range(source.randint(1, longest))]
        for _ in range(min(source.randint(1, 4), count - len(rollouts))):
            length = source.randint(0, longest - len(prompt))
            rollouts.append(rollout(len(rollouts), prompt, [source.randrange(40) for _ in range(length)]))
    return rollouts, [
        [source.choice([-1.5, 0.0, 0.0, 0.25, 2.0]) * (1 + i / 1000)] * len(rollouts[i].completion_ids)
        for i in range(count)
    ]


def unpack(batch: MicroBatch) -> list[tuple[list[int], list[int], list[float], list[float]]]:
    """(all ids that are read, targets, logprobs, advantages) of each completion, row by row."""
    completions, flat = [], 0
    for ids, seq, predicts in zip(batch.input_ids_BL, batch.seq_idx_BL, batch.predicts_BL, strict=True):
        assert not predicts[seq == 0].any()
        for document in seq[predicts].unique(sorted=True).tolist():
            here = seq == document
            assert predicts[here].all()  # of one turn: all is sampled
            part = slice(flat, flat + int(here.sum()))
            completions.append((
                ids[seq == 0].tolist() + ids[here].tolist(), batch.targets_T[part].tolist(),
                batch.logp_generator_T[part].tolist(), batch.advantages_T[part].tolist(),
            ))  # fmt: skip
            flat = part.stop
    assert flat == len(batch.targets_T) == len(batch.logp_generator_T) == len(batch.advantages_T)
    return completions


@settings(max_examples=150)
@given(seed=st.integers(0, 10_000), count=st.integers(0, 25), rows=st.integers(1, 4), keep=st.booleans())
def test_every_kept_completion_is_packed_once_and_aligned(seed: int, count: int, rows: int, keep: bool) -> None:
    rollouts, advantages = random_rollouts(seed, count)
    batches = pack_rollouts(rollouts, advantages, ROW_LEN, rows, keep_zero_advantage=keep)
    kept = [i for i, r in enumerate(rollouts) if r.completion_ids and (keep or any(advantages[i]))]
    order = [i for batch in batches for i in batch.rollouts]
    assert sorted(order) == kept
    completions = [completion for batch in batches for completion in unpack(batch)]
    for i, (ids, targets, logprobs, of_tokens) in zip(order, completions, strict=True):
        assert ids == rollouts[i].prompt_ids + rollouts[i].completion_ids[:-1]
        assert targets == rollouts[i].completion_ids
        assert logprobs == pytest.approx(rollouts[i].logprobs)
        assert of_tokens == pytest.approx(advantages[i])
    assert [n for batch in batches for n in batch.lengths] == [len(rollouts[i].completion_ids) for i in order]
    for batch in batches:
        assert batch.input_ids_BL.shape[1] <= ROW_LEN and batch.input_ids_BL.numel() <= rows * ROW_LEN
        assert (batch.seq_idx_BL.diff(dim=1) >= 0)[batch.seq_idx_BL[:, 1:] >= 0].all()


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 25))
def test_a_prompt_is_read_again_only_where_a_row_is_full(seed: int, count: int) -> None:
    """First fit: no two rows of a prompt could be one."""
    rollouts, _ = random_rollouts(seed, count)
    rows: dict[tuple[int, ...], list[int]] = {}
    for batch in pack_rollouts(rollouts, [[1.0] * len(r.completion_ids) for r in rollouts], ROW_LEN, 100):
        indices = iter(batch.rollouts)
        for seq, predicts in zip(batch.seq_idx_BL, batch.predicts_BL, strict=True):
            (prompt,) = {tuple(rollouts[next(indices)].prompt_ids) for _ in seq[predicts].unique()}
            rows.setdefault(prompt, []).append(int(predicts.sum()))
    for prompt, tokens in rows.items():
        room = ROW_LEN - (len(prompt) - 1)
        assert all(one + other > room for one, other in itertools.combinations(tokens, 2))


def test_rows_of_like_length_make_a_micro_batch() -> None:
    rollouts = [rollout(i, [i, i], [7] * n) for i, n in enumerate([200, 10, 120, 60, 100, 70])]
    batches = pack_rollouts(rollouts, [[1.0] * len(r.completion_ids) for r in rollouts], 256, 1)
    # With a prompt of two tokens and a multiple of 64: 256, 128, 128, 128, 64, 64 tokens, at most 256 together.
    assert [batch.rollouts for batch in batches] == [[0], [2, 4], [5, 3], [1]]
    assert [tuple(batch.input_ids_BL.shape) for batch in batches] == [(1, 256), (2, 128), (2, 128), (1, 64)]


def test_padding_is_no_document_and_never_predicted() -> None:
    rollouts = [rollout(0, [5, 6], [7, 8, 9]), rollout(1, [5, 6], [1]), rollout(2, [4], [3, 2])]
    (batch,) = pack_rollouts(rollouts, [[1.0] * len(r.completion_ids) for r in rollouts], 8, 2)
    assert batch.input_ids_BL.tolist() == [[5, 6, 7, 8, 6, 0, 0, 0], [4, 3, 0, 0, 0, 0, 0, 0]]
    assert batch.seq_idx_BL.tolist() == [[0, 1, 1, 1, 2, -1, -1, -1], [1, 1] + [-1] * 6]
    assert batch.predicts_BL.int().tolist() == [[0, 1, 1, 1, 1, 0, 0, 0], [1, 1] + [0] * 6]
    assert batch.targets_T.tolist() == [7, 8, 9, 1, 3, 2]


def test_a_rollout_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens does not fit a row of 8"):
        pack_rollouts([rollout(0, [1] * 4, [2] * 5)], [[1.0] * 5], 8, 1)
    assert pack_rollouts([rollout(0, [1] * 4, [2] * 5)], [[0.0] * 5], 8, 1) == []  # one that is left out may be


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_logprobs_and_gradient_are_those_of_separate_rollouts(
    small_model: Callable[..., NemotronH], dtype: torch.dtype, tolerance: float
) -> None:
    """On policy: d loss = - sum over rollouts of A times the gradient of log p(completion | prompt)."""
    model = small_model("MEM*-M", seed=3, vocab_size=40).to(dtype)
    rollouts, advantages = random_rollouts(4, 20)
    for r in rollouts:
        if (length := len(r.completion_ids)) > 2:  # of two turns: what the environment wrote is read, not predicted
            r.messages = [Message(1, True), Message(1, False), Message(length - 2, True)]
            r.logprobs = r.logprobs[1:]
    parameters = list(model.parameters())
    packed, logprobs = torch.zeros((), dtype=dtype), {}
    for batch in pack_rollouts(rollouts, advantages, ROW_LEN, 2):
        logp_T = batch.logprobs(model)
        logprobs |= dict(zip(batch.rollouts, logp_T.detach().split(batch.lengths), strict=True))
        old_T = logp_T.detach()
        advantages_T = batch.advantages_T.to(dtype)
        of_batch = grpo_loss(logp_T, advantages_T, ClippedPGLossConfig(), logp_old_T=old_T, logp_generator_T=old_T)
        packed = packed + of_batch.loss
    separate = torch.zeros((), dtype=dtype)
    for index, (r, of_tokens) in enumerate(zip(rollouts, advantages, strict=True)):
        if index in logprobs:
            logp_LV = torch.log_softmax(model(torch.tensor([r.prompt_ids + r.completion_ids])).logits[0], -1)
            of_completion = logp_LV[len(r.prompt_ids) - 1 : -1].gather(-1, torch.tensor(r.completion_ids)[:, None])
            sampled_T = of_completion[torch.tensor(r.is_sampled), 0]
            torch.testing.assert_close(logprobs[index], sampled_T.detach(), rtol=0, atol=tolerance)
            separate = separate - torch.tensor(of_tokens[0]).to(dtype) * sampled_T.sum()
    assert 5 < len(logprobs) < len(rollouts)
    ones, others = torch.autograd.grad(packed, parameters), torch.autograd.grad(separate, parameters)
    # Of a gradient far below the others the terms cancel: what is left of them has their rounding.
    least = 0.01 * torch.stack([other.norm() for other in others]).norm()
    for one, other in zip(ones, others, strict=True):
        assert other.norm() > 0
        assert (one - other).norm() < tolerance * torch.maximum(other.norm(), least)


class Echo:
    """A dialogue in tokens that gives `answers`, one after the other, and keeps what was sampled."""

    reads_on = True

    def __init__(self, *answers: list[int]) -> None:
        self.answers = list(answers)
        self.sampled: list[tuple[int, ...]] = []
        self.messages: list[Message] = []

    def reply(self, ids: list[int]) -> list[int] | None:
        if self.sampled:
            self.messages.append(Message(len(self.answer or ()), False))
        self.sampled.append(tuple(ids))
        self.messages.append(Message(len(ids), True))
        self.answer = self.answers.pop(0) if self.answers else None
        return self.answer


def collect(model: NemotronH, prompts: list[list[int]], per_call: int, **settings: Any) -> list[Rollout]:
    knobs: dict[str, Any] = {"samples_per_prompt": 3, "max_new_tokens": 7, "stop_token_ids": (11, 20)}
    begin = settings.pop("begin", lambda index: Echo())
    score = settings.pop("score", lambda index, dialogues: [float(len(d.sampled[0])) for d in dialogues])
    return collect_rollouts(
        model, prompts, begin, score, prompts_per_call=per_call, generator=torch.Generator().manual_seed(0),
        **(knobs | settings),
    )  # fmt: skip


PROMPTS = [[3, 1, 4, 1, 5, 9], [2], [6, 5, 3], [8, 9, 7, 9], [2, 3]]


@pytest.mark.parametrize("per_call", [1, 2, 10])
def test_rollouts_come_in_the_order_of_the_prompts(model: NemotronH, per_call: int) -> None:
    """Generation goes by length; the result does not. Greedy, so that the completions say whose they are."""
    rollouts = collect(model, PROMPTS, per_call, temperature=0.0)
    assert [r.prompt_index for r in rollouts] == [i for i in range(5) for _ in range(3)]
    for r in rollouts:
        alone = generate(model, [PROMPTS[r.prompt_index]], 7, temperature=0, stop_token_ids=(11, 20))
        assert r.prompt_ids == PROMPTS[r.prompt_index]
        assert r.completion_ids == alone.tokens[0]
        assert r.logprobs == pytest.approx(alone.logprobs[0], abs=1e-5)
        assert r.entropy == pytest.approx(alone.entropies[0], abs=1e-5)
        assert r.truncated == (not alone.finished[0])
        assert r.reward == len(r.completion_ids)
    assert len({tuple(r.completion_ids) for r in rollouts}) > 2


def test_scores_reach_their_rollout_and_an_error_is_none(model: NemotronH) -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []

    def score(index: int, dialogues: list[Echo]) -> list[float | None]:
        asked.extend((index, *dialogue.sampled) for dialogue in dialogues)
        return [None if index == 2 else index + dialogue.sampled[0][0] / 100 for dialogue in dialogues]

    rollouts = collect(model, PROMPTS, 2, score=score)
    assert sorted(asked) == sorted((r.prompt_index, tuple(r.completion_ids)) for r in rollouts)
    for r in rollouts:
        assert r.reward == (None if r.prompt_index == 2 else r.prompt_index + r.completion_ids[0] / 100)
        assert r.truncated == (r.completion_ids[-1] not in (11, 20))
        assert len(r.logprobs) == len(r.completion_ids) <= 7
        assert [message.num_tokens for message in r.messages] == [len(r.completion_ids)]
    assert len({tuple(r.completion_ids) for r in rollouts}) > 8  # samples differ


def test_counts_leave_out_what_has_no_verdict() -> None:
    def rollout(prompt: int, length: int, entropy: float, truncated: bool, reward: float | None) -> Rollout:
        messages = [Message(length, True, invalid_tool_call=truncated, malformed_thinking=length < 3)]
        return Rollout(prompt, [1], [2] * length, [0.0] * length, entropy, truncated, reward, messages, length == 3)

    rollouts = [
        rollout(0, 3, 0.5, False, 1.0), rollout(0, 1, 1.0, True, None), rollout(1, 2, 0.25, False, 0.0),
        rollout(1, 2, 0.75, False, 1.0),
    ]  # fmt: skip
    counts = count_rollouts(rollouts, ["math", "choice"], ["math", "choice", "text"])
    assert counts == {
        "completions": 4, "tokens": 8, "entropy": 3 * 0.5 + 1.0 + 2 * 0.25 + 2 * 0.75, "truncated": 1,
        "max_turns_reached": 1,
        "messages": 4, "invalid_tool_calls": 1, "malformed_thinking": 2,
        "reward_math": 1.0, "verdicts_math": 1, "reward_choice": 1.0, "verdicts_choice": 2,
        "reward_text": 0, "verdicts_text": 0,
    }  # fmt: skip
    rates = rollout_rates({name: float(count) for name, count in counts.items()}, ["math", "choice", "text"])
    assert rates == {
        "reward": 2 / 3, "reward_math": 1.0, "reward_choice": 0.5, "entropy": 4.5 / 8, "completion_tokens": 2.0,
        "truncated": 0.25, "max_turns_reached": 0.25, "avg_turns_per_sample": 1.0, "invalid_tool_call_rate": 0.25,
        "malformed_thinking_rate": 0.5,
    }  # fmt: skip


def test_a_poll_that_raises_ends_collection_between_two_rewards(model: NemotronH) -> None:
    scored: list[int] = []

    def score(index: int, dialogues: list[Echo]) -> list[float]:
        scored.append(index)
        return [0.0] * len(dialogues)

    def poll() -> None:
        if scored:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(model, PROMPTS, 10, score=score, poll=poll)
    assert len(scored) == 1  # the completions of one prompt
