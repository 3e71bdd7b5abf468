#!/usr/bin/env python
"""Near duplicates among generated documents: ours (rensa, numpy) beside datasketch, in one process, on one core.

    python benchmarks/minhash.py
    python benchmarks/minhash.py --documents 20000 --rounds 1

Documents of some 500 words (lognormal, Zipf-distributed words), and planted copies of some of them in which words were
replaced until the Jaccard similarity of the word 5-grams is about 0.7, 0.8 or 0.9; it is then computed exactly, over
sets of strings. Both sides have the same number of permutations, bands and rows, and are timed from texts to pairs of
documents whose estimated similarity reaches the threshold:

    ours         shingle hashes in numpy, signatures by rensa, bands sorted, candidates compared: nemotron.data_prep
    datasketch   a shingle is a bytes object; MinHash with xxh32 in the place of its SHA-1;
                 MinHashLSH: every document asks for candidates, is compared with them, and goes into the index
    given hashes the same with our shingle hashes in the place of strings, so that only MinHash and LSH are timed

Times are processor seconds, the median of some rounds. Recall: planted pairs that end in one cluster (ours) or as a
pair (datasketch). At last the mean error of rensa's three ways to make a signature, over sets of known similarity.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from nemotron.data_prep.curation.decontamination import words
from nemotron.data_prep.curation.deduplication import minhash
from nemotron.data_prep.curation.deduplication.columns import BATCH_CHARS
from nemotron.kit.schemas.curation import MinHashSettings

MEAN_WORDS, SIGMA, VOCABULARY = 500, 0.6, 50_000
PLANTED = (0.7, 0.8, 0.9)
PLANTED_SHARE = 0.03  # of all documents, copies of each similarity
Pairs = dict[float, list[tuple[int, int]]]


def make_corpus(count: int) -> tuple[list[str], Pairs]:
    """Texts, and the planted pairs by the similarity that they were made for."""
    random = np.random.default_rng(0)
    planted_each = int(count * PLANTED_SHARE)
    originals = count - planted_each * len(PLANTED)
    vocabulary = [f"{'bcdfghjklmnpqrstvwxz'[i % 20]}{np.base_repr(i, 36).lower()}" for i in range(VOCABULARY)]
    lengths = np.clip(random.lognormal(np.log(MEAN_WORDS) - SIGMA**2 / 2, SIGMA, originals), 60, 5000).astype(int)
    texts: list[list[str]] = []
    for length in lengths.tolist():
        texts.append([vocabulary[int(i) % VOCABULARY] for i in random.zipf(1.3, length) - 1])
    pairs: Pairs = {}
    for similarity in PLANTED:
        pairs[similarity] = []
        for original in random.choice(originals, planted_each, replace=False).tolist():
            text = list(texts[original])
            # A replaced word takes 5 of n shingles with it: (n - 5k) / (n + 5k) = s.
            replaced = round((len(text) - 4) * (1 - similarity) / (1 + similarity) / 5)
            for place in 4 + 5 * random.permutation((len(text) - 8) // 5)[:replaced]:
                text[place] = f"new{random.integers(10**9)}"
            pairs[similarity].append((original, len(texts)))
            texts.append(text)
    return [" ".join(text) for text in texts], pairs


def shingles(text: str, size: int) -> list[str]:
    """Word n-grams, as strings."""
    tokens = words(text)
    return [" ".join(tokens[i : i + size]) for i in range(max(1, len(tokens) - size + 1))]


def ours(texts: Sequence[str], settings: MinHashSettings) -> NDArray[np.int64]:
    """Cluster of every document."""
    rows = []
    batch: list[str] = []
    chars = 0
    for text in texts:
        batch.append(text)
        chars += len(text)
        if chars > BATCH_CHARS:
            rows.append(minhash.signatures(batch, settings))
            batch, chars = [], 0
    signed = np.concatenate([*rows, minhash.signatures(batch, settings)])
    bands = minhash.band_hashes(signed, settings)
    keys = np.arange(len(texts), dtype=np.uint64)
    clusters, _ = minhash.find_clusters(
        bands,
        lambda members: keys[members],
        lambda ones, others: (signed[ones] == signed[others]).mean(axis=1),
        settings.min_estimate,
    )
    return clusters.parent


def theirs(
    sets: Callable[[int], list[Any]], count: int, settings: MinHashSettings, hashfunc: Callable[[Any], int]
) -> set[tuple[int, int]]:
    """datasketch: pairs found, the earlier document first."""
    from datasketch import MinHash, MinHashLSH

    k = settings.num_permutations
    lsh = MinHashLSH(num_perm=k, params=(settings.num_bands, settings.rows_per_band))
    signatures: list[Any] = []
    found = set()
    for number, signature in enumerate(
        MinHash.generator((sets(i) for i in range(count)), num_perm=k, seed=1, hashfunc=hashfunc)
    ):
        for candidate in lsh.query(signature):
            if signatures[candidate].jaccard(signature) >= settings.min_estimate:
                found.add((candidate, number))
        lsh.insert(number, signature)
        signatures.append(signature)
    return found


def seconds(work: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """Median processor seconds of several calls, and what the last one returned."""
    times, result = [], None
    for _ in range(rounds):
        start = time.process_time()
        result = work()
        times.append(time.process_time() - start)
    return statistics.median(times), result


def bias() -> None:
    """Mean error of rensa's estimates on pairs of sets of 400 random hashes, 128 permutations."""
    from rensa import CMinHash, RMinHash

    def flat(name: str) -> Callable[[NDArray[np.uint64]], NDArray[Any]]:
        def sign(sets: NDArray[np.uint64]) -> NDArray[Any]:
            offsets = np.arange(0, sets.size + 1, sets.shape[1], dtype=np.uint64)
            return np.array(getattr(RMinHash, name)(sets.ravel(), offsets, 128, 1).to_rows())

        return sign

    ways = {
        "RMinHash": flat("digest_matrix_from_flat_token_hashes"),
        "RMinHash, Rho": flat("digest_matrix_from_flat_token_hashes_rho"),
        "CMinHash": lambda sets: np.array(CMinHash.digests64_from_token_hash_sets(list(sets), 128, 1), dtype=np.uint64),
    }
    size, trials = 400, 1000
    for name, sign in ways.items():
        errors = []
        for similarity in (0.5, 0.7, 0.9):
            common = round(2 * size * similarity / (1 + similarity))
            tokens = np.random.default_rng(0).integers(0, 2**63, (trials, 2 * size - common), dtype=np.uint64)
            ones, others = tokens[:, :size], np.concatenate([tokens[:, :common], tokens[:, size:]], axis=1)
            equal = sign(np.ascontiguousarray(ones)) == sign(np.ascontiguousarray(others))
            errors.append(f"{similarity}: {equal.mean() - common / (2 * size - common):+.4f}")
        print(f"  {name:14s} {', '.join(errors)}")


def main() -> None:
    """Print both sides and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bands", type=int, default=20)
    parser.add_argument("--rows", type=int, default=7)
    parser.add_argument("--min-estimate", type=float, default=0.7)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    settings = MinHashSettings(
        unit="words",
        shingle_size=5,
        num_bands=options.bands,
        rows_per_band=options.rows,
        min_estimate=options.min_estimate,
    )
    texts, pairs = make_corpus(options.documents)
    count, megabytes = len(texts), sum(map(len, texts)) / 1e6
    libraries = ", ".join(f"{name} {version(name)}" for name in ("rensa", "datasketch", "numpy"))
    print(f"{platform.machine()}, one of {os.cpu_count()} cores; Python {platform.python_version()}, {libraries}")
    print(f"{count:,} documents, {megabytes:.0f} MB, median of {options.rounds}")
    print(minhash.describe(settings))

    all_shingles = [[s.encode() for s in shingles(text, settings.shingle_size)] for text in texts]
    true = {
        pair: len(set(all_shingles[pair[0]]) & set(all_shingles[pair[1]]))
        / len(set(all_shingles[pair[0]]) | set(all_shingles[pair[1]]))
        for planted in pairs.values()
        for pair in planted
    }
    hashes = [(minhash.shingle_hashes([text], settings)[0] >> np.uint64(32)).tolist() for text in texts]
    ours_s, clusters = seconds(lambda: ours(texts, settings), options.rounds)
    given_s, given = seconds(lambda: theirs(lambda i: hashes[i], count, settings, lambda value: value), options.rounds)
    sketch_s, sketch = seconds(
        lambda: theirs(
            lambda i: [s.encode() for s in shingles(texts[i], settings.shingle_size)],
            count,
            settings,
            xxhash.xxh32_intdigest,
        ),
        options.rounds,
    )
    print(f"\n{'':14s} {'seconds':>8} {'documents/s':>12} {'ratio':>7}")
    for name, took in (("ours", ours_s), ("datasketch", sketch_s), ("given hashes", given_s)):
        print(f"{name:14s} {took:8.2f} {count / took:12,.0f} {took / ours_s:6.1f}x")

    print(f"\n{'planted':>8} {'pairs':>6} {'true similarity':>16} {'S-curve':>8} {'ours':>7} {'datasketch':>11}")
    for similarity, planted in pairs.items():
        exact = [true[pair] for pair in planted]
        expected = statistics.mean(minhash.found_probability(s, settings) for s in exact[:50])
        found = statistics.mean(int(clusters[a] == clusters[b]) for a, b in planted)
        peer = statistics.mean(int((a, b) in sketch) for a, b in planted)
        span = f"{min(exact):.3f} to {max(exact):.3f}"
        print(f"{similarity:8.1f} {len(planted):6d} {span:>16} {expected:8.4f} {found:7.4f} {peer:11.4f}")
    joined = {frozenset((a, b)) for a, b in true}
    false = sum(frozenset(pair) not in joined for pair in sketch), sum(frozenset(pair) not in joined for pair in given)
    sizes = np.bincount(clusters)
    print(f"clusters of ours: {(sizes > 1).sum():,}; pairs of datasketch that were not planted: {false[0]}, {false[1]}")
    print("\nmean error of the estimated similarity, sets of 400:")
    bias()


if __name__ == "__main__":
    main()
