"""The bytes a document or token that the docstrings state, by tracemalloc, which counts numpy's arrays."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nemotron.data_prep.curation.deduplication import exact, minhash, substring
from nemotron.data_prep.curation.deduplication.columns import Columns
from nemotron.data_prep.curation.step import write_documents
from nemotron.data_prep.work.shards import Shard, ShardOutput

RANDOM = np.random.default_rng(0)


def peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    work()
    bytes_at_most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return bytes_at_most


@pytest.mark.parametrize(("twins", "bytes_a_document"), [(0.0, 18), (0.2, 26)])
def test_exact(tmp_path: Path, twins: float, bytes_a_document: int) -> None:
    documents, shards = 300_000, 4
    share = documents // shards
    for shard in range(shards):
        high = RANDOM.integers(0, 2**64, share, dtype=np.uint64)
        high[: int(share * twins)] = 7 * np.arange(int(share * twins), dtype=np.uint64)  # the same in every shard
        keys, ranks = RANDOM.integers(0, 2**64, share, dtype=np.uint64), np.ones(share, dtype=np.uint8)
        columns = {"high": high, "low": high, "keys": keys, "ranks": ranks}
        for name, column in columns.items():
            np.save(tmp_path / f"s{shard}.{name}.npy", column)
    all_columns = Columns(tmp_path, {f"s{shard}": share for shard in range(shards)})
    assert peak(lambda: exact.find_duplicates(all_columns)) < bytes_a_document * documents
    losers, keepers = exact.find_duplicates(all_columns)
    assert len(losers) == len(keepers) == (shards - 1) * int(share * twins)


def test_clusters() -> None:
    documents = 300_000
    keys = RANDOM.integers(0, 2**64, documents, dtype=np.uint64)

    def bands():  # type: ignore[no-untyped-def]
        for seed in range(3):
            hashes = np.random.default_rng(seed).integers(0, 2**64, documents, dtype=np.uint64)
            hashes[: documents // 5] = np.arange(documents // 5) // 2
            yield hashes

    def work() -> None:
        minhash.find_clusters(bands(), lambda members: keys[members], lambda ones, others: np.ones(len(ones)), 0.5)

    assert peak(work) < 47 * documents  # and 8 for the keys


@pytest.mark.parametrize(("repeated", "bytes_a_window"), [(0, 37), (250, 37 + 130 // 2)])
def test_substring(tmp_path: Path, repeated: int, bytes_a_window: int) -> None:
    words = [f"w{i}" for i in range(30_000)]
    common = " ".join(words[:repeated])
    documents = [
        {"id": f"d{i}", "text": f"{common} {' '.join(words[j] for j in RANDOM.integers(0, 30_000, 500 - repeated))}"}
        for i in range(600)
    ]
    tokens = 500 * len(documents)
    write_documents(tmp_path / "x.jsonl.zst", documents)
    folders = [tmp_path / name for name in ("index", "matches", "parts")]
    for folder in folders:
        folder.mkdir()
    shard, index = Shard("x", tmp_path / "x.jsonl.zst"), ShardOutput(folders[0], folders[2])
    substring._index(shard, 50, index)  # so that the tables are made
    assert peak(lambda: substring._index(shard, 50, index)) < 70 * tokens
    assert sum(file.bytes for file in index.commit().values()) < 36 * tokens
    columns = Columns(folders[0], {"x": len(documents)})
    matches = ShardOutput(folders[1], folders[2])
    assert (
        peak(lambda: substring._match(Shard("range", substring.HashRange(0, 1)), columns, matches))
        < bytes_a_window * tokens
    )
