"""Columns of numbers and strings about documents, one file a column and shard, read without loading what is not asked.

A document's position is its place in all shards, one after another: the first of the second shard has the number of
documents in the first one. Files are `.npy` and are never unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from nemotron.data_prep.curation.step import Document, excerpt
from nemotron.data_prep.work.batches import batches
from nemotron.data_prep.work.engines import Engine
from nemotron.data_prep.work.progress import Progress
from nemotron.data_prep.work.shards import Plan, Receipt, Shard, ShardOutput, freeze, run_shards

Work = TypeVar("Work")
Shared = TypeVar("Shared")

BATCH_CHARS = 1 << 18  # of text that are hashed at once: arrays of some 2 MB each
LEAST_MAPPED = 4096  # bytes of a file; an empty array cannot be mapped
MOST_OPEN = 32
"""Files mapped at a time: each is an open file, of which a process may often have 256 only, and shards are many."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What a task says of the columns that it wrote: how long they are."""

    rows: int


def write_columns(
    plan: Plan[Work],
    folder: Path,
    function: Callable[[Shard[Work], Shared, ShardOutput], Rows],
    shared: Shared,
    engine: Engine,
) -> list[Receipt[Rows]]:
    """Do the shards of a plan that writes columns to `folder`, and return their receipts in its order.

    Shows on stderr how far it is, by the number of shards: the settings name the step and its pass.
    """
    freeze(plan, folder)
    total_bytes, count = sum(file.size for file in plan.inputs), len(plan.shards)
    receipts = []
    with Progress(f"{plan.settings['step']}: {plan.settings['pass']}", total_bytes) as progress:
        for i, (receipt, was_done) in enumerate(run_shards(plan, folder, function, shared, engine, Rows)):
            share = total_bytes * (i + 1) // count - total_bytes * i // count
            progress.add(rows=receipt.counts.rows, bytes=share, was_done=was_done)
            receipts.append(receipt)
    return receipts


def text_batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Consecutive documents with some `BATCH_CHARS` characters of text together, at least one."""
    return batches(documents, lambda document: len(document["text"]), BATCH_CHARS)


def save_array(output: ShardOutput, name: str, array: NDArray[Any]) -> None:
    """Write one column of a shard, `NAME.npy`."""
    with output.path(f"{name}.npy").open("wb") as file:
        np.save(file, array, allow_pickle=False)


def save_whole(path: Path, array: NDArray[Any]) -> None:
    """Write an array that the tasks of all shards read, in one step."""
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    with aside.open("wb") as file:
        np.save(file, array, allow_pickle=False)
    aside.replace(path)


def load_array(path: Path) -> NDArray[Any]:
    """A column, mapped into memory: what is not touched is not read."""
    if path.stat().st_size < LEAST_MAPPED:
        return np.asarray(np.load(path, allow_pickle=False))
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


class Names:
    """Collects what every later pass has to know of the documents of a shard: ids, the order, how they begin."""

    def __init__(self) -> None:
        self._ids: list[bytes] = []
        self._heads: list[bytes] = []
        self._ranks: list[bool] = []

    def add(self, document: Document) -> None:
        """Append one document."""
        self._ids.append(document["id"].encode("utf-8", "surrogatepass"))
        self._ranks.append(document.get("split") != "valid")
        self._heads.append(excerpt(document["text"]).encode("utf-8", "surrogatepass"))

    def save(self, output: ShardOutput, shard: str) -> None:
        """Write the columns `ids`, `heads`, `keys` and `ranks` (of duplicates the smallest stays: 0 is held out)."""
        for column, values in (("ids", self._ids), ("heads", self._heads)):
            save_array(output, f"{shard}.{column}", np.frombuffer(b"".join(values), dtype=np.uint8))
            ends = np.cumsum([len(value) for value in values], dtype=np.uint64)
            save_array(output, f"{shard}.{column}_ends", ends)
        save_array(output, f"{shard}.ranks", np.array(self._ranks, dtype=np.uint8))
        keys = [xxhash.xxh3_64_intdigest(value) for value in self._ids]
        save_array(output, f"{shard}.keys", np.array(keys, dtype=np.uint64))


@dataclass(frozen=True)
class Columns:
    """The columns that the tasks of one pass wrote into `folder`. `counts`: documents of each shard, by name."""

    folder: Path
    counts: Mapping[str, int]

    def __reduce__(self) -> tuple[type[Columns], tuple[Path, dict[str, int]]]:
        """To a worker goes where the files are, and not what is in those that this process has mapped."""
        return Columns, (self.folder, dict(self.counts))

    @cached_property
    def shards(self) -> list[str]:
        """Names, in order."""
        return list(self.counts)

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """Position of the first document of each shard, then the number of all."""
        return np.concatenate([[0], np.cumsum(list(self.counts.values()), dtype=np.int64)])

    def __len__(self) -> int:
        """Documents of all shards."""
        return int(self.bounds[-1])

    def column(self, shard: str, name: str) -> NDArray[Any]:
        """One column of one shard."""
        return load_array(self.folder / f"{shard}.{name}.npy")

    def whole(self, name: str, row: int | None = None) -> NDArray[Any]:
        """A column of all shards in memory; `row`: only that row of a column that has the documents in its columns."""
        whole: NDArray[Any] | None = None
        for number, shard in enumerate(self.shards):
            part = self.column(shard, name)
            part = part if row is None else part[row]
            if whole is None:
                whole = np.empty((len(self), *part.shape[1:]), dtype=part.dtype)
            whole[self.bounds[number] : self.bounds[number + 1]] = part
        assert whole is not None  # there is a shard
        return whole

    def gather(self, name: str, positions: NDArray[np.int64]) -> NDArray[Any]:
        """A column's values (or rows) for some documents, in the order of `positions`."""
        shard_of = np.searchsorted(self.bounds, positions, side="right") - 1
        order = np.argsort(shard_of, kind="stable")
        numbers, firsts = np.unique(shard_of[order], return_index=True)
        result: NDArray[Any] | None = None
        for number, places in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=False):
            values = self._mapped(self.shards[number], name)[positions[places] - self.bounds[number]]
            if result is None:
                result = np.empty((len(positions), *values.shape[1:]), dtype=values.dtype)
            result[places] = values
        if result is None:
            return self._mapped(self.shards[0], name)[:0]
        return result

    @cached_property
    def _open(self) -> dict[tuple[str, str], NDArray[Any]]:
        return {}

    def _mapped(self, shard: str, name: str) -> NDArray[Any]:
        if (shard, name) not in self._open:
            if len(self._open) >= MOST_OPEN:
                self._open.clear()
            self._open[shard, name] = self.column(shard, name)
        return self._open[shard, name]

    def text(self, name: str, position: int) -> str:
        """A string of one document: column `ids` or `heads`."""
        number = int(np.searchsorted(self.bounds, position, side="right")) - 1
        shard, row = self.shards[number], int(position - self.bounds[number])
        ends = self._mapped(shard, f"{name}_ends")
        begin = int(ends[row - 1]) if row else 0
        return self._mapped(shard, name)[begin : int(ends[row])].tobytes().decode("utf-8", "surrogatepass")
