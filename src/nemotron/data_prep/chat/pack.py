"""Sequences in a spool -> packed rows: which of them, in which row, from their lengths alone; then the rows, by shards.

In memory are the lengths of all sequences (29 bytes each), and of their tokens one row group a task; they are read out
of the spool (`chat_spool`) by memory map. What is written depends on plan and settings only, not on who wrote it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nemo_runspec.errors import UserError
from nemotron.data_prep.chat.bin_packing import Algorithm, Bins, pack_lengths
from nemotron.data_prep.chat.encoding import PACKED_SCHEMA
from nemotron.data_prep.chat.spool import SPLITS, ChatWork
from nemotron.data_prep.work.engines import Engine
from nemotron.data_prep.work.progress import Progress
from nemotron.data_prep.work.shards import Plan, Shard, ShardOutput, freeze, publish_file, run_shards

_ROW_GROUP_TOKENS = 4 * 2**20
_GOLDEN = 0x9E3779B97F4A7C15


# --- Which sequences: lengths alone -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sequences:
    """What lies in the spool: arrays over all sequences [N], in the plan's order.

    `shard`: index in the plan; `begin`: first token in that shard's files; `source`: index among the settings' sources.
    """

    shard: NDArray[np.int32]
    begin: NDArray[np.int64]
    length: NDArray[np.int32]
    order: NDArray[np.uint64]
    split: NDArray[np.uint8]
    source: NDArray[np.int32]


def read_sequences(folder: Path, plan: Plan[ChatWork], source_names: Sequence[str]) -> Sequences:
    """The tables of all shards of a spool."""
    columns: dict[str, list[NDArray[Any]]] = {
        name: [] for name in ("shard", "begin", "length", "order", "split", "source")
    }
    for number, shard in enumerate(plan.shards):
        lengths = np.load(folder / f"{shard.name}.lengths.npy", allow_pickle=False)
        columns["length"].append(lengths)
        columns["begin"].append(np.cumsum(lengths, dtype=np.int64) - lengths)
        columns["order"].append(np.load(folder / f"{shard.name}.order.npy", allow_pickle=False))
        columns["split"].append(np.load(folder / f"{shard.name}.split.npy", allow_pickle=False))
        columns["shard"].append(np.full(len(lengths), number, np.int32))
        columns["source"].append(np.full(len(lengths), source_names.index(shard.work.source), np.int32))
    empty = {"begin": np.int64, "order": np.uint64, "split": np.uint8}
    joined = {
        name: np.concatenate([*arrays, np.empty(0, empty.get(name, np.int32))]) for name, arrays in columns.items()
    }
    return Sequences(
        joined["shard"], joined["begin"], joined["length"], joined["order"], joined["split"], joined["source"]
    )


@dataclass(frozen=True, slots=True)
class Chosen:
    """Sequences of each split (indices [n], in the order of packing), the sources' shares, repeats left out."""

    splits: dict[str, NDArray[np.int64]]
    shares: list[Share]
    duplicates: int


@dataclass(frozen=True, slots=True)
class Share:
    """A source's part in the training rows: asked for, and what it became.

    `epochs`: tokens used / tokens there are. `requested` and `realised`: shares of all training tokens.
    """

    source: str
    sequences: int
    tokens: int
    epochs: float
    requested: float
    realised: float


def choose(
    sequences: Sequences,
    names: Sequence[str],
    *,
    weights: Mapping[str, float] | None,
    repeats: Mapping[str, float | None],
    num_tokens: int | None,
) -> Chosen:
    """The sequences of each split, in seeded order; those to train on in the proportions that are wanted.

    Without `weights` every source is used `repeats` times (None: once). With them the tokens of the sources are in that
    proportion, `num_tokens` in all; None: the most for which no source is used more than `repeats` times (None: once).
    A part of an epoch are the first sequences in the seeded order. A sequence that is equal to an earlier one is left
    out, and out of the training rows also one that is equal to a held-out one.

    UserError: a source with a weight has no sequence, or is needed more often than it may be.
    """
    # Of equal ones the first, and of those one that is held out.
    by_order = np.lexsort((np.arange(len(sequences.order)), sequences.split == 0, sequences.order))
    ordered = sequences.order[by_order]
    first = np.ones(len(ordered), np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    by_order = by_order[first]
    splits = {name: by_order[sequences.split[by_order] == code] for code, name in enumerate(SPLITS)}
    training = splits["train"]
    source_of = sequences.source[training]
    available = np.bincount(source_of, sequences.length[training], minlength=len(names)).astype(np.int64)
    epochs = _epochs(dict(zip(names, available.tolist(), strict=True)), weights, repeats, num_tokens)

    chosen, keys = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    for number, name in enumerate(names):
        mine = training[source_of == number]
        whole, part = divmod(epochs[name], 1.0)
        for epoch in range(int(whole) + 1):
            taken = mine if epoch < whole else mine[: _up_to(sequences.length[mine], part)]
            chosen.append(taken)
            # Another order in every epoch, so that a sequence and its repetition do not lie side by side.
            keys.append(sequences.order[taken] ^ np.uint64(epoch * _GOLDEN % 2**64))
    train = np.concatenate(chosen)
    splits["train"] = train = train[np.argsort(np.concatenate(keys), kind="stable")]

    used = np.bincount(sequences.source[train], sequences.length[train], minlength=len(names)).astype(np.int64)
    counts = np.bincount(sequences.source[train], minlength=len(names))
    requested = [epochs[name] * int(total) for name, total in zip(names, available, strict=True)]
    all_used, all_requested = max(int(used.sum()), 1), max(sum(requested), 1.0)
    shares = [
        Share(
            source=name,
            sequences=int(counts[i]),
            tokens=int(used[i]),
            epochs=round(int(used[i]) / max(int(available[i]), 1), 4),
            requested=round(requested[i] / all_requested, 6),
            realised=round(int(used[i]) / all_used, 6),
        )
        for i, name in enumerate(names)
    ]
    return Chosen(splits, shares, len(first) - int(first.sum()))


def _up_to(lengths: NDArray[np.int32], part: float) -> int:
    """How many of the first sequences hold `part` of all tokens, as nearly as whole sequences allow."""
    reached = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return int(np.argmin(np.abs(reached - part * reached[-1])))


def _epochs(
    tokens: Mapping[str, int],
    weights: Mapping[str, float] | None,
    repeats: Mapping[str, float | None],
    num_tokens: int | None,
) -> dict[str, float]:
    """How often each source is used."""
    if weights is None:
        return {name: 1.0 if repeats.get(name) is None else float(repeats[name] or 0) for name in tokens}
    total_weight = sum(weights.values())
    shares = {name: weights.get(name, 0.0) / total_weight for name in tokens}
    for name, share in shares.items():
        if share and not tokens[name]:
            raise UserError(f"source {name!r} has weight {weights[name]:g} and no sequence to train on")
    if num_tokens is None:
        total = min(
            tokens[name] * (1.0 if repeats.get(name) is None else float(repeats[name] or 0)) / share
            for name, share in shares.items()
            if share
        )
    else:
        total = float(num_tokens)
    epochs = {name: total * share / tokens[name] if share else 0.0 for name, share in shares.items()}
    for name, needed in epochs.items():
        most = repeats.get(name)
        if most is not None and needed > most * (1 + 1e-9):
            raise UserError(
                f"source {name!r} has {tokens[name]} tokens, and its weight needs {needed:.2f} epochs of them",
                f"repeats allows {most:g}: raise it, or make num_tokens or the weight smaller",
            )
    return epochs


# --- 3. Rows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowsJob:
    """What the tasks that write rows share: where the spool is, the names of its shards, where the packing is."""

    spool: Path
    shards: tuple[str, ...]
    packing: Path


@dataclass(frozen=True, slots=True)
class RowsWork:
    """What a task writes: rows [begin, end) of a split into `file`."""

    split: str
    file: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class RowsCounts:
    """What a task wrote. `trained_tokens`: those that the mask has."""

    rows: int = 0
    sequences: int = 0
    tokens: int = 0
    trained_tokens: int = 0

    def __add__(self, other: RowsCounts) -> RowsCounts:
        """Of both."""
        return RowsCounts(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class PackedSplit:
    """The packing of one split, and the plan to write it."""

    split: str
    bins: Bins
    digest: str
    shards: list[Shard[RowsWork]]


def pack_split(
    split: str,
    chosen: NDArray[np.int64],
    sequences: Sequences,
    seq_len: int,
    algorithm: Algorithm,
    seed: int,
    file_tokens: int,
    folder: Path,
) -> PackedSplit:
    """Pack, save who lies where to `folder` for the tasks, and cut the rows into files of some `file_tokens` tokens."""
    bins = pack_lengths(sequences.length[chosen].astype(np.int64), seq_len, algorithm, seed=seed)
    items = chosen[bins.items]
    arrays = {
        "shard": sequences.shard[items].astype("<i4"),
        "begin": sequences.begin[items].astype("<i8"),
        "length": sequences.length[items].astype("<i4"),
        "offsets": bins.offsets.astype("<i8"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(array.tobytes())
        np.save(folder / f"{split}.{name}.npy", array, allow_pickle=False)
    row_ends = np.cumsum(np.add.reduceat(arrays["length"].astype(np.int64), bins.offsets[:-1]))
    files = max(1, round(int(row_ends[-1]) / file_tokens))
    cuts = np.searchsorted(row_ends, row_ends[-1] * np.arange(1, files) / files, side="right") + 1
    borders = sorted({0, *(min(int(cut), len(bins)) for cut in cuts), len(bins)})
    shards = [
        Shard(f"{split}-{number:05d}", RowsWork(split, f"{split}/{number:05d}.parquet", begin, end))
        for number, (begin, end) in enumerate(pairwise(borders))
    ]
    return PackedSplit(split, bins, digest.hexdigest(), shards)


def rows_shard(shard: Shard[RowsWork], task: RowsJob, output: ShardOutput) -> RowsCounts:
    """A task: some rows of a split as one Parquet file."""
    split, begin, end = shard.work.split, shard.work.begin, shard.work.end
    packing = {
        name: np.load(task.packing / f"{split}.{name}.npy", mmap_mode="r", allow_pickle=False)
        for name in ("shard", "begin", "length", "offsets")
    }
    offsets = np.asarray(packing["offsets"][begin : end + 1])
    in_split = slice(int(offsets[0]), int(offsets[-1]))
    where_from = [np.asarray(packing[name][in_split]) for name in ("shard", "begin", "length")]
    tokens = trained_tokens = 0
    lengths = where_from[2].astype(np.int64)
    row_lengths = np.add.reduceat(lengths, offsets[:-1] - offsets[0])
    with pq.ParquetWriter(output.path(shard.work.file), PACKED_SCHEMA, compression="zstd") as writer:
        for first, last in _row_groups(row_lengths):
            items = slice(int(offsets[first] - offsets[0]), int(offsets[last] - offsets[0]))
            ends = np.cumsum(lengths[items])
            ids = np.empty(int(ends[-1]), np.int32)
            mask = np.empty(int(ends[-1]), np.uint8)
            # Shard by shard, so that two files are open at a time: a group may draw from more shards than may be open.
            by_shard = np.argsort(where_from[0][items], kind="stable")
            columns = (column[items][by_shard].tolist() for column in where_from)
            now_open = -1
            for number, from_, length, stop in zip(*columns, ends[by_shard].tolist(), strict=True):
                if number != now_open:
                    path, now_open = task.spool / task.shards[number], number
                    spool_ids = np.memmap(f"{path}.ids", dtype="<i4", mode="r")
                    spool_mask = np.memmap(f"{path}.mask", dtype="u1", mode="r")
                ids[stop - length : stop] = spool_ids[from_ : from_ + length]
                mask[stop - length : stop] = spool_mask[from_ : from_ + length]
            writer.write_table(_table(ids, mask, lengths[items], offsets[first : last + 1], row_lengths[first:last]))
            tokens += len(ids)
            trained_tokens += int(mask.sum(dtype=np.int64))
    return RowsCounts(end - begin, int(offsets[-1] - offsets[0]), tokens, trained_tokens)


def write_rows(
    tokenized: Plan[ChatWork], packed: Sequence[PackedSplit], task: RowsJob, folder: Path, engine: Engine
) -> dict[str, RowsCounts]:
    """Write the rows of all splits below `folder`, `SPLIT/00000.parquet` and so on; returns the counts by split.

    Shows on stderr how far it is. `tokenized`: the plan of the spool.
    """
    settings = {"tokenized": tokenized.digest, "packing": {split.split: split.digest for split in packed}}
    plan = Plan(settings, [], [shard for split in packed for shard in split.shards])
    freeze(plan, folder)
    totals = {split.split: RowsCounts() for split in packed}
    with Progress("write") as progress:
        receipts = run_shards(plan, folder, rows_shard, task, engine, RowsCounts)
        for shard, (receipt, was_done) in zip(plan.shards, receipts, strict=True):
            totals[shard.work.split] += receipt.counts
            progress.add(rows=receipt.counts.rows, tokens=receipt.counts.tokens, was_done=was_done)
    return totals


def publish_rows(totals: Mapping[str, RowsCounts], folder: Path, output_dir: Path) -> dict[str, Path]:
    """Give the files of every split a second name in `output_dir`; returns the folder of each split.

    Copies share the bytes: what is done stays done until it is published.
    """
    for split in totals:
        shutil.copytree(folder / split, output_dir / split, copy_function=publish_file)
    return {split: output_dir / split for split in totals}


def _row_groups(row_lengths: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Rows [first, last) of each group: at most `_ROW_GROUP_TOKENS` tokens, at least one row."""
    ends = np.cumsum(row_lengths)
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + _ROW_GROUP_TOKENS, side="right")))
        yield first, last
        first = last


def _table(
    ids: NDArray[np.int32],
    mask: NDArray[np.uint8],
    lengths: NDArray[np.int64],
    offsets: NDArray[np.int64],
    row_lengths: NDArray[np.int64],
) -> pa.Table:
    """A table of rows without a Python object a token: values and offsets are arrays already."""
    token_offsets = np.concatenate([[0], np.cumsum(row_lengths)]).astype(np.int32)
    item_offsets = (offsets - offsets[0]).astype(np.int32)
    starts = np.cumsum(lengths) - lengths  # in the group
    starts -= np.repeat(token_offsets[:-1], np.diff(item_offsets))  # in the row
    columns = ((ids, token_offsets), (mask, token_offsets), (starts.astype(np.int32), item_offsets))
    arrays = [
        pa.ListArray.from_arrays(pa.array(at, pa.int32()), pa.array(values, kind.type.value_type), type=kind.type)
        for (values, at), kind in zip(columns, PACKED_SCHEMA, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=PACKED_SCHEMA)
