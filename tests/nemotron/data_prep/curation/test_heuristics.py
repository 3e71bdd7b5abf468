"""Heuristic filters: numbers worked out by hand, and a slow second implementation of what repeats."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron.data_prep.curation import heuristics
from nemotron.data_prep.curation.heuristics import MEASURES, Page, first_failure
from nemotron.kit.schemas.limits import LimitConfig


def value(name: str, text: str) -> float:
    return MEASURES[name](Page(text))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("word_count", "one two\nthree  four", 4),
        ("mean_word_length", "a bb ccc", 2.0),
        ("mean_word_length", "", 0.0),
        ("longest_word", "a bbbb cc", 4),
        ("stop_words", "the cat and THE dog to the vet", 4),  # capitals do not count
        ("symbol_to_word_ratio", "# one # two", 2 / 4),
        ("symbol_to_word_ratio", "one... two… three # four", 2 / 5),
        ("placeholder_text", "Lorem Ipsum dolor", 1),
        ("boilerplate_paragraphs", "We use cookies here.\n\nText.\n\nRead our Privacy Policy.\n\nMore.", 0.5),
        ("bullet_lines", "• one\n- two\n* three\nfour", 0.75),
        ("bullet_lines", "-5 degrees\n*bold* text", 0.0),
        ("ellipsis_lines", "one...\n\ntwo…\nthree.\nfour", 0.5),
        ("lines_without_end_mark", 'One.\nTwo\n"Three."\nFour', 0.5),
        ("lines_with_end_mark", "One.\nTwo\nThree?\nFour!", 0.75),
        ("short_lines", "x" * 29 + "\n" + "x" * 30, 0.5),
        ("longest_line", "ab\n abcd \n\nc", 4),
        ("mean_line_length", "ab\n abcd \n\nc", 7 / 3),
        ("alphabetic_words", "1 2 a3 b", 0.5),
        ("non_alphanumeric", "ab, c", 1 / 5),  # the blank
        ("non_alphanumeric", "äß\n!", 0.0),
        ("digits", "a1b2", 0.5),
        ("url_chars", "see https://a.b c", 11 / 17),
        ("white_space", "a b\n\n", 3 / 5),
        ("parentheses", "f(x)[y]", 4 / 7),
        ("duplicate_lines", "a\nb\na\na", 0.5),
        ("duplicate_line_chars", "aaa\nb\naaa", 3 / 7),
        ("duplicate_paragraphs", "a b\n\nc\n\na b", 1 / 3),
        ("duplicate_paragraph_chars", "ab\n\nc\n\nab", 2 / 5),
        # The run "ab cd" twice among 12 characters; letter case does not count.
        ("top_2gram_chars", "ab cd xyz AB cd w", 8 / 12),
        ("top_2gram_chars", "a a a", 1.0),  # overlapping: each word once
        ("top_3gram_chars", "every word here is another one", 0.0),
        ("duplicate_5gram_chars", "a b c d e x a b c d e", 5 / 11),
        ("duplicate_6gram_chars", "a b c d e x a b c d e", 0.0),
    ],
)
def test_values_by_hand(name: str, text: str, expected: float) -> None:
    assert math.isclose(value(name, text), expected, abs_tol=1e-12), name


def slow_duplicate(text: str, n: int) -> float:
    """Table A1 of Gopher, the slow way: strings, sets and one flag a character."""
    words = text.lower().split()
    flags = [False] * len(words)
    seen: set[str] = set()
    for i in range(len(words) - n + 1):
        run = " ".join(words[i : i + n])
        if run in seen:
            flags[i : i + n] = [True] * n
        seen.add(run)
    return sum(len(w) for w, flag in zip(text.split(), flags, strict=True) if flag) / max(1, sum(map(len, words)))


def slow_top(text: str, n: int) -> set[float]:
    """All values that a most frequent run gives."""
    words = text.lower().split()
    runs = [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]
    counts = Counter(runs)
    most = max(counts.values(), default=0)
    if most < 2:
        return {0.0}
    values = set()
    for run, count in counts.items():
        if count == most:
            covered = {j for i, other in enumerate(runs) if other == run for j in range(i, i + n)}
            values.add(sum(len(text.split()[j]) for j in covered) / sum(map(len, text.split())))
    return values


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["a", "bb", "ccc", "A", "\n"]), max_size=40), st.integers(2, 10))
def test_what_repeats_agrees_with_the_slow_way(words: list[str], n: int) -> None:
    text = " ".join(words)
    assert math.isclose(heuristics.duplicate_ngram_chars(Page(text), n), slow_duplicate(text, n))
    if n <= 4:
        found = heuristics.top_ngram_chars(Page(text), n)
        assert any(math.isclose(found, possible) for possible in slow_top(text, n))


@settings(max_examples=100)
@given(st.text(max_size=200))
def test_any_text_has_finite_values(text: str) -> None:
    counts = {"word_count", "longest_word", "stop_words", "mean_word_length", "longest_line", "mean_line_length"}
    for name, measure in MEASURES.items():
        found = measure(Page(text))
        assert math.isfinite(found) and found >= 0.0, name
        if name not in counts and name != "symbol_to_word_ratio":
            assert found <= 1.0, name


def test_limits_are_inclusive_and_the_first_failure_is_named() -> None:
    limits = {"word_count": LimitConfig(low=3, high=5), "digits": LimitConfig(high=0.5)}
    assert first_failure("a b c", limits) is None
    assert first_failure("a b 1", {"digits": LimitConfig(high=0.2)}) is None
    assert first_failure("a b", limits) == ("word_count", 2)
    assert first_failure("1 2 3 4 5", limits) == ("digits", 5 / 9)
    assert first_failure("1 2 3 4 5", {}) is None


@pytest.mark.parametrize("unit", ["word ", "https://", "a", "\n", "x\n\n"])
def test_a_megabyte_comes_to_an_end(unit: str) -> None:
    """No filter looks back over what it has seen: one that did would be stopped by the time limit of a test."""
    assert first_failure(unit * (1_000_000 // len(unit)), dict.fromkeys(MEASURES, LimitConfig())) is None


def test_paragraphs_are_cut_at_blank_lines() -> None:
    text = "a\nb\n\n\n\nc\n\nd"
    assert Page(text).paragraphs == [p for p in re.split(r"\n\n+", text) if p]


@given(st.text(alphabet="ab1 \n\té²\u00a0٣", max_size=40))
def test_characters_of_any_script_are_counted_alike(text: str) -> None:
    size = max(1, len(text))
    assert value("digits", text) == sum(map(str.isdigit, text)) / size
    assert value("white_space", text) == sum(map(str.isspace, text)) / size
    plain = sum(c.isalnum() or c in "\n?!,." for c in text)
    assert math.isclose(value("non_alphanumeric", text), 1 - plain / size, abs_tol=1e-12)
