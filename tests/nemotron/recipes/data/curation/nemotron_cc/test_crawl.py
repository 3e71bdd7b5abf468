"""The made-up crawl: two of one seed are the same bytes, and what is said to be planted is really there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from nemotron.recipes.data.curation.nemotron_cc import crawl

from . import crawl_texts
from .crawl_pages import Page, make_pages, write_warc

pytest.importorskip("warcio")
PAGES = 600


@pytest.fixture(scope="module")
def sets() -> dict[str, list[dict[str, str]]]:
    return crawl_texts.evaluation_sets(Random("evaluation 1"))


@pytest.fixture(scope="module")
def pages(sets: dict[str, list[dict[str, str]]]) -> list[Page]:
    return make_pages(PAGES, 1, sets)


def planted(pages: list[Page], kind: str) -> list[tuple[Page, dict[str, Any]]]:
    return [(page, case) for page in pages for case in page.planted if case["kind"] == kind]


def test_a_seed_gives_the_same_bytes(tmp_path: Path, pages: list[Page], sets: dict[str, list[dict[str, str]]]) -> None:
    for name, some in (("a", pages), ("b", make_pages(PAGES, 1, sets)), ("c", make_pages(PAGES, 2, sets))):
        write_warc(tmp_path / "same.warc.gz", [page for page in some if page.broken != "truncated"])
        (tmp_path / "same.warc.gz").rename(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_urls_are_unique_and_every_kind_is_planted(pages: list[Page]) -> None:
    assert len({page.url for page in pages}) == len(pages)
    kinds = Counter(case["kind"] for page in pages for case in page.planted)
    assert set(kinds) == {
        "language", "quality", "exact_duplicate_of", "near_duplicate_of", "boilerplate", "pii", "low_quality",
        "contaminated", "broken",
    }  # fmt: skip
    assert min(kinds.values()) >= 14


def test_copies_are_copies_and_near_copies_as_near_as_the_truth_says(pages: list[Page]) -> None:
    by_url = {page.url: page for page in pages}
    for page, case in planted(pages, "exact_duplicate_of"):
        assert page.text == by_url[case["url"]].text

    def grams(text: str) -> set[str]:  # written anew, to check the crawl's own
        found = re.findall(r"\w+", text.lower())
        return {"|".join(found[i : i + 5]) for i in range(len(found) - 4)}

    near = planted(pages, "near_duplicate_of")
    for page, case in near:
        one, other = grams(page.text), grams(by_url[case["url"]].text)
        assert case["jaccard"] == pytest.approx(len(one & other) / len(one | other), abs=1e-4)
    assert min(case["jaccard"] for _, case in near) < 0.4
    assert max(case["jaccard"] for _, case in near) > 0.9


def test_other_pages_are_no_duplicates(pages: list[Page]) -> None:
    copies = {page.url for kind in ("exact_duplicate_of", "low_quality", "broken") for page, _ in planted(pages, kind)}
    texts = Counter(page.text for page in pages if page.url not in copies)
    assert texts.most_common(1)[0][1] == 1


def test_passages_values_and_leaks_stand_in_the_text(pages: list[Page], sets: dict[str, list[dict[str, str]]]) -> None:
    assert all(case["passage"] in page.lines for page, case in planted(pages, "boilerplate"))
    assert all(case["value"] in page.text for page, case in planted(pages, "pii"))
    questions = {item["id"]: item["question"] for rows in sets.values() for item in rows}
    for page, case in planted(pages, "contaminated"):
        assert case["text"] in page.lines
        leaked, question = (re.findall(r"\w+", text.lower()) for text in (case["text"], questions[case["item"]]))
        assert leaked[: len(question)] == question
    leaking = {page.url for page, _ in planted(pages, "contaminated")}
    for page in pages:
        if page.url not in leaking:
            assert not any(question in page.text for question in questions.values())


def test_the_crawl_that_comes_with_the_recipe_is_the_one_of_its_config() -> None:
    config = yaml.safe_load((crawl.DEMO_CRAWL.parent / "config" / "crawl" / "tiny.yaml").read_text())
    assert config["sha256"] == crawl.digest_of(crawl.DEMO_CRAWL)
    assert sum(path.stat().st_size for path in crawl.DEMO_CRAWL.rglob("*") if path.is_file()) < 300_000
