"""The two-pass steps: how shards are cut, and by whom they are done, changes nothing; and the rules hold over all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from nemotron.data_prep.curation import decontamination, quality
from nemotron.data_prep.curation.decontamination import hits, protect
from nemotron.data_prep.curation.quality import bucket_thresholds, train
from nemotron.data_prep.curation.step import (
    StepTable,
    collect,
    plan_step,
)
from nemotron.data_prep.work.engines import Engine, PoolEngine, SerialEngine
from nemotron.kit.schemas.curation import TrainSettings

from .shards import read_all, write_shards

SECRET = " ".join(f"secret{i}" for i in range(15))
LICENCE = " ".join(f"licence{i}" for i in range(15))


def texts(count: int) -> list[str]:
    """Every 20th text holds the secret, every 3rd the licence."""
    draw = Random(0)
    found = []
    for i in range(count):
        words = [f"w{draw.randrange(500)}" for _ in range(draw.randrange(5, 60))]
        extra = [SECRET.upper()] * (i % 20 == 0) + [LICENCE] * (i % 3 == 0)
        found.append(" ".join([*words, *extra, *words[:3]]))
    return found


def shards(folder: Path, some: list[str], count: int) -> list[Path]:
    return write_shards(folder, [{"id": f"d{i:03}", "text": text} for i, text in enumerate(some)], count)


def decontaminate(folder: Path, files: list[Path], engine: Engine) -> tuple[set[str], StepTable]:
    protected = protect([SECRET, LICENCE])
    plan = plan_step(files, {})
    grams = decontamination.save_grams(protected, folder / "hits" / "grams")
    looked = collect(plan, folder / "hits", decontamination.hit_shard, grams, engine)
    assert looked.read.documents == 100
    leaks = decontamination.leaks_of(plan, folder / "hits", protected)
    table = collect(plan, folder / "work", decontamination.drop_shard, leaks, engine)
    return set(read_all(folder / "work")), table


@pytest.mark.parametrize("engine", [SerialEngine, lambda: PoolEngine(2)])
def test_decontamination_in_shards_is_that_of_one_pass(tmp_path: Path, engine: Callable[[], Engine]) -> None:
    some = texts(100)
    found = [set(hits(text, protect([SECRET, LICENCE])).tolist()) for text in some]
    documents_with = Counter(gram for hit in found for gram in hit)
    expected = {f"d{i:03}" for i, hit in enumerate(found) if all(documents_with[gram] > 10 for gram in hit)}
    assert len(expected) == 95  # five hold the secret; the licence, in 34, is boilerplate
    for count in (1, 7):
        with engine() as running:
            kept, table = decontaminate(tmp_path / str(count), shards(tmp_path / f"in{count}", some, count), running)
        assert kept == expected
        assert table.dropped[decontamination.REASON].documents == 5
        [detail] = {sample["detail"] for sample in table.samples[decontamination.REASON]}
        assert detail == " ".join(SECRET.split()[:13])
        assert table.noted["only boilerplate in common"].documents == 34 - 2


def test_thresholds_of_more_documents_than_fit_are_those_of_every_nth(tmp_path: Path) -> None:
    some = texts(100)
    ensemble = train(some[:60], ["licence0" in text for text in some[:60]], TrainSettings(hash_bits=10, num_trees=5))
    plan = plan_step(shards(tmp_path / "in", some, 7), {})
    collect(plan, tmp_path / "scores", quality.score_shard, ensemble, SerialEngine())
    tables = [quality.read_scores(tmp_path / "scores", shard.name) for shard in plan.shards]
    scores, sizes = np.concatenate([table for table, _ in tables]), np.concatenate([size for _, size in tables])
    for max_scores, step in ((100, 1), (99, 2), (30, 4), (1, 100)):
        found = quality.thresholds_of(plan, tmp_path / "scores", max_scores)
        assert found == [bucket_thresholds(column[::step], sizes[::step]) for column in scores.T]


def test_buckets_do_not_depend_on_how_shards_were_cut(tmp_path: Path) -> None:
    some = texts(100)
    ensemble = train(some[:60], ["licence0" in text for text in some[:60]], TrainSettings(hash_bits=10, num_trees=5))
    labels = {"low": 0, "high": 10}
    results: list[dict[str, Any]] = []
    for count in (1, 7):
        files = shards(tmp_path / f"in{count}", some, count)
        plan, folder = plan_step(files, {}), tmp_path / str(count)
        collect(plan, folder / "scores", quality.score_shard, ensemble, SerialEngine())
        thresholds = quality.thresholds_of(plan, folder / "scores")
        buckets = quality.Buckets(thresholds, labels, 3, folder / "scores")
        table = collect(plan, folder / "work", quality.label_shard, buckets, SerialEngine())
        documents = read_all(folder / "work")
        assert table.kept.documents == 100 - table.dropped["below bucket 3"].documents == len(documents)
        results.append(documents)
    assert results[0] == results[1]
    assert all(
        document["quality"] == ("high" if document["bucket"] >= 10 else "low") for document in documents.values()
    )
    assert min(document["bucket"] for document in documents.values()) >= 3
