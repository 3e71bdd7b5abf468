"""The tasks of the quality step: score every document of a shard; then, buckets known, label and drop.

Scores come first and for all shards: where the buckets begin depends on all of them. They lie beside the plan of the
first pass as `scores/SHARD.safetensors` (`scores` float64 [document, classifier], `bytes` int64 [document]).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nemotron.data_prep.curation.quality import (
    CLASSIFIERS,
    Ensemble,
    bucket_thresholds,
    ensemble_bucket,
    label_of,
    to_buckets,
)
from nemotron.data_prep.curation.step import Document, DocumentWriter, StepTable, output_name, read_documents
from nemotron.data_prep.work.shards import Plan, Shard, ShardOutput

_BATCH = 256  # documents scored at a time
# Scores that the thresholds are taken from: of more documents, every second one, every third one, ... evenly over the
# corpus. With two million, the standard error of the share below a threshold is at most 0.04 %.
_MAX_SCORES = 4_000_000


@dataclass(frozen=True, slots=True)
class Buckets:
    """How scores become labels. `thresholds`: 19 of each classifier. `labels`: label -> its lowest bucket.

    Documents below `min_bucket` are dropped. `folder`: where the first pass wrote.
    """

    thresholds: Sequence[Sequence[float]]
    labels: Mapping[str, int]
    min_bucket: int
    folder: Path


def score_shard(shard: Shard, ensemble: Ensemble, output: ShardOutput) -> dict[str, Any]:
    """A task of the first pass: the scores of a shard's documents, in order."""
    from safetensors.numpy import save_file

    scores, sizes = [], []
    table = StepTable()
    documents = read_documents(Path(shard.work["path"]))
    while some := list(islice(documents, _BATCH)):
        for document in some:
            table.read.add(document)
            sizes.append(len(document["text"].encode("utf-8", "surrogatepass")))
        scores.append(ensemble.scores([document["text"] for document in some]))
    found = np.concatenate(scores) if scores else np.empty((0, len(CLASSIFIERS)))
    save_file({"scores": found, "bytes": np.array(sizes, dtype=np.int64)}, output.path(_scores_name(shard.name)))
    return {"table": table.to_json()}


def label_shard(shard: Shard, buckets: Buckets, output: ShardOutput) -> dict[str, Any]:
    """A task of the second pass: documents with `bucket`, `quality` and `quality_scores`, the worst dropped."""
    scores, _ = read_scores(buckets.folder, shard.name)
    of_classifiers = to_buckets(scores, buckets.thresholds)
    table = StepTable()
    with DocumentWriter(output.path(output_name(shard))) as writer:
        documents = read_documents(Path(shard.work["path"]))
        for document, bucket, score in zip(documents, ensemble_bucket(of_classifiers), scores, strict=True):
            table.read.add(document)
            label = label_of(int(bucket), buckets.labels)
            if bucket < buckets.min_bucket:
                table.drop(document, f"below bucket {buckets.min_bucket}", f"bucket {bucket}")
                continue
            labelled = document | {
                "quality": label,
                "bucket": int(bucket),
                "quality_scores": {
                    name: round(float(value), 4) for name, value in zip(CLASSIFIERS, score, strict=True)
                },
            }
            table.keep(labelled, [f"quality {label}"])
            writer.write(labelled)
    return {"table": table.to_json()}


def thresholds_of(plan: Plan, folder: Path, max_scores: int = _MAX_SCORES) -> list[list[float]]:
    """Of each classifier, where its buckets begin, from the scores of all shards.

    Args:
        max_scores: documents whose scores are held in memory at most, 24 bytes each; of more, so many are taken evenly.
    """
    step = max(1, -(-sum(len(read_scores(folder, shard.name)[1]) for shard in plan.shards) // max_scores))
    tables, sizes, before = [], [], 0
    for shard in plan.shards:
        scores, weights = read_scores(folder, shard.name)
        taken = slice(-before % step, None, step)
        tables.append(scores[taken].copy())  # lest the rest of the array stay, too
        sizes.append(weights[taken].copy())
        before += len(weights)
    scores, weights = np.concatenate(tables), np.concatenate(sizes)
    return [bucket_thresholds(scores[:, column], weights) for column in range(len(CLASSIFIERS))]


def read_scores(folder: Path, shard: str) -> tuple[np.ndarray, np.ndarray]:
    """Scores [document, classifier] and bytes [document] that the first pass wrote."""
    from safetensors.numpy import load_file

    arrays = load_file(folder / _scores_name(shard))
    return arrays["scores"], arrays["bytes"]


def scored_documents(plan: Plan, folder: Path) -> Iterator[tuple[Document, np.ndarray]]:
    """Every document that was scored, with the scores of the classifiers."""
    for shard in plan.shards:
        scores, _ = read_scores(folder, shard.name)
        yield from zip(read_documents(Path(shard.work["path"])), scores, strict=True)


def _scores_name(shard: str) -> str:
    return f"scores/{shard}.safetensors"
