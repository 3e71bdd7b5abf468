"""The mixture of a blend: against the loader's own draws, closed forms, and what must be refused."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_runspec.errors import UserError
from nemotron.data_prep.tokens.blend import Phase
from nemotron.data_prep.tokens.mixture import SourceTokens, plan_mixture
from nemotron.stack.training import blend as stack


def phase(name: str, until: float, **weights: float) -> Phase:
    return {"name": name, "until": until, "weights": weights}


@st.composite
def blends(draw: st.DrawFn) -> tuple[dict[str, SourceTokens], list[Phase], int]:
    """Sources that are large enough, up to three phases, and a number of sequences of 10 tokens."""
    names = [f"s{i}" for i in range(draw(st.integers(1, 6)))]
    sources = {name: SourceTokens(draw(st.integers(1, 9)), draw(st.integers(11, 5000))) for name in names}
    ends = sorted({*(n / 10 for n in draw(st.lists(st.integers(1, 9), max_size=2))), 1.0})  # 3 sequences at least
    phases = []
    for i, until in enumerate(ends):
        weights = {name: draw(st.floats(0, 5)) for name in names}
        weights[draw(st.sampled_from(names))] = 1.0  # one at least is above 0
        phases.append(Phase(name=f"p{i}", until=until, weights=weights))
    return sources, phases, draw(st.integers(30, 400))


@settings(max_examples=60)
@given(blends())
def test_the_loader_draws_what_is_planned(blend: tuple[dict[str, SourceTokens], list[Phase], int]) -> None:
    sources, phases, sequences = blend
    mixture = plan_mixture(sources, phases, seq_length=10, train_tokens=10 * sequences + 3)
    of_stack = tuple(stack.Phase(p["name"], p["until"], p["weights"]) for p in mixture.phases)
    loader = stack.Blend(of_stack, sequences)
    drawn: Counter[tuple[str, str]] = Counter()
    for _ in range(sequences):
        name = loader.phase
        drawn[name, loader.draw()] += 1
    planned = {(row.phase, row.source): row for row in mixture.rows}
    for p in mixture.phases:
        length = sum(n for (name, _), n in drawn.items() if name == p["name"])
        assert length == sum(row.sequences for row in mixture.rows if row.phase == p["name"])
        for source in sources:
            row = planned.get((p["name"], source))
            if row is None:
                assert drawn[p["name"], source] == 0
                continue
            assert abs(drawn[p["name"], source] - row.requested * length) < 1
            assert abs(drawn[p["name"], source] - row.sequences) <= 1
    assert sum(row.drawn for row in mixture.sources) == mixture.train_tokens == 10 * sequences


@settings(max_examples=100)
@given(blends())
def test_shares_and_epochs_follow_from_the_counts(blend: tuple[dict[str, SourceTokens], list[Phase], int]) -> None:
    sources, phases, sequences = blend
    mixture = plan_mixture(sources, phases, seq_length=10, train_tokens=10 * sequences)
    assert sum(row.realised for row in mixture.sources) == pytest.approx(1)
    assert sum(row.requested for row in mixture.sources) == pytest.approx(1)
    for row in mixture.sources:
        assert row.epochs * sources[row.source].tokens == pytest.approx(row.drawn)
        # Less than one sequence a phase.
        assert abs(row.realised - row.requested) * sequences < len(phases)
    assert json.loads(json.dumps(mixture.to_json()))["rows"] == [
        {field: getattr(row, field) for field in row.__slots__} for row in mixture.rows
    ]


def test_phases_weigh_by_their_length() -> None:
    sources = {"a": SourceTokens(10, 4000), "b": SourceTokens(10, 1000)}
    phases = [phase("diversity", 0.75, a=3, b=1), phase("quality", 1.0, a=0, b=5)]
    mixture = plan_mixture(sources, phases, seq_length=10, train_tokens=8000)
    # a: 600 sequences of which three quarters; b: the rest of them, and all of the last 200.
    assert [(row.phase, row.source, row.sequences) for row in mixture.rows] == [
        ("diversity", "a", 450),
        ("diversity", "b", 150),
        ("quality", "a", 0),
        ("quality", "b", 200),
    ]
    a, b = mixture.sources
    assert (a.drawn, a.epochs, a.realised) == (4500, 1.125, 0.5625)
    assert (b.drawn, b.epochs, b.realised) == (3500, 3.5, 0.4375)
    assert mixture.phases[1]["weights"] == {"a": 0.0, "b": 1.0}


def test_without_weights_a_pass_takes_every_source_as_often_as_it_may() -> None:
    sources = {"web": SourceTokens(70, 700), "books": SourceTokens(10, 100, repeats=3)}
    mixture = plan_mixture(sources, None, seq_length=1)
    assert not mixture.one_pass and not mixture.budget_given  # three times the books
    assert mixture.train_tokens == 1000
    assert {row.source: (row.requested, row.epochs) for row in mixture.sources} == {
        "web": (pytest.approx(0.7), pytest.approx(1.0)),
        "books": (pytest.approx(0.3), pytest.approx(3.0)),
    }
    assert (mixture.largest_train_tokens, mixture.limited_by) == (1000, "books")


def test_a_blend_that_repeats_a_source_too_often_is_refused_with_the_numbers() -> None:
    sources = {"web": SourceTokens(9, 100_000), "books": SourceTokens(9, 1000, repeats=4)}
    phases = [phase("all", 1.0, web=0.9, books=0.1)]
    with pytest.raises(
        UserError, match=r"source 'books': 5,000 of 1,000 tokens are 5\.00 epochs, repeats is 4"
    ) as error:
        plan_mixture(sources, phases, seq_length=10, train_tokens=50_000)
    assert error.value.hint is not None
    assert "at most 40,000 fit" in error.value.hint
    # The largest budget that the message names is one that is taken.
    assert plan_mixture(sources, phases, seq_length=10, train_tokens=40_000).sources[1].epochs == pytest.approx(4)
    # Rounding to whole sequences is no reason to refuse.
    assert plan_mixture(sources, phases, seq_length=10, train_tokens=40_010).sources[1].epochs <= 4.01


def test_a_pass_is_not_refused_but_says_how_far_the_repeats_reach() -> None:
    sources = {"web": SourceTokens(9, 100_000), "books": SourceTokens(9, 1000, repeats=2)}
    mixture = plan_mixture(sources, [phase("all", 1.0, web=1, books=1)], seq_length=10)
    assert mixture.largest_train_tokens == 4000
    assert mixture.limited_by == "books"
    assert "4,000 (source books)" in mixture.table()


@pytest.mark.parametrize(
    ("sources", "weights", "train_tokens", "message"),
    [
        (
            {"a": SourceTokens(0, 0), "b": SourceTokens(5, 900)},
            {"a": 1, "b": 1},
            None,
            "'a' has a weight and 0 training",
        ),
        (
            {"a": SourceTokens(1, 10), "b": SourceTokens(5, 900)},
            {"a": 1, "b": 1},
            100,
            "10 training tokens; it takes 11",
        ),
        ({"a": SourceTokens(5, 900)}, {"a": 1}, 9, "is 0 sequences of 10"),
        ({"wiki": SourceTokens(5, 900)}, {"wikki": 1}, None, "did you mean 'wiki'"),
        ({"a": SourceTokens(0, 0)}, None, None, "no source has a training token"),
    ],
)
def test_what_cannot_be_mixed_is_refused(
    sources: dict[str, SourceTokens], weights: dict[str, float] | None, train_tokens: int | None, message: str
) -> None:
    phases = None if weights is None else [Phase(name="all", until=1.0, weights=weights)]
    with pytest.raises(UserError, match=message):
        plan_mixture(sources, phases, seq_length=10, train_tokens=train_tokens)


def test_a_pass_that_is_shorter_than_a_sequence_says_so() -> None:
    sources = {"a": SourceTokens(1, 30), "b": SourceTokens(2, 10)}
    mixture = plan_mixture(sources, None, seq_length=100)
    assert [(row.requested, row.realised, row.drawn) for row in mixture.sources] == [(0.75, 0, 0), (0.25, 0, 0)]
    assert "one pass: 0 tokens in sequences of 100: there are fewer" in mixture.table()


def test_a_source_of_weight_zero_is_listed_and_not_drawn() -> None:
    sources = {"a": SourceTokens(5, 900), "off": SourceTokens(0, 0)}
    mixture = plan_mixture(sources, [phase("all", 1.0, a=2, off=0)], seq_length=10)
    assert {row.source: row.drawn for row in mixture.sources} == {"a": 900, "off": 0}
    assert "off" in mixture.table()


def test_a_source_that_is_drawn_often_is_named_with_the_budget_that_repeats_nothing() -> None:
    sources = {"large": SourceTokens(100, 190_000), "small": SourceTokens(1, 1_000), "even": SourceTokens(1, 1_000)}
    weights = {"large": 0.5, "small": 0.4, "even": 0.1}
    phases: list[Phase] = [{"name": "all", "until": 1.0, "weights": weights}]
    mixture = plan_mixture(sources, phases, seq_length=10)
    [warning] = mixture.repetitions()
    assert "source 'small' is drawn 76.8 times (and 1 more of them often)" in warning
    assert "train_tokens of at most 2,500 repeats none" in warning
    assert "one pass" not in mixture.table() and "as many as the sources hold: 192,000 tokens" in mixture.table()
    # What it says is so.
    within = plan_mixture(sources, phases, seq_length=10, train_tokens=2500)
    assert max(row.epochs for row in within.sources) <= 1 and not within.repetitions()
    beyond = plan_mixture(sources, phases, seq_length=10, train_tokens=2600)
    assert max(row.epochs for row in beyond.sources) > 1
    # Who gives `repeats` knows.
    asked = sources | {name: SourceTokens(1, 1_000, repeats=100) for name in ("small", "even")}
    assert not plan_mixture(asked, phases, seq_length=10, train_tokens=190_000).repetitions()


def test_one_pass_is_said_where_it_is_one_and_rounding_is_named() -> None:
    equal = {name: SourceTokens(10, 72) for name in ("a", "b", "c")}
    mixture = plan_mixture(equal, None, seq_length=100)
    assert mixture.one_pass and not mixture.repetitions()
    assert "one pass: 200 tokens" in mixture.table()
    assert "only whole sequences of 100 are drawn" in mixture.table()
    assert "whole sequences" not in plan_mixture(equal, None, seq_length=1).table()
    weighted: list[Phase] = [{"name": "all", "until": 1.0, "weights": dict.fromkeys(equal, 1.0)}]
    assert plan_mixture(equal, weighted, seq_length=1).one_pass  # weights that are those of the sizes


def test_equal_remainders_go_by_name_and_not_by_the_order_of_the_weights() -> None:
    sources = {name: SourceTokens(1, 1000) for name in ("web", "books")}
    phases = [phase("all", 1.0, web=1, books=1)]
    mixture = plan_mixture(sources, phases, seq_length=10, train_tokens=30)
    assert {row.source: row.sequences for row in mixture.rows} == {"books": 2, "web": 1}
