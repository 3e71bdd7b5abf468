"""Normalisation and quality heuristics."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron.data_prep.curation.text_quality import defect, normalise
from nemotron.data_prep.sources.documents import Kind

PROSE = "The quick brown fox jumps over the lazy dog while seven other animals watch it happen from the edge of a wood."


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("a\r\nb\rc", "a\nb\nc"),
        ("e\u0301", "\u00e9"),
        ("\ufeffa\u200bb\x00c\x1b[0m", "abc[0m"),
        ("a  \nb\t\n", "a\nb"),
        ("a\n\n\n\n\n\nb", "a\n\n\nb"),
        ("\n\n    indented\n\n", "    indented"),
        ("broken \ud800 surrogate", "broken  surrogate"),
    ],
)
def test_normalise(raw: str, clean: str) -> None:
    assert normalise(raw) == clean


@settings(deadline=None)
@given(st.text(st.characters(codec=None)))
def test_normalise_is_idempotent_and_encodable(text: str) -> None:
    once = normalise(text)
    assert normalise(once) == once
    once.encode()


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("  \n", "task", "empty"),
        ("2+2=?\n4", "task", None),
        (PROSE, "prose", None),
        ("Too few words here.", "prose", "too short"),
        ("x y z " * 20, "prose", "word length"),
        (PROSE + " #=|" * 40, "prose", "few letters"),
        (PROSE + " 12345" * 10, "prose", "many digits"),
        ("\n".join([PROSE] * 2 + ["One more line that differs from the others."]), "prose", "repeated lines"),
        ("import os\n\n\ndef size(path):\n    return os.stat(path).st_size + offset_of(path, key)\n", "code", None),
        ("value = some_function(first, second, third) + other " * 30, "code", "long line"),
        ("\n".join(["value = some_function(first, second, third)" + " + other_argument" * 5] * 9),
         "code", "long lines"),
    ],
)  # fmt: skip
def test_defects(text: str, kind: Kind, reason: str | None) -> None:
    assert defect(text, kind) == reason


def test_a_long_run_of_blanks_within_a_line_takes_no_time() -> None:
    text = "a" + " " * 200_000 + "b \t \nc"
    begin = time.process_time()
    assert normalise(text) == "a" + " " * 200_000 + "b\nc"
    assert time.process_time() - begin < 5  # where every blank of the run is tried anew, minutes
