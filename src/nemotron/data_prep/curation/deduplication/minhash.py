"""Fuzzy deduplication: MinHash signatures, locality-sensitive hashing, one document of every cluster stays.

Shingles of a document are hashed, and of each of k random permutations of the hashes the smallest value is kept: the
share of equal values in two signatures is an unbiased estimate of the Jaccard similarity of the two sets of shingles
(Broder 1997, doi 10.1109/SEQUEN.1997.666900). A signature is cut into bands of rows; documents with an equal band are
compared (Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, 3.4), and are near duplicates if their estimate
reaches `min_estimate`. Near duplicates of near duplicates form one cluster, of which the longest text stays (a held-out
one, `split: valid`, before all others), of several such that with the smallest 64-bit hash of its id.

Signatures come from rensa's RMinHash over hashes made here, all documents of a batch in one call. Rensa's faster Rho
variant is not used: its estimate is biased (a similarity of 0.70 was estimated at 0.86 on sets of 400).

Passes: tasks write signatures and band hashes, the driver sorts one band after the other, tasks write what stays. Time
is near linear: a sort a band; a document is compared with at most `ANCHORS` of those that share a band with it. The
driver's memory grows by some 55 bytes a document, besides pages of signatures (4 bytes a permutation) that the system
maps and can take back.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash

from nemo_runspec.words import counted
from nemotron.data_prep.curation.deduplication.columns import (
    Columns,
    Names,
    Rows,
    save_array,
    text_batches,
    write_columns,
)
from nemotron.data_prep.curation.deduplication.exact import check_ids
from nemotron.data_prep.curation.deduplication.removal import first_of_groups, remove_duplicates
from nemotron.data_prep.curation.deduplication.text_hashes import (
    I64,
    U64,
    code_points,
    find_words,
    mix,
    mix_points,
    span_hashes,
    window_hashes,
)
from nemotron.data_prep.curation.step import DocumentShard, StepTable, plan_step, read_documents
from nemotron.data_prep.work.engines import Engine
from nemotron.data_prep.work.shards import ShardOutput
from nemotron.kit.schemas.curation import MinHashSettings

REASON = "near duplicate"
ANCHORS = 32
"""Every document is compared with the first so many of its bucket, by the hash of the id: all pairs in buckets of up to
33, and a number that grows linearly in those of boilerplate."""
_RAYON_THREADS = "RAYON_NUM_THREADS"
_PAIRS = 1 << 16  # compared at once: 2 x 260 x 4 bytes each


# --- Probabilities ----------------------------------------------------------------------------------------------------


def candidate_probability(similarity: float, settings: MinHashSettings) -> float:
    """Probability that two documents share a band: 1 - (1 - s^rows)^bands."""
    return 1.0 - (1.0 - similarity**settings.rows_per_band) ** settings.num_bands


def threshold(settings: MinHashSettings) -> float:
    """Similarity near which the S-curve is steepest: (1 / bands)^(1 / rows)."""
    return float((1.0 / settings.num_bands) ** (1.0 / settings.rows_per_band))


def found_probability(similarity: float, settings: MinHashSettings) -> float:
    """Probability that two documents share a band and that their estimate reaches `min_estimate`.

    Of k independent rows, m are equal with a binomial probability; of the C(k, m) ways to place them, those without a
    full band are counted by inclusion and exclusion over the bands.
    """
    bands, rows, k = settings.num_bands, settings.rows_per_band, settings.num_permutations
    total = 0.0
    for m in range(max(rows, _least_equal(settings)), k + 1):
        ways = math.comb(k, m) - sum(
            (-1) ** j * math.comb(bands, j) * math.comb(k - j * rows, m - j * rows) for j in range(m // rows + 1)
        )
        total += ways * similarity**m * (1.0 - similarity) ** (k - m)
    return min(1.0, total)


def _least_equal(settings: MinHashSettings) -> int:
    """Equal rows that an estimate of `min_estimate` takes."""
    return math.ceil(settings.min_estimate * settings.num_permutations - 1e-9)


def s_curve(settings: MinHashSettings) -> list[dict[str, float]]:
    """Both probabilities at several similarities."""
    return [
        {
            "similarity": s,
            "candidate": round(candidate_probability(s, settings), 6),
            "found": round(found_probability(s, settings), 6),
        }
        for s in (0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
    ]


def describe(settings: MinHashSettings) -> str:
    """The S-curve for people."""
    bands, rows, k = settings.num_bands, settings.rows_per_band, settings.num_permutations
    shape = f"{settings.shingle_size}-grams of {settings.unit}, {bands} bands x {rows} rows = {k} permutations"
    lines = [
        f"MinHash: {shape}; the curve is steepest near {threshold(settings):.3f}",
        f"{'similarity':>10}  {'shares a band':>13}  {f'and estimated >= {settings.min_estimate:g}':>20}",
    ]
    for point in s_curve(settings):
        lines.append(f"{point['similarity']:>10.2f}  {point['candidate']:>13.4f}  {point['found']:>20.4f}")
    return "\n".join(lines)


# --- Signatures -------------------------------------------------------------------------------------------------------


def shingle_hashes(texts: Sequence[str], settings: MinHashSettings) -> tuple[U64, I64]:
    """Hashes of the shingles of some texts one after another, and where those of each text begin (and the last end).

    Characters: of the lower-cased text with one space for every run of whitespace. Words: the lower-cased matches of
    `\\w+`; all else does not count. A text with fewer than `shingle_size` of them is one shingle, the whole; one
    without any word is that of its characters, for two of them need not be alike.
    """
    size = settings.shingle_size
    if settings.unit == "characters":
        points, bounds = code_points([" ".join(text.lower().split()) for text in texts])
        values = mix_points(points)
    else:
        points, bounds = code_points([text.lower() for text in texts])
        starts, ends = find_words(points, bounds)
        characters, places_of_texts = mix_points(points), bounds
        values = span_hashes(characters, starts, ends)
        bounds = np.searchsorted(starts, bounds)
    # Windows that do not cross from one text into the next; the place of a short text is taken by its whole.
    counts = np.maximum(np.diff(bounds) - size + 1, 1)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    short = np.flatnonzero(np.diff(bounds) < size)
    places = np.arange(offsets[-1]) + np.repeat(bounds[:-1] - offsets[:-1], counts)
    windows = window_hashes(values, size)
    hashes = windows[np.minimum(places, len(windows) - 1)] if len(windows) else np.zeros(len(places), dtype=np.uint64)
    if len(short):
        hashes[offsets[short]] = span_hashes(values, bounds[short], bounds[short + 1])
    if settings.unit == "words" and len(bare := np.flatnonzero(np.diff(bounds) == 0)):
        hashes[offsets[bare]] = span_hashes(characters, places_of_texts[bare], places_of_texts[bare + 1])
    return hashes, offsets


def signatures(texts: Sequence[str], settings: MinHashSettings) -> NDArray[np.uint32]:
    """MinHash signatures, (texts, permutations)."""
    if not texts:
        return np.empty((0, settings.num_permutations), dtype=np.uint32)
    _use_one_thread()
    hashes, offsets = shingle_hashes(texts, settings)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(
        hashes, offsets.astype(np.uint64), settings.num_permutations, settings.seed
    )
    return np.array(matrix.to_rows(), dtype=np.uint32)


@cache
def _use_one_thread() -> None:
    """Have rensa start its thread pool with one thread, which is none: the caller's.

    There is a worker for every CPU already, and a forked one would wait for ever for the threads of its parent's pool.
    The variable is set for the first call only, since other libraries read it, too.
    """
    before = os.environ.get(_RAYON_THREADS)
    os.environ[_RAYON_THREADS] = "1"
    enough = 1024  # sets; for fewer it would not look for its threads yet
    sets = np.arange(enough + 1, dtype=np.uint64)
    RMinHash.digest_matrix_from_flat_token_hashes(sets[:-1], sets, 8, 0)
    if before is None:
        del os.environ[_RAYON_THREADS]
    else:
        os.environ[_RAYON_THREADS] = before


def band_hashes(rows: NDArray[np.uint32], settings: MinHashSettings) -> U64:
    """A 64-bit hash of every band of every signature, (bands, documents)."""
    bands = rows.reshape(len(rows), settings.num_bands, settings.rows_per_band)
    hashes = np.zeros((settings.num_bands, len(rows)), dtype=np.uint64)
    for row in range(settings.rows_per_band):
        hashes = mix(hashes + bands[:, :, row].T.astype(np.uint64) + np.uint64(1))
    return hashes


# --- Clusters ---------------------------------------------------------------------------------------------------------


class Clusters:
    """Union-find over documents, many unions at once. `parent` of a document is never a later one."""

    def __init__(self, count: int) -> None:
        self.parent = np.arange(count, dtype=np.int64)

    def roots(self, members: I64) -> I64:
        """The cluster of each of some documents, as its first document."""
        roots = self.parent[members]
        while not np.array_equal(above := self.parent[roots], roots):
            roots = above
        self.parent[members] = roots
        return roots

    def union(self, ones: I64, others: I64) -> None:
        """Join the clusters of each pair."""
        while len(ones):
            ones, others = self.roots(ones), self.roots(others)
            apart = ones != others
            ones, others = ones[apart], others[apart]
            # Of several pairs that would move one root, the smallest wins; the others come again.
            np.minimum.at(self.parent, np.maximum(ones, others), np.minimum(ones, others))


@dataclass(frozen=True, slots=True)
class Comparisons:
    """What finding clusters took. Pairs that were in one cluster already are not compared again. `skipped`: pairs that
    were not compared in a bucket since both lie beyond its first ANCHORS; many of them met elsewhere."""

    compared: int
    near: int
    skipped: int


def find_clusters(
    bands: Iterable[U64], keys: Callable[[I64], U64], estimate: Callable[[I64, I64], Any] | None, min_estimate: float
) -> tuple[Clusters, Comparisons]:
    """Clusters of documents that share a band and, if there is an `estimate`, reach `min_estimate` by it.

    Args:
        bands: of each band, the hashes of all documents.
        keys: the order in which the documents of a bucket serve as anchors, smallest first.
        estimate: similarity of each of some pairs; None: sharing a band is enough.
    """
    clusters: Clusters | None = None
    compared = near = skipped = 0
    for hashes in bands:
        clusters = clusters or Clusters(len(hashes))
        members, begins, sizes = _buckets(hashes, keys)
        for anchor in range(ANCHORS if estimate else 1):
            large = sizes > anchor + 1
            begins, sizes = begins[large], sizes[large]
            if not len(begins):
                break
            # Every member after the anchor, beside the anchor.
            counts = sizes - anchor - 1
            offsets = np.cumsum(counts) - counts
            places = np.arange(counts.sum()) + np.repeat(begins + anchor + 1 - offsets, counts)
            ones, others = np.repeat(members[begins + anchor], counts), members[places]
            apart = clusters.roots(ones) != clusters.roots(others)
            ones, others = ones[apart], others[apart]
            if estimate:
                compared += len(ones)
                keep = [
                    estimate(ones[at : at + _PAIRS], others[at : at + _PAIRS]) >= min_estimate
                    for at in range(0, len(ones), _PAIRS)
                ]
                are_near = np.concatenate(keep) if keep else np.empty(0, dtype=np.bool_)
                ones, others = ones[are_near], others[are_near]
            near += len(ones)
            clusters.union(ones, others)
        rest = sizes[sizes > ANCHORS + 1] - ANCHORS
        skipped += int((rest * (rest - 1) // 2).sum()) if estimate else 0
    clusters = clusters or Clusters(0)
    clusters.parent = clusters.roots(np.arange(len(clusters.parent)))
    return clusters, Comparisons(compared, near, skipped)


def _buckets(hashes: U64, keys: Callable[[I64], U64]) -> tuple[I64, I64, I64]:
    """Documents with equal hashes: (members bucket after bucket, where each bucket begins, how many it has)."""
    order = np.argsort(hashes)
    ordered = hashes[order]
    equal = ordered[1:] == ordered[:-1]
    shared = np.zeros(len(order), dtype=np.bool_)
    shared[1:] |= equal
    shared[:-1] |= equal
    members, ordered = order[shared], ordered[shared]
    members = members[np.lexsort((keys(members), ordered))]
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(members) else members
    return members, begins, np.diff(np.append(begins, len(members)))


# --- The step ---------------------------------------------------------------------------------------------------------


def deduplicate(
    files: Sequence[Path], settings: MinHashSettings, work_dir: Path, engine: Engine
) -> tuple[StepTable, dict[str, Any]]:
    """Write the documents of `files` without near duplicates to `work_dir`.

    Returns the table of what went, and how clusters were found: pairs compared, clusters by size.

    Raises:
        RunFailed: two documents of a cluster have the same id.
        UserError: a file is no document shard, or has changed since the run began.
    """
    about = {"step": "fuzzy_dedup", **settings.model_dump(), "rensa": RMinHash.ALGORITHM_VERSION}
    folder = work_dir / "signatures"
    plan = plan_step(files, {**about, "pass": "signatures"})
    receipts = write_columns(plan, folder, _sign, settings, engine)
    columns = Columns(folder, {receipt.shard: receipt.counts.rows for receipt in receipts})

    def estimate(ones: I64, others: I64) -> Any:
        return (columns.gather("signatures", ones) == columns.gather("signatures", others)).mean(axis=1)

    bands = (columns.whole("bands", band) for band in range(settings.num_bands))
    keys = columns.whole("keys")
    clusters, comparisons = find_clusters(
        bands,
        lambda members: keys[members],
        estimate if settings.min_estimate else None,
        _least_equal(settings) / settings.num_permutations,
    )
    losers, keepers, sizes = _choose(clusters, columns, keys)
    report = {"comparisons": asdict(comparisons), "clusters": sizes, "s_curve": s_curve(settings)}
    return remove_duplicates(files, about, work_dir, columns, losers, keepers, REASON, engine), report


def found_text(report: Mapping[str, Any]) -> str:
    """The clusters and comparisons of `deduplicate` for people, one line."""
    clusters = report["clusters"].items()
    sizes = ", ".join(f"{counted(count, 'cluster')} of {counted(int(size), 'document')}" for size, count in clusters)
    pairs = report["comparisons"]
    skipped = f", {pairs['skipped']:,} not compared" if pairs["skipped"] else ""
    return f"{sizes or 'no clusters'}; {counted(pairs['compared'], 'pair')} compared, {pairs['near']:,} near{skipped}"


def _sign(shard: DocumentShard, settings: MinHashSettings, output: ShardOutput) -> Rows:
    names = Names()
    rows: list[NDArray[np.uint32]] = [signatures([], settings)]
    lengths: list[int] = []
    for batch in text_batches(read_documents(shard.work)):
        texts = [document["text"] for document in batch]
        rows.append(signatures(texts, settings))
        lengths.extend(map(len, texts))
        for document in batch:
            names.add(document)
    names.save(output, shard.name)
    signed = np.concatenate(rows)
    save_array(output, f"{shard.name}.signatures", signed)
    save_array(output, f"{shard.name}.bands", band_hashes(signed, settings))
    save_array(output, f"{shard.name}.lengths", np.array(lengths, dtype=np.int64))
    return Rows(len(signed))


def _choose(clusters: Clusters, columns: Columns, keys: U64) -> tuple[I64, I64, dict[str, int]]:
    """(documents that go, for each the one that stays, clusters by size)."""
    sizes = np.bincount(clusters.parent, minlength=len(clusters.parent))
    members = np.flatnonzero(sizes[clusters.parent] > 1)
    lengths = columns.gather("lengths", members)
    ranks = columns.gather("ranks", members)
    order, firsts = first_of_groups(clusters.parent[members], ranks, -lengths, keys[members])
    goes = order != firsts
    same = goes & (keys[members[order]] == keys[members[firsts]])
    if same.any():
        check_ids(columns, int(members[order[same][0]]), int(members[firsts[same][0]]))
    of_size = np.bincount(sizes[sizes > 1])
    return (
        members[order[goes]],
        members[firsts[goes]],
        {str(size): int(count) for size, count in enumerate(of_size) if count},
    )
