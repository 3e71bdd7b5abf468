"""Scores on planted duplicates, counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemotron.data_prep.curation.deduplication.planted import score_exact, score_near, score_passages
from nemotron.data_prep.curation.step import write_documents


def copy(url: str) -> list[dict[str, Any]]:
    return [{"kind": "exact_duplicate_of", "url": url}]


def near(url: str, jaccard: float) -> list[dict[str, Any]]:
    return [{"kind": "near_duplicate_of", "url": url, "jaccard": jaccard}]


def test_of_equal_pages_any_one_may_stay() -> None:
    truth = {"a": [], "b": copy("a"), "c": copy("b"), "d": [], "e": copy("d"), "f": []}
    before = set("abcdef")
    for stays in "abc":
        score = score_exact(before, {stays, "d", "f"}, truth)
        assert (score.planted, score.found, score.false) == (3, 3, 0)
    # Both copies of d stay; f should have.
    score = score_exact(before, {"a", "d", "e"}, truth)
    assert (score.planted, score.found, score.reported, score.false) == (3, 2, 3, 1)
    # All copies of d are gone: one too many.
    assert score_exact(before, {"a", "f"}, truth).false == 1
    # What an earlier step dropped is not to be found any more.
    assert score_exact({"b", "d", "f"}, {"b", "d", "f"}, truth).planted == 0


def test_near_pairs_by_similarity() -> None:
    truth = {
        "a": [],
        "b": near("a", 0.85),
        "c": near("a", 0.8),
        "d": [],
        "e": near("d", 0.3),
        "f": [],
        "g": copy("a"),
        "h": near("gone", 0.9),
        "i": near("d", 1.0),
    }
    # The earlier step kept g in the place of a; "gone" was dropped before.
    before = {"b", "c", "d", "e", "f", "g", "h", "i"}
    scores = score_near(before, {"b", "d", "e", "h", "i"}, truth)
    assert scores["recall"] == [
        {"from": 0.3, "planted": 1, "found": 0, "recall": 0.0},
        {"from": 0.8, "planted": 2, "found": 2, "recall": 1.0},
        {"from": 0.9, "planted": 1, "found": 0, "recall": 0.0},
    ]
    # Gone are c and g, which have twins, and f, which has none.
    assert (scores["gone"], scores["with_twin"], scores["precision"]) == (3, 2, 2 / 3)


def test_passages_are_counted_whatever_their_whitespace(tmp_path: Path) -> None:
    truth = {"u": [{"kind": "boilerplate", "passage": "one two\nthree", "passage_id": 7}]}
    for name, texts in (
        ("before", ["a one two three", "one\ttwo three b", "one two"]),
        ("after", ["a", "one two three b"]),
    ):
        write_documents(tmp_path / f"{name}.jsonl.zst", [{"id": str(i), "text": text} for i, text in enumerate(texts)])
    scores = score_passages([tmp_path / "before.jsonl.zst"], [tmp_path / "after.jsonl.zst"], truth)
    assert scores == {"7": {"tokens": 3, "before": 2, "after": 1}}
