"""pass@k and majority@k against every choice of k samples, and against the formula of the paper on code models."""

from __future__ import annotations

import math
import sys
from collections import Counter
from itertools import combinations
from math import comb
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron.stack.environments import (
    answer_of,
    from_gym,
    generate_tasks,
    multiple_choice,
    plain_answer,
    questions,
    verify,
)
from nemotron.stack.environments.killable import UndecidedError
from nemotron.stack.evaluation.pass_at_k import ks_of, majority_at_k, pass_at_k
from nemotron.stack.evaluation.votes import has_votes, vote_of

SAMPLES = st.lists(st.tuples(st.sampled_from("abcd-"), st.sampled_from((0.0, 0.5, 1.0))), min_size=1, max_size=7)


def elected(votes: list[str], score_of: dict[str, float]) -> float:
    """The mean score of the most frequent answers of one choice, as NeMo-Skills counts them; `-` is no answer."""
    counts = Counter(vote for vote in votes if vote != "-")
    return fmean(score_of[vote] for vote in counts if counts[vote] == max(counts.values())) if counts else 0.0


@given(SAMPLES)
def test_both_are_means_over_all_choices_of_k_samples(samples: list[tuple[str, float]]) -> None:
    score_of = dict(samples) | {"-": 0.0}
    votes = [vote for vote, _ in samples]
    scores = [score_of[vote] for vote in votes]
    for k in range(1, len(samples) + 1):
        choices = list(combinations(range(len(samples)), k))
        best = fmean(max(scores[i] for i in choice) for choice in choices)
        assert pass_at_k(scores, k) == pytest.approx(best)
        majority = fmean(elected([votes[i] for i in choice], score_of) for choice in choices)
        assert majority_at_k([None if vote == "-" else vote for vote in votes], scores, k) == pytest.approx(majority)


@given(st.integers(1, 60), st.data())
def test_pass_at_k_is_the_estimator_of_the_paper(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    # Chen et al. 2021, equation 1, as the product that its text writes it as for the sake of rounding
    expected = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
    assert pass_at_k([1.0] * c + [0.0] * (n - c), k) == pytest.approx(expected, abs=1e-12)


def test_one_sample_is_the_mean_and_ties_share() -> None:
    assert pass_at_k([1, 0, 0.5, 0], 1) == 0.375 == majority_at_k(["5", "6", "7", "8"], [1, 0, 0.5, 0], 1)
    assert majority_at_k(["5", "6"], [1, 0], 2) == 0.5
    assert majority_at_k(["5", "5", "6"], [1, 1, 0], 3) == 1
    assert majority_at_k([None, None, "5"], [0, 0, 1], 3) == 1  # those without an answer do not vote
    assert majority_at_k([None, None], [0, 0], 2) == 0


def test_samples_without_a_verdict_count_in_neither() -> None:
    assert pass_at_k([1, math.nan, 0], 2) == 1 and majority_at_k(["5", "6", "5"], [1, math.nan, 1], 2) == 1
    assert math.isnan(pass_at_k([1, math.nan], 2)) and math.isnan(majority_at_k(["5", "6"], [1, math.nan], 2))


def test_many_samples_are_counted_and_not_listed() -> None:
    votes = [str(i) for i in range(64)]  # any is elected with the same chance
    assert majority_at_k(votes, [1.0] + [0.0] * 63, 32) == pytest.approx(1 / 64)
    assert majority_at_k(["a"] * 40 + ["b"] * 24, [1.0] * 40 + [0.0] * 24, 64) == 1
    # The choices of 600 of 1,200 are more than a float holds.
    assert comb(1200, 600) > sys.float_info.max
    scores = [1.0] * 600 + [0.0] * 600
    assert pass_at_k(scores, 600) == pytest.approx(1) and pass_at_k(scores, 2) == pytest.approx(1 - 599 / 2398)
    assert majority_at_k(["a"] * 600 + ["b"] * 600, scores, 600) == pytest.approx(0.5)


def test_k_are_powers_of_two_and_the_number_of_samples() -> None:
    assert [ks_of(samples) for samples in (0, 1, 2, 4, 6, 8)] == [[], [], [2], [2, 4], [2, 4, 6], [2, 4, 8]]


@pytest.mark.parametrize(
    ("family", "answers"),
    [
        ("math", ["{}", "\\boxed{{{}}}", "${}$.", "0{}"]),
        ("multiple_choice", ["{}", "({})", "{}.", "{}) "]),
    ],
)
def test_answers_that_the_verifier_takes_for_equal_are_one_vote(family: str, answers: list[str]) -> None:
    for task in generate_tasks(family, "eval", 10):
        said = [f"thought</think>{answer.format(task.solution.answer)}" for answer in answers]
        assert has_votes(task) and all(verify(task, text, thinking=True).score == 1 for text in said)
        first, *others = (vote_of(task, answer_of(text, thinking=True)) for text in said)
        assert first is not None and set(others) == {first}
        assert vote_of(task, "who knows?") is None and vote_of(task, "") is None
        assert vote_of(task, plain_answer(f"thought\n{task.solution.answer}\nmore", task.family)) == first


def test_an_answer_over_which_the_check_broke_has_no_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    task = from_gym(
        "mcqa",
        {
            "responses_create_params": {"input": "Which? A: three B: four"},
            "options": [{"A": "three"}, {"B": "four"}],
            "expected_answer": "B",
            "template_metadata": {"output_regex": ["([AB]) it is"]},
        },
    )
    assert vote_of(task, "B it is") == "B"

    def broken(pattern: str, text: str) -> str | None:
        raise UndecidedError("the process that was asked ended with -9")

    monkeypatch.setattr(multiple_choice, "last_found", broken)
    assert verify(task, "B it is", thinking=False).status == "error" and vote_of(task, "B it is") is None


def test_questions_vote_by_their_text_or_by_a_letter() -> None:
    exact = questions.make_task("quiz", {"question": "Capital of France?", "answer": "Paris"}, "exact")
    assert vote_of(exact, "  PARIS. ") == vote_of(exact, "paris") == "paris"
    choice = questions.make_task("quiz", {"question": "Sky?", "answer": "B", "choices": ["red", "blue"]}, None)
    assert {vote_of(choice, text) for text in ("B", "B) blue", "(B)", "Blue")} == {"B"}
    assert vote_of(choice, "green") is None
    assert not has_votes(questions.make_task("quiz", {"question": "?", "answer": "x"}, "contains"))


@pytest.mark.parametrize(
    "family",
    [
        "instruction_following", "structured_output", "workplace_assistant", "code_generation", "repository_repair",
        "tool_comparison",
    ],
)  # fmt: skip
def test_programs_calls_and_free_text_have_no_majority(family: str) -> None:
    assert not any(has_votes(task) for task in generate_tasks(family, "eval", 3))
