"""The demo crawl: two crawls of one seed are the same bytes, and what the truth says is really there."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nemotron.recipes.data.curation.nemotron_cc import crawl_texts
from nemotron.recipes.data.curation.nemotron_cc.crawl_pages import NAVIGATION, Page, make_pages, render, write_warc

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


def test_check_digits_hold_for_real_ones_only(pages: list[Page]) -> None:
    def luhn(number: str) -> bool:
        digits = [int(digit) for digit in number if digit.isdigit()]
        doubled = [
            2 * digit - 9 * (digit > 4) if (len(digits) - i) % 2 == 0 else digit for i, digit in enumerate(digits)
        ]
        return sum(doubled) % 10 == 0

    def iban(number: str) -> bool:
        plain = number.replace(" ", "")
        return int("".join(str(int(c, 36)) for c in plain[4:] + plain[:4])) % 97 == 1

    assert luhn("4111 1111 1111 1111")  # the test number of every card form
    assert iban("DE89 3704 0044 0532 0130 00")  # the example of ISO 13616's registry
    checks = {"credit_card": luhn, "iban": iban}
    seen = Counter[tuple[str, bool]]()
    for _, case in planted(pages, "pii"):
        if case["type"] in checks:
            assert checks[case["type"]](case["value"]) != case["hard_negative"], case
        seen[case["type"], case["hard_negative"]] += 1
    assert set(seen) == {(kind, hard) for kind in crawl_texts.PII_TYPES for hard in (True, False)}


def test_every_page_has_its_text_and_the_navigation_around_it(pages: list[Page]) -> None:
    import html

    for page in pages[:100]:
        source = html.unescape(render(page))
        assert all(line in source for line in page.lines)
        assert sum(line in source for line in NAVIGATION) >= 10


def test_records_are_what_warcio_reads(tmp_path: Path, pages: list[Page]) -> None:
    from warcio.archiveiterator import ArchiveIterator

    some = [page for page in pages if page.broken not in ("truncated", "huge")][:200]
    write_warc(tmp_path / "a.warc.gz", some)
    with (tmp_path / "a.warc.gz").open("rb") as file:
        records = [
            (record.rec_headers.get_header("WARC-Target-URI"), record.content_stream().read())
            for record in ArchiveIterator(file, check_digests="raise")
            if record.rec_type == "response"
        ]
    assert [url for url, _ in records] == [page.url for page in some]
    for page, (_, body) in zip(some, records, strict=True):
        if not page.broken:
            assert body.decode(page.charset) == render(page)


def test_the_lists_have_no_empty_and_no_double_entry() -> None:
    import yaml

    texts = yaml.safe_load(crawl_texts.LISTS.read_text(encoding="utf-8"))
    lists = [values for name in ("everyday", "clickbait") for values in texts[name].values()]
    lists += [values for language in texts["other"].values() for values in language.values()]
    assert all(values and len(values) == len(set(values)) and all(values) for values in lists)
    json.dumps(texts)
