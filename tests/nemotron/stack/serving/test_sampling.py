"""Tokens of rows with different settings: against the distributions that they are to come from."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from nemotron.stack.models.decoding.generate import ReasoningBudget
from nemotron.stack.serving.sampling import Choice, Sampling, choose, describe, draft_draws, probabilities

P = [0.4, 0.3, 0.2, 0.06, 0.04]


def sampling(temperature: float = 1.0, top_p: float = 1.0) -> Sampling:
    return Sampling(9, (), temperature, top_p)


def test_each_row_has_its_own_temperature_and_nucleus() -> None:
    """Cumulated: .4, .7, .9, .96, 1. The tokens stand in another order in the second position."""
    logits = torch.tensor([P, P[::-1]]).log().expand(7, 2, 5)
    settings = [(1, 1), (1, 0.39), (1, 0.41), (1, 0.9001), (2, 1), (0, 1), (0, 0.1)]
    got = probabilities(logits, [*(sampling(t, p) for t, p in settings[:6]), None])
    root = [p**0.5 for p in P]
    expected = [P, [1], [4 / 7, 3 / 7], [p / 0.96 for p in P[:4]], [r / sum(root) for r in root], [1], P]
    for row, values in zip(got.tolist(), expected, strict=True):
        padded = [*values, *[0.0] * (5 - len(values))]
        assert row[0] == pytest.approx(padded, abs=1e-6) and row[1] == pytest.approx(padded[::-1], abs=1e-6)
    assert [[p == 0 for p in row] for row in got[1:4, 0].tolist()] == [[i >= n for i in range(5)] for n in (1, 2, 4)]


@pytest.mark.parametrize("uniform", [0.0, 0.29, 0.31, 1 - 3e-10, 1 - 1e-10, 1 - 2**-53])
def test_a_token_is_drawn_where_the_distribution_function_passes_the_uniform_number(uniform: float) -> None:
    """Probabilities 0, 0.3, 0, 0.7, 2e-10 and 0: what is impossible is never drawn, what is nearly so is not lost."""
    logits = torch.tensor([0.0, 0.3, 0.0, 0.7, 2e-10, 0.0]).log().view(1, 1, 6)
    kept, tokens = choose(logits, torch.zeros(1, 0, dtype=torch.int64), [], [sampling()], [[uniform]], {})
    assert kept == [0] and tokens == [[1 if uniform < 0.3 else 3 if uniform < 1 - 2e-10 else 4]]


@pytest.mark.parametrize("top_p", [1.0, 0.72])
def test_drafts_leave_the_distribution_as_it_is(top_p: float) -> None:
    """Of both tokens of a round of one draft, in rows beside greedy and held ones.

    First and second token are drawn from p, truncated, whatever the block drafts from: here another distribution.
    """
    samples, source = 20_000, Choice(Sampling(1, (), seed=3), 4)
    p = torch.tensor([[0.45, 0.3, 0.15, 0.1], [0.1, 0.2, 0.3, 0.4]])
    q = torch.tensor([0.1, 0.4, 0.4, 0.1])
    settings = [sampling(1.0, top_p)] * samples + [sampling(0)] * 2
    total = samples + 2
    uniforms = [source.uniforms(3) for _ in range(total)]
    drafts, probs = draft_draws(q.log().expand(total, 4), settings, [u[0] for u in uniforms])
    held = {1: torch.tensor([False, False, True, False]), total - 1: torch.tensor([False, True, False, True])}
    kept, tokens = choose(p.log().expand(total, 2, 4), drafts, [probs], settings, [u[1:] for u in uniforms], held)
    assert tokens[1][0] == 2 and kept[1] == 0  # held to token 2
    assert tokens[-1][0] == 1 and kept[-1] == 0 and tokens[-2][0] == 0  # greedy ones: the likeliest that may be
    assert drafts[-2, 0] == 1 and kept[-2] == 0  # the block's likeliest is another
    truncated = [0.6, 0.4, 0, 0] if top_p < 1 else p[0].tolist()
    first = Counter(row[0] for row, _ in zip(tokens[2:samples], kept[2:samples], strict=True))
    for token, probability in enumerate(truncated):
        deviation = 4 * (probability * (1 - probability) / samples) ** 0.5
        assert abs(first[token] / (samples - 2) - probability) <= deviation + 2e-4
    second = Counter(row[1] for row, count in zip(tokens[2:samples], kept[2:samples], strict=True) if count)
    nucleus = {1.0: [0.1, 0.2, 0.3, 0.4], 0.72: [0, 2 / 9, 3 / 9, 4 / 9]}[top_p]
    for token, probability in enumerate(nucleus):
        deviation = 4 * (probability * (1 - probability) / second.total()) ** 0.5
        assert abs(second[token] / second.total() - probability) <= deviation + 2e-4
    assert 0.3 < second.total() / samples < 0.7


def test_a_draft_is_drawn_at_the_temperature_and_without_a_nucleus() -> None:
    logits = torch.tensor(P).log().expand(3, 5)
    drafts, probs = draft_draws(logits, [sampling(2, 0.1), sampling(0), None], [0.999, 0.999, 0.0])
    root = [p**0.5 for p in P]
    assert probs[0].tolist() == pytest.approx([r / sum(root) for r in root]) and drafts[0, 0] == 4
    assert probs[1].tolist() == [1, 0, 0, 0, 0] and drafts[1, 0] == 0


def test_what_is_said_of_a_token_is_of_the_distribution_at_temperature_1() -> None:
    logits = torch.tensor([P, P[::-1]]).log().expand(2, 2, 5) + 3
    described = describe(logits, torch.tensor([[2, 0], [4, 4]]), [1, 2], [0, 2])
    assert [[token.id for token in row] for row in described] == [[2], [4, 4]]
    logp = torch.tensor(P).log().tolist()
    assert [t.logprob for row in described for t in row] == pytest.approx([logp[2], logp[4], logp[0]], abs=1e-6)
    assert [t.top for t in described[0]] == [()]
    assert [[i for i, _ in t.top] for t in described[1]] == [[0, 1], [4, 3]]
    assert [p for t in described[1] for _, p in t.top] == pytest.approx(logp[:2] * 2, abs=1e-6)


def test_a_budget_puts_what_generates_budget_puts() -> None:
    """All 3^6 sequences of drawn tokens, against `ReasoningBudget.hold`."""
    for limit, tag, end in ((2, (1,), (0, 1)), (3, (1, 2), (0, 1, 2)), (0, (2,), (2, 2))):
        budget = ReasoningBudget(limit, tag, end)
        for drawn in itertools.product(range(3), repeat=6):
            choice = Choice(Sampling(6, (), budget=budget), 3)
            progress = torch.zeros(1, dtype=torch.int64)
            for index, token in enumerate(drawn):
                held = int(budget.hold(index, torch.tensor([token]), progress))
                took, follows = choice.take(token)
                assert took == held and follows == (held == token and index < 5)
            assert choice.finish_reason == "length"
