"""How well deduplication did on a crawl whose duplicates were planted (see `curation_step`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nemotron.data_prep.curation.step import Planted, Score, read_documents

BIN = 0.1


def _originals(truth: Mapping[str, list[Planted]]) -> dict[str, str]:
    """url -> the page of which it is an exact copy, at the end of every chain of copies; itself if of none."""
    copy_of = {
        url: case["url"] for url, cases in truth.items() for case in cases if case["kind"] == "exact_duplicate_of"
    }
    originals = {}
    for url in truth:
        original = url
        while original in copy_of:
            original = copy_of[original]
        originals[url] = original
    return originals


def score_exact(before: set[str], after: set[str], truth: Mapping[str, list[Planted]]) -> Score:
    """Of every set of pages with one text, all but one are to go, whichever stays.

    Args:
        before: urls that the step read; after: urls that it kept.
    """
    originals = _originals(truth)
    groups: dict[str, list[str]] = {}
    for url in before:
        groups.setdefault(originals.get(url, url), []).append(url)
    planted = sum(len(group) - 1 for group in groups.values())
    found = sum(min(len(group) - 1, sum(url not in after for url in group)) for group in groups.values())
    gone = len(before - after)
    return Score(planted, found, gone, gone - found)


def score_near(before: set[str], after: set[str], truth: Mapping[str, list[Planted]]) -> dict[str, Any]:
    """A planted pair is found if not both of its pages are there afterwards, whichever stays.

    Returns for metrics: `recall`, a row for every tenth of true Jaccard similarity (`from`, `planted`, `found`,
    `recall`), and of the documents that went, how many have a planted twin (`gone`, `with_twin`, `precision`).
    """
    originals = _originals(truth)
    present: dict[str, list[str]] = {}
    for url in before:
        present.setdefault(originals.get(url, url), []).append(url)
    tenths: dict[int, list[int]] = {}  # -> [planted, found]
    twins: set[str] = {url for group in present.values() if len(group) > 1 for url in group}
    for url, cases in truth.items():
        for case in cases:
            if case["kind"] != "near_duplicate_of":
                continue
            ones, others = (present.get(originals.get(page, page), []) for page in (url, case["url"]))
            if not ones or not others:
                continue
            twins.update(ones, others)
            tally = tenths.setdefault(min(int(case["jaccard"] / BIN + 1e-9), 9), [0, 0])
            tally[0] += 1
            tally[1] += not (after.intersection(ones) and after.intersection(others))
    gone = before - after
    with_twin = len(gone & twins)
    return {
        "recall": [
            {"from": round(tenth * BIN, 1), "planted": planted, "found": found, "recall": found / planted}
            for tenth, (planted, found) in sorted(tenths.items())
        ],
        "gone": len(gone),
        "with_twin": with_twin,
        "precision": with_twin / len(gone) if gone else None,
    }


def score_passages(before: Iterable[Path], after: Iterable[Path], truth: Mapping[str, list[Planted]]) -> dict[str, Any]:
    """Of every planted passage, all occurrences but one are to go.

    Args:
        before: document shards that the step read; after: those that it wrote.

    Returns for metrics, a row a passage: `tokens`, `before` and `after` (documents with it).
    """
    passages = {
        str(case["passage_id"]): " ".join(case["passage"].split())
        for cases in truth.values()
        for case in cases
        if case["kind"] == "boilerplate"
    }
    counts = {name: [0, 0] for name in passages}
    for number, files in enumerate((before, after)):
        for path in files:
            for document in read_documents(path):
                text = " ".join(document["text"].split())
                for name, passage in passages.items():
                    counts[name][number] += passage in text
    return {
        name: {"tokens": len(passages[name].split()), "before": counts[name][0], "after": counts[name][1]}
        for name in sorted(passages)
    }
