"""Overlap of word n-grams with protected texts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron.data_prep.curation.decontamination import Decontaminator, GramHasher, hits

SECRET = " ".join(f"word{i}" for i in range(20))


def overlaps(protected: list[str], text: str, **settings: int) -> bool:
    decontaminator = Decontaminator(**settings)
    decontaminator.protect(protected)
    found = hits(text, decontaminator.protected(), GramHasher())
    decontaminator.count(found)
    leaks = decontaminator.is_leak(found)
    assert decontaminator.observe(text) == leaks  # one document is no boilerplate
    return leaks


def test_thirteen_shared_words_are_an_overlap_twelve_are_not() -> None:
    thirteen = "before " + " ".join(SECRET.split()[3:16]) + " after"
    twelve = "before " + " ".join(SECRET.split()[3:15]) + " after"
    assert overlaps([SECRET], thirteen)
    assert not overlaps([SECRET], twelve)
    assert overlaps([SECRET], twelve, n=12)


def test_case_punctuation_and_layout_do_not_hide_it() -> None:
    assert overlaps([SECRET], SECRET.upper().replace(" ", ",\n  "))


def test_short_protected_texts_count_as_a_whole() -> None:
    assert overlaps(["What is 17 plus 5?"], "Q: what is 17 plus 5? A: 22")
    assert not overlaps(["What is 17 plus 5?"], "Q: what is 17 plus 6? A: 23")
    assert not overlaps(["17 plus 5"], "17 plus 5")  # under five words: says nothing


def test_boilerplate_is_no_overlap() -> None:
    decontaminator = Decontaminator(boilerplate_documents=3)
    decontaminator.protect([SECRET])
    found = hits(SECRET, decontaminator.protected(), GramHasher())
    for i in range(3):
        decontaminator.observe(f"{SECRET} number {i}")
    assert decontaminator.is_leak(found)
    assert decontaminator.observe(f"{SECRET} number 3")  # it says that there is one, boilerplate or not
    assert not decontaminator.is_leak(found)


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 6))
def test_grams_are_equal_exactly_where_words_are(words: list[str], n: int) -> None:
    hasher = GramHasher()
    grams = hasher.grams(hasher.word_hashes(" ".join(words)), n)
    spelled = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    assert len(grams) == len(spelled)
    assert len(np.unique(grams)) == len(set(spelled))


@settings(deadline=None)
@given(st.text("ab c", max_size=60), st.text("ab c", max_size=60))
def test_agrees_with_a_search_for_word_runs(protected: str, text: str) -> None:
    n = 5
    runs = {tuple(protected.split()[i : i + n]) for i in range(len(protected.split()) - n + 1)}
    expected = any(tuple(text.split()[i : i + n]) in runs for i in range(len(text.split()) - n + 1))
    assert overlaps([protected], text, n=n) == expected
