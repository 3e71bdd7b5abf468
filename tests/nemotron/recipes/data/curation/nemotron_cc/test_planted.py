"""What the steps of `nemotron data curate` find of what was planted in 1,830 made-up pages: precision and recall.

`pytest -s` prints the numbers that the recipe's README states.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

from nemo_runspec.artifacts import Registry, Version
from nemotron.data_prep.curation import pii, quality
from nemotron.data_prep.curation.step import list_documents, read_documents
from nemotron.data_prep.sources.documents import split_of
from nemotron.recipes.data.curation.nemotron_cc.crawl import DEMO_CRAWL

from .planted_pages import Page, read_pages, write_crawl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
for module in ("warcio", "trafilatura", "py3langid", "sklearn"):
    pytest.importorskip(module)

HELD_OUT = 0.4  # of the pages that the classifiers would learn from
CODE = "from nemotron.cli.main import main; main()"


Texts = Mapping[str, str]
"""url -> the text of that page's document, before or after a step."""


@dataclass(frozen=True)
class Score:
    """`planted`: cases in what a step read; `found`: of these, those that it found; `reported`: all that it reported,
    of which `right` had been planted."""

    planted: int
    found: int
    reported: int
    right: int

    @property
    def precision(self) -> float:
        return self.right / self.reported

    @property
    def recall(self) -> float:
        return self.found / self.planted

    def __str__(self) -> str:
        recall = f"recall {self.recall:.3f} ({self.found} of {self.planted})"
        return f"{recall}, precision {self.precision:.3f} ({self.right} of {self.reported})"


class Curated(NamedTuple):
    """The planted pages by url, and what each step has published."""

    pages: dict[str, Page]
    registry: Registry

    def version(self, step: str) -> Version:
        return self.registry.resolve(
            "nemotron_cc-data-tiny" if step == "decontaminate" else f"nemotron_cc-{step}-data-tiny"
        )

    def texts(self, step: str) -> dict[str, str]:
        files = list_documents(self.version(step).path)
        return {document["url"]: document["text"] for file in files for document in read_documents(file)}

    def drops(self, before: str, after: str, kind: str, is_case: Callable[[dict[str, object]], bool] = bool) -> Score:
        """How well what a step dropped fits what was planted; of pages that are in no language, none is a mistake."""
        texts, left = self.texts(before), self.texts(after)
        if kind == "language":
            texts = {url: text for url, text in texts.items() if self.pages[url].language}
        cases = {url for url in texts if any(map(is_case, self.pages[url].cases(kind)))}
        gone = texts.keys() - left.keys()
        return Score(len(cases), len(cases & gone), len(gone), len(gone & cases))

    def original(self, url: str) -> str:
        """The page of which one is an exact copy; itself if of none."""
        return next((case["url"] for case in self.pages[url].cases("exact_duplicate_of")), url)


@pytest.fixture(scope="module")
def curated(tmp_path_factory: pytest.TempPathFactory) -> Curated:
    """All steps under their tiny configs, over pages of which half of the English ones also teach the classifiers."""
    root = tmp_path_factory.mktemp("planted")
    pages = read_pages()
    write_crawl(root / "warc", pages, 6)
    for name, is_good in (("good", True), ("other", False)):
        labelled = [page for page in pages if page.level is not None and (page.level == 2) == is_good]
        rows = [json.dumps({"url": page.url, "text": page.text}) for page in labelled if not is_held_out(page.url)]
        (root / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    words = [
        "data", "curate", "-c", "tiny", "--from", "extract",
        "extract:run.data=null", f"extract:warc=[{root}/warc]",
        "quality:run.crawl=null", f"quality:training.positive=[{root}/good.jsonl]",
        f"quality:training.negative=[{root}/other.jsonl]", "quality:training.held_out_fraction=0",
        "quality:min_bucket=1", "decontaminate:run.crawl=null", f"decontaminate:evaluation=[{DEMO_CRAWL}/evaluation]",
    ]  # fmt: skip
    env = {key: value for key, value in os.environ.items() if not key.startswith(("RUNSPEC_", "NEMOTRON_"))}
    env |= {"NO_COLOR": "1", "RUNSPEC_ARTIFACTS_ROOT": str(root / "artifacts")}
    process = subprocess.run(
        [sys.executable, "-c", CODE, *words], cwd=root, env=env, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    print("\n" + process.stdout[process.stdout.index("What each step has dropped") :])
    return Curated({page.url: page for page in pages}, Registry(root / "artifacts"))


def is_held_out(url: str) -> bool:
    return split_of(url, HELD_OUT, seed=0) == "valid"


def lines(text: str) -> Counter[str]:
    return Counter(" ".join(line.split()) for line in text.split("\n") if line.strip())


def documents_with(passage: str, texts: Texts) -> int:
    return sum(" ".join(passage.split()) in " ".join(text.split()) for text in texts.values())


def test_main_text_is_found_and_no_good_page_is_lost(curated: Curated) -> None:
    after = curated.texts("extract")
    good = {url: page.text for url, page in curated.pages.items() if not page.broken}
    pairs = [(lines(after[url]), lines(text)) for url, text in good.items() if url in after]
    right = sum((ours & theirs).total() for ours, theirs in pairs)
    score = Score(sum(t.total() for _, t in pairs), right, sum(o.total() for o, _ in pairs), right)
    kept = Counter(page.broken for url, page in curated.pages.items() if page.broken and url in after)
    print(f"\nextract: lines of main text: {score}; broken pages kept: {dict(kept)}")
    assert score.recall > 0.97 and score.precision > 0.95
    assert good.keys() <= after.keys()
    table = curated.version("extract").record["metrics"]["table"]
    assert {"empty page", "not HTML", "page too large", "HTTP status 4xx", "damaged record"} <= set(table["dropped"])
    assert table["read"]["documents"] == len(curated.pages)


def test_other_languages_go_and_nothing_else(curated: Curated) -> None:
    score = curated.drops("extract", "language", "language", lambda case: case["language"] != "en")
    print(f"\nlanguage: {score}")
    assert score.recall > 0.99 and score.precision > 0.99


def test_copies_go_and_one_of_each_stays(curated: Curated) -> None:
    before, after = curated.texts("language"), curated.texts("exact_dedup")
    groups: dict[str, list[str]] = {}  # of pages with one text, all but one are to go, whichever stays
    for url in before:
        groups.setdefault(curated.original(url), []).append(url)
    found = sum(min(len(group) - 1, sum(url not in after for url in group)) for group in groups.values())
    score = Score(len(before) - len(groups), found, len(before) - len(after), found)
    print(f"\nexact_dedup: {score}")
    assert score.recall == 1.0 and score.precision > 0.97


def test_near_copies_go_from_a_similarity_of_08_on(curated: Curated) -> None:
    before, after = curated.texts("exact_dedup"), curated.texts("fuzzy_dedup")
    copies: dict[str, set[str]] = {}
    for url in before:
        copies.setdefault(curated.original(url), set()).add(url)
    tenths: dict[float, tuple[int, int]] = {}  # similarity, rounded down to a tenth -> pairs, and those cut apart
    for url in sorted(curated.pages):
        for case in curated.pages[url].cases("near_duplicate_of"):
            ones, others = copies.get(url, set()), copies.get(curated.original(case["url"]), set())
            if ones and others:
                tenth = int(case["jaccard"] * 10 + 1e-9) / 10
                planted, found = tenths.get(tenth, (0, 0))
                tenths[tenth] = (planted + 1, found + (not (ones & after.keys() and others & after.keys())))
    shown = {tenth: f"{found} of {planted}" for tenth, (planted, found) in sorted(tenths.items())}
    print(f"\nfuzzy_dedup, found of planted by similarity: {shown}")
    for similarity, (planted, found) in tenths.items():
        if similarity >= 0.8:
            assert found == planted
        elif similarity < 0.6:
            assert found == 0


def test_of_a_passage_one_document_is_left(curated: Curated) -> None:
    before, after = curated.texts("fuzzy_dedup"), curated.texts("substring_dedup")
    passages = {case["passage"] for page in curated.pages.values() for case in page.cases("boilerplate")}
    assert len(passages) == 6
    for passage in passages:
        assert documents_with(passage, before) > 10
        assert documents_with(passage, after) == 1


def test_quality_tells_explanations_from_the_rest_where_length_does_not(curated: Curated) -> None:
    held_out = [
        (text, curated.pages[url].level == 2)
        for url, text in curated.texts("substring_dedup").items()
        if is_held_out(url) and curated.pages[url].level is not None
    ]
    texts, good = [text for text, _ in held_out], np.array([is_good for _, is_good in held_out])
    version = curated.version("quality")
    scores = quality.Ensemble.load(version.path / "classifier").scores(texts)
    thresholds = [version.record["metrics"]["thresholds"][name] for name in quality.CLASSIFIERS]
    buckets = quality.ensemble_bucket(quality.to_buckets(scores, thresholds)).astype(float)
    auc, length = quality.auc_interval(buckets, good), quality.auc(np.array([len(text) for text in texts]), good)
    print(f"\nquality: {len(good)} held-out pages, {good.sum()} good; AUC {auc}; length alone {length:.3f}")
    assert len(good) > 250 and auc.low > 0.9
    assert 0.4 < length < 0.6


def test_personal_data_is_replaced_and_lookalikes_stay(curated: Curated) -> None:
    before, after = curated.texts("quality"), curated.texts("pii")
    counts: dict[str, Counter[str]] = {}
    for url, text in before.items():
        cases = [case for case in curated.pages[url].cases("pii") if case["value"] in text]
        right = {(case["type"], case["value"]) for case in cases if not case["hard_negative"]}
        for kind, _ in right:
            counts.setdefault(kind, Counter())["planted"] += 1
        for item in pii.find(text):  # a value counts as found if it was taken whole
            kind = "ip" if item.kind.startswith("ip") else item.kind
            is_planted = (kind, text[item.begin : item.end]) in right
            counts.setdefault(kind, Counter()).update(["reported"] + ["right"] * is_planted)
    scores = {k: Score(c["planted"], c["right"], c["reported"], c["right"]) for k, c in counts.items()}
    print("\n" + "\n".join(f"pii {kind:<12} {score}" for kind, score in scores.items()))
    assert set(scores) == {"email", "phone", "ip", "credit_card", "ssn", "iban"}
    assert all(score.recall >= 0.95 and score.precision >= 0.98 for score in scores.values())
    lookalikes = [
        (url, case["value"]) for url in before for case in curated.pages[url].cases("pii")
        if case["hard_negative"] and case["value"] in before[url]
    ]  # fmt: skip
    assert len(lookalikes) > 50 and all(value in after[url] for url, value in lookalikes)


def test_worthless_pages_go(curated: Curated) -> None:
    score = curated.drops("pii", "heuristics", "low_quality")
    print(f"\nheuristics: {score}")
    assert score.recall > 0.8 and score.precision > 0.8


def test_leaks_go_and_nothing_else(curated: Curated) -> None:
    score = curated.drops("heuristics", "decontaminate", "contaminated")
    print(f"\ndecontaminate: {score}")
    assert score.planted > 30 and (score.recall, score.precision) == (1.0, 1.0)
