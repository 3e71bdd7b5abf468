"""Splits by hash, and the form in which texts are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron.data_prep.sources.documents import normalise, split_of, stable_hash


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("a\r\nb\rc", "a\nb\nc"),
        ("e\u0301", "\u00e9"),
        ("\ufeffa\u200bb\x00c\x1b[0m", "abc[0m"),
        ("Title\x0bSubtitle\x85\x0cPage 2", "Title\nSubtitle\nPage 2"),
        ("a\n\x0cb \x0bc\x0b", "a\nb c"),
        ("a  \nb\t\n", "a\nb"),
        ("a\n\n\n\n\n\nb", "a\n\n\nb"),
        ("\n\n    indented\n\n", "    indented"),
        ("broken \ud800 surrogate", "broken  surrogate"),
    ],
)
def test_normalise(raw: str, clean: str) -> None:
    assert normalise(raw) == clean


@given(st.text(st.characters(codec=None)))
def test_normalise_is_idempotent_and_encodable(text: str) -> None:
    once = normalise(text)
    assert normalise(once) == once
    once.encode()


def test_split_of_is_stable_and_has_the_right_share() -> None:
    splits = [split_of(str(i), 0.1, 0, 0.2) for i in range(20_000)]
    for name, share in (("valid", 0.1), ("test", 0.2)):  # to within four standard deviations
        assert abs(splits.count(name) / 20_000 - share) < 4 * (share * (1 - share) / 20_000) ** 0.5
    assert splits.count("valid") == [split_of(str(i), 0.1, 0) for i in range(20_000)].count("valid")
    assert stable_hash("a", "b") != stable_hash("ab")
    assert stable_hash("caf\udce9.jsonl:1") != stable_hash("caf\udce8.jsonl:1")  # names of files, not UTF-8
