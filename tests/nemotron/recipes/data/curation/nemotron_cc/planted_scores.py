"""How much of what was planted in a made-up crawl (see crawl_pages.py) the steps of a curation find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemotron.data_prep.curation import pii

Truth = Mapping[str, list[dict[str, Any]]]
"""url -> what was planted in that page."""
Texts = Mapping[str, str]
"""url -> the text of that page's document, before or after a step."""


@dataclass(frozen=True, slots=True)
class Score:
    """`planted`: cases in what a step read; `found`: of these, those that it found; `reported`: all that it reported,
    `false`: of these, those where none was planted."""

    planted: int
    found: int
    reported: int
    false: int

    @property
    def precision(self) -> float:
        """Share of what was reported that had been planted."""
        return 1 - self.false / self.reported

    @property
    def recall(self) -> float:
        """Share of what was planted that was found."""
        return self.found / self.planted

    def __str__(self) -> str:
        """`recall 0.950 (19 of 20), precision 1.000 (19 of 19)`."""
        right = self.reported - self.false
        recall = f"recall {self.recall:.3f} ({self.found} of {self.planted})"
        return f"{recall}, precision {self.precision:.3f} ({right} of {self.reported})"


def drops(before: Texts, after: Texts, truth: Truth, is_case: Callable[[dict[str, Any]], bool]) -> Score:
    """How well what a step dropped fits what was planted. `is_case`: what the step is to drop."""
    cases = {url for url in before if any(is_case(case) for case in truth.get(url, []))}
    gone = before.keys() - after.keys()
    return Score(len(cases), len(cases & gone), len(gone), len(gone - cases))


def lines(after: Texts, planted: Texts) -> Score:
    """Lines of the main texts that extraction gave against the planted ones, whatever their whitespace."""
    found = right = wanted = 0
    for url in after.keys() & planted.keys():
        ours, theirs = (
            Counter(" ".join(line.split()) for line in text.split("\n") if line.strip())
            for text in (after[url], planted[url])
        )
        found, wanted, right = found + ours.total(), wanted + theirs.total(), right + (ours & theirs).total()
    return Score(wanted, right, found, found - right)


def _originals(truth: Truth) -> dict[str, str]:
    """url -> the page of which it is an exact copy; itself if of none."""
    return {
        url: next((case["url"] for case in cases if case["kind"] == "exact_duplicate_of"), url)
        for url, cases in truth.items()
    }


def exact_duplicates(before: Texts, after: Texts, truth: Truth) -> Score:
    """Of every set of pages with one text, all but one are to go, whichever stays."""
    originals = _originals(truth)
    groups: dict[str, list[str]] = {}
    for url in before:
        groups.setdefault(originals[url], []).append(url)
    planted = sum(len(group) - 1 for group in groups.values())
    found = sum(min(len(group) - 1, sum(url not in after for url in group)) for group in groups.values())
    gone = len(before) - len(after)
    return Score(planted, found, gone, gone - found)


def near_duplicates(before: Texts, after: Texts, truth: Truth) -> dict[float, tuple[int, int]]:
    """True Jaccard similarity, rounded down to a tenth -> planted pairs, and those of which not both pages are left."""
    originals = _originals(truth)
    present: dict[str, set[str]] = {}
    for url in before:
        present.setdefault(originals[url], set()).add(url)
    tenths: dict[float, tuple[int, int]] = {}
    for url, cases in truth.items():
        for case in cases:
            if case["kind"] != "near_duplicate_of":
                continue
            ones, others = present.get(url, set()), present.get(originals[case["url"]], set())
            if ones and others:
                tenth = int(case["jaccard"] * 10 + 1e-9) / 10
                planted, found = tenths.get(tenth, (0, 0))
                is_found = not (ones & after.keys() and others & after.keys())
                tenths[tenth] = (planted + 1, found + is_found)
    return dict(sorted(tenths.items()))


def documents_with(passage: str, texts: Iterable[str]) -> int:
    """How many texts hold a passage, whatever their whitespace."""
    return sum(" ".join(passage.split()) in " ".join(text.split()) for text in texts)


def personal_data(before: Texts, truth: Truth) -> dict[str, Score]:
    """Type -> score. A value counts as found if it was taken whole; what was not planted counts as false."""
    counts: dict[str, Counter[str]] = {}
    for url, text in before.items():
        right = {
            (case["type"], case["value"])
            for case in truth[url]
            if case["kind"] == "pii" and not case["hard_negative"] and case["value"] in text
        }
        for kind, _ in right:
            counts.setdefault(kind, Counter())["planted"] += 1
        for item in pii.find(text):
            kind = "ip" if item.kind.startswith("ip") else item.kind
            is_planted = (kind, text[item.begin : item.end]) in right
            counts.setdefault(kind, Counter()).update(["reported", "found" if is_planted else "false"])
    return {
        kind: Score(count["planted"], count["found"], count["reported"], count["false"])
        for kind, count in sorted(counts.items())
    }
