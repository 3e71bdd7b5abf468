"""Fuzzy deduplication: probabilities against simulation, estimates and recall against exact similarities of sets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron.data_prep.curation.deduplication import minhash
from nemotron.data_prep.work.engines import PoolEngine, SerialEngine
from nemotron.kit.schemas.curation import MinHashSettings

from ..shards import texts, write_shards

WORDS5 = MinHashSettings(unit="words", shingle_size=5, num_bands=20, rows_per_band=7, min_estimate=0.75)


def slow_shingles(text: str, options: MinHashSettings) -> set[str]:
    units: list[str] | str
    if options.unit == "words":
        units, glue = re.findall(r"\w+", text.lower()), " "
        if not units:
            return {text.lower()}
    else:
        units, glue = " ".join(text.lower().split()), ""
    size = options.shingle_size
    return {glue.join(units[i : i + size]) for i in range(max(1, len(units) - size + 1))}


def jaccard(one: str, other: str, options: MinHashSettings) -> float:
    a, b = slow_shingles(one, options), slow_shingles(other, options)
    return len(a & b) / len(a | b)


# --- Probabilities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("min_estimate", [0.0, 0.75])
def test_probabilities_are_those_of_independent_rows(similarity: float, min_estimate: float) -> None:
    options = MinHashSettings(num_bands=20, rows_per_band=7, min_estimate=min_estimate)
    trials = 40_000
    equal = np.random.default_rng(0).random((trials, 20, 7)) < similarity
    candidates = equal.all(axis=2).any(axis=1)
    found = candidates & (equal.mean(axis=(1, 2)) >= min_estimate)
    for simulated, stated in (
        (candidates.mean(), minhash.candidate_probability(similarity, options)),
        (found.mean(), minhash.found_probability(similarity, options)),
    ):
        assert simulated == pytest.approx(stated, abs=4 * (stated * (1 - stated) / trials) ** 0.5 + 1e-4)


def test_published_setting_by_hand() -> None:
    """NeMo Curator's 20 bands of 13 rows: 1 - (1 - 0.8**13)**20, and (1/20)**(1/13)."""
    options = MinHashSettings()
    assert (options.unit, options.shingle_size, options.num_permutations) == ("characters", 24, 260)
    exact = 1 - (1 - Fraction(4, 5) ** 13) ** 20
    assert minhash.candidate_probability(0.8, options) == pytest.approx(float(exact), abs=1e-12)
    assert minhash.found_probability(0.8, options) == pytest.approx(float(exact), abs=1e-9)  # nothing is compared again
    assert minhash.threshold(options) ** 13 == pytest.approx(1 / 20)
    assert minhash.found_probability(1.0, options) == minhash.candidate_probability(1.0, options) == 1.0
    assert "0.6773" in minhash.describe(options)


# --- Shingles and signatures ------------------------------------------------------------------------------------------

TEXT = st.text(st.sampled_from("abAB\u00e9 \n-_\u4e2d\U0001f600\u0130"), max_size=30)


@settings(max_examples=100)
@given(st.lists(TEXT, min_size=1, max_size=6), st.sampled_from(["characters", "words"]), st.integers(1, 6))
def test_shingles_are_equal_where_text_is(texts: list[str], unit: str, size: int) -> None:
    options = MinHashSettings(unit=unit, shingle_size=size)  # type: ignore[arg-type]
    hashes, offsets = minhash.shingle_hashes(texts, options)
    assert len(offsets) == len(texts) + 1
    found = [set(hashes[a:b].tolist()) for a, b in pairwise(offsets)]
    expected = [slow_shingles(text, options) for text in texts]
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine) == len(theirs)
        for others, them in zip(found, expected, strict=True):
            assert len(mine & others) == len(theirs & them)


def near_pairs(similarity: float, count: int, words: int = 240) -> Iterator[tuple[str, str]]:
    """Pairs of texts whose word 5-grams have about this Jaccard similarity: some words are replaced, far apart."""
    random = np.random.default_rng(int(similarity * 1000))
    # A replaced word takes 5 of n shingles with it: (n - 5k) / (n + 5k) = s.
    replaced = round((words - 4) * (1 - similarity) / (1 + similarity) / 5)
    for _ in range(count):
        text = [f"w{i}" for i in random.integers(0, 10**9, words)]
        copy = list(text)
        for place in 4 + random.permutation((words - 8) // 5)[:replaced] * 5:
            copy[place] = f"other{random.integers(10**9)}"
        yield " ".join(text), " ".join(copy)


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8, 0.9])
def test_estimate_and_recall_on_pairs_of_known_similarity(similarity: float) -> None:
    count, k = 1500, WORDS5.num_permutations
    pairs = list(near_pairs(similarity, count))
    true = np.array([jaccard(*pair, WORDS5) for pair in pairs[:50]])
    assert np.ptp(true) < 1e-9 and true[0] == pytest.approx(similarity, abs=0.02)
    rows = minhash.signatures([text for pair in pairs for text in pair], WORDS5)
    equal = rows[::2] == rows[1::2]
    # Unbiased: the mean of all estimates, within four standard errors of independent rows.
    assert equal.mean() == pytest.approx(true[0], abs=4 * (true[0] * (1 - true[0]) / k / count) ** 0.5)
    assert equal.mean(axis=1).std() < 1.1 * (true[0] * (1 - true[0]) / k) ** 0.5
    # Banding finds what the closed form says.
    bands = minhash.band_hashes(rows, WORDS5)
    shared = (bands[:, ::2] == bands[:, 1::2]).any(axis=0)
    assert np.array_equal(shared, equal.reshape(count, 20, 7).all(axis=2).any(axis=1))
    stated = minhash.candidate_probability(true[0], WORDS5)
    assert shared.mean() == pytest.approx(stated, abs=4 * (stated * (1 - stated) / count) ** 0.5 + 0.01)


def test_signatures_do_not_depend_on_the_batch() -> None:
    texts = ["", "short", *(text for pair in near_pairs(0.7, 20) for text in pair)]
    for options in (WORDS5, MinHashSettings()):
        together = minhash.signatures(texts, options)
        alone = np.concatenate([minhash.signatures([text], options) for text in texts])
        assert np.array_equal(together, alone)
    assert minhash.signatures([], WORDS5).shape == (0, 140)


# --- Clusters ---------------------------------------------------------------------------------------------------------


def slow_clusters(edges: list[tuple[int, int]], count: int) -> set[frozenset[int]]:
    groups = {i: {i} for i in range(count)}
    for a, b in edges:
        if groups[a] is not groups[b]:
            groups[a] |= groups[b]
            for member in groups[b]:
                groups[member] = groups[a]
    return {frozenset(group) for group in groups.values()}


def as_sets(parent: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(parent == root).tolist()) for root in np.unique(parent)}


@settings(max_examples=150)
@given(
    st.integers(1, 30).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 6), min_size=n, max_size=n), min_size=1, max_size=4)
    ),
    st.randoms(use_true_random=True),
    st.booleans(),
)
def test_clusters_are_connected_components(bands: list[list[int]], random: object, verify: bool) -> None:
    count = len(bands[0])
    similar = {(a, b): random.random() for a in range(count) for b in range(a)}  # type: ignore[attr-defined]
    keys = np.array(random.sample(range(1000), count), dtype=np.uint64)  # type: ignore[attr-defined]

    def estimate(ones: np.ndarray, others: np.ndarray) -> np.ndarray:
        return np.array([similar[max(a, b), min(a, b)] for a, b in zip(ones.tolist(), others.tolist(), strict=True)])

    arrays = [np.array(band, dtype=np.uint64) for band in bands]
    clusters, comparisons = minhash.find_clusters(arrays, lambda m: keys[m], estimate if verify else None, 0.7)
    edges = [
        pair
        for pair in similar
        if any(band[pair[0]] == band[pair[1]] for band in bands) and (not verify or similar[pair] >= 0.7)
    ]
    assert as_sets(clusters.parent) == slow_clusters(edges, count)
    assert comparisons.skipped == 0


def test_a_large_bucket_takes_linear_time_and_says_what_it_skipped() -> None:
    count = 5000
    bucket = np.zeros(count, dtype=np.uint64)
    keys = np.arange(count, dtype=np.uint64)
    compared = []

    def estimate(ones: np.ndarray, others: np.ndarray) -> np.ndarray:
        compared.append(len(ones))
        return (ones == 7).astype(float)  # all are like the eighth, and it is an anchor

    clusters, comparisons = minhash.find_clusters([bucket], lambda m: keys[m], estimate, 0.5)
    assert as_sets(clusters.parent) == {frozenset(range(7, count)), *(frozenset([i]) for i in range(7))}
    assert sum(compared) == comparisons.compared <= minhash.ANCHORS * count
    rest = count - minhash.ANCHORS
    assert comparisons.skipped == rest * (rest - 1) // 2


# --- The step ---------------------------------------------------------------------------------------------------------


def corpus() -> list[dict[str, str]]:
    documents = []
    for number, (text, copy) in enumerate(near_pairs(0.9, 40, words=120)):
        documents.append({"id": f"a{number}", "text": text})
        documents.append({"id": f"b{number}", "text": copy + " and more" * (number % 2)})
        if number % 10 == 0:
            documents.append({"id": f"c{number}", "text": text.upper().replace(" ", "\n")})
    return documents


def run(folder: Path, documents: list[dict[str, str]], shards: int, options: MinHashSettings, engine=None):  # type: ignore[no-untyped-def]
    files = write_shards(folder / "in", documents, shards)
    table, report = minhash.deduplicate(files, options, folder / "work", engine or SerialEngine())
    return texts(folder / "work"), table, report


@pytest.mark.parametrize("options", [WORDS5, MinHashSettings(rows_per_band=7)])
def test_one_document_of_a_cluster_stays_whatever_the_division(tmp_path: Path, options: MinHashSettings) -> None:
    documents = corpus()
    kept, table, report = run(tmp_path / "one", documents, 1, options)
    for number in range(40):
        cluster = [d for d in documents if d["id"][1:] == str(number)]
        # The longest; of equal length, that with the smallest hash of its id.
        longest = min(cluster, key=lambda d: (-len(d["text"]), xxhash.xxh3_64_intdigest(d["id"].encode())))
        assert [d["id"] for d in cluster if d["id"] in kept] == [longest["id"]]
    assert report["clusters"] == {"2": 36, "3": 4}
    for sample in table.samples[minhash.REASON]:
        twin, text = sample["detail"].removeprefix("stays: ").split(": ", 1)
        assert twin[1:] == sample["id"][1:] and kept[twin].startswith(text)

    with PoolEngine(3) as engine:
        other, other_table, other_report = run(tmp_path / "many", documents[::-1], 5, options, engine)
    assert other == kept
    assert other_table.to_json() == table.to_json()
    assert other_report["clusters"] == report["clusters"]


def test_forked_workers_after_signatures_were_made_here(tmp_path: Path) -> None:
    """rensa's own threads do not survive a fork; a worker that waited for them would wait for ever."""
    options = MinHashSettings()
    minhash.signatures(["some words that are here %d" % i * 50 for i in range(2000)], options)  # noqa: UP031
    with PoolEngine(2) as engine:
        kept, _, _ = run(tmp_path, corpus(), 4, options, engine)
    assert kept


def test_texts_without_a_word_are_not_all_alike(tmp_path: Path) -> None:
    documents = [{"id": str(i), "text": text} for i, text in enumerate(["?!", "...", "\U0001f600", "...", "one"])]
    kept, _, _ = run(tmp_path, documents, 2, WORDS5)
    assert sorted(kept.values()) == sorted(["?!", "...", "\U0001f600", "one"])


def test_empty_shards_and_empty_texts(tmp_path: Path) -> None:
    documents = [{"id": str(i), "text": text} for i, text in enumerate(["", "one", "", "two", "one"])]
    for options in (WORDS5, MinHashSettings()):
        kept, _, _ = run(tmp_path / options.unit, documents, 7, options)
        assert sorted(kept.values()) == ["", "one", "two"]


def test_what_was_found_is_said_in_words() -> None:
    report = {"clusters": {"2": 1, "5": 12}, "comparisons": {"compared": 1, "near": 1, "skipped": 0}}
    assert minhash.found_text(report) == "1 cluster of 2 documents, 12 clusters of 5 documents; 1 pair compared, 1 near"
    report = {"clusters": {}, "comparisons": {"compared": 2000, "near": 0, "skipped": 7}}
    assert minhash.found_text(report) == "no clusters; 2,000 pairs compared, 0 near, 7 not compared"
