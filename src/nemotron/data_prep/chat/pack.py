"""Sequences in a spool -> packed rows: which of them, in which row, from their lengths alone; then the rows, by shards.

In memory are the lengths of all sequences (45 bytes each), and of their tokens one row group a task; they are read out
of the spool (spool.py) by memory map. What is written depends on plan and settings only, not on who wrote it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nemo_runspec.errors import UserError
from nemotron.data_prep.chat.bin_packing import Bins, BinsReport, best_fit, pack_lengths
from nemotron.data_prep.chat.bin_packing.bins import check_lengths
from nemotron.data_prep.chat.encoding import CONVERSATION_TOKENS, PACKED_SCHEMA, WEIGHTED_SCHEMA
from nemotron.data_prep.chat.spool import SPOOLED, ChatWork
from nemotron.data_prep.sources.documents import SPLITS
from nemotron.data_prep.work.engines import Engine
from nemotron.data_prep.work.progress import Progress
from nemotron.data_prep.work.shards import Plan, Shard, ShardOutput, freeze, publish_file, run_shards
from nemotron.kit.schemas.conversations import BinPacking

_ROW_GROUP_TOKENS = 4 * 2**20
_GOLDEN = 0x9E3779B97F4A7C15


# --- Which sequences: lengths alone -----------------------------------------------------------------------------------


SEQUENCE = np.dtype(
    [
        ("shard", "<i4"),  # index in the plan
        ("begin", "<i8"),  # first token in that shard's files
        ("length", "<i4"),
        ("order", "<u8"),
        ("split", "u1"),  # index in SPLITS
        ("loss_weight", "<f4"),  # of its tokens
        ("conversation", "<i8"),  # that it is of: the same number for all sequences of one
        ("trained", "<i4"),  # tokens of it that are trained
        ("source", "<i4"),  # index among the settings' sources
    ]
)
"""What is known of a sequence in the spool."""
Sequences = NDArray[np.void]
"""An array of `SEQUENCE` [N]: all that lie in a spool, in the plan's order."""


def read_sequences(folder: Path, plan: Plan[ChatWork], source_names: Sequence[str]) -> Sequences:
    """The tables of all shards of a spool."""
    tables, conversations = [np.empty(0, SEQUENCE)], 0
    for number, shard in enumerate(plan.shards):
        stored = np.load(folder / f"{shard.name}.sequences.npy", allow_pickle=False)
        table = np.empty(len(stored), SEQUENCE)
        for name in SPOOLED.names or ():
            table[name] = stored[name]
        table["shard"] = number
        table["begin"] = np.cumsum(stored["length"], dtype=np.int64) - stored["length"]
        table["source"] = source_names.index(shard.work.source)
        table["conversation"] += conversations
        conversations = int(table["conversation"].max(initial=conversations - 1)) + 1
        tables.append(table)
    return np.concatenate(tables)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Sequences of each split (indices [n], in the order of packing), the sources' shares, and by source how many were
    left out as equal to another."""

    splits: dict[str, NDArray[np.int64]]
    shares: list[Share]
    equal: dict[str, int]

    @property
    def duplicates(self) -> int:
        """How many were left out as equal to another."""
        return sum(self.equal.values())


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
    by_order = np.lexsort((np.arange(len(sequences)), sequences["split"] == 0, sequences["order"]))
    ordered = sequences["order"][by_order]
    first = np.ones(len(ordered), np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    equal = np.bincount(sequences["source"][by_order[~first]], minlength=len(names)).tolist()
    by_order = by_order[first]
    splits: dict[str, NDArray[np.int64]] = {
        name: by_order[sequences["split"][by_order] == code] for code, name in enumerate(SPLITS)
    }
    training = splits["train"]
    source_of = sequences["source"][training]
    available = np.bincount(source_of, sequences["length"][training], minlength=len(names)).astype(np.int64)
    epochs = _epochs(dict(zip(names, available.tolist(), strict=True)), weights, repeats, num_tokens)

    chosen, keys = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    for number, name in enumerate(names):
        mine = training[source_of == number]
        whole, part = divmod(epochs[name], 1.0)
        for epoch in range(int(whole) + 1):
            taken = mine if epoch < whole else mine[: _up_to(sequences["length"][mine], part)]
            chosen.append(taken)
            # Another order in every epoch, so that a sequence and its repetition do not lie side by side.
            keys.append(sequences["order"][taken] ^ np.uint64(epoch * _GOLDEN % 2**64))
    train = np.concatenate(chosen)
    splits["train"] = train = train[np.argsort(np.concatenate(keys), kind="stable")]

    drawn = sequences[train]
    used = np.bincount(drawn["source"], drawn["length"], minlength=len(names)).astype(np.int64)
    counts = np.bincount(drawn["source"], minlength=len(names))
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
    return Chosen(splits, shares, dict(zip(names, equal, strict=True)))


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


# --- Rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Packing:
    """How sequences become rows. `file_tokens`: tokens of a Parquet file, about.

    `conversation_tokens`: rows have the column of that name (encoding.py) as well.
    """

    seq_len: int
    algorithm: BinPacking
    seed: int
    file_tokens: int
    conversation_tokens: bool = False


@dataclass(frozen=True, slots=True)
class RowsJob:
    """What the tasks that write rows share: the folder above spool and packing, the names of the spool's shards,
    whether any sequence has a weight in the loss, and whether rows have the column `conversation_tokens`."""

    work: Path
    shards: tuple[str, ...]
    weighted: bool
    conversation_tokens: bool


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
    """The rows of one split, and how full they are."""

    counts: RowsCounts
    report: BinsReport

    def metrics(self) -> dict[str, int | float]:
        """Both, flat, for the artifact's record."""
        return asdict(self.counts) | asdict(self.report)


def pack_rows(
    tokenized: Plan[ChatWork],
    sequences: Sequences,
    splits: Mapping[str, NDArray[np.int64]],
    packing: Packing,
    work: Path,
    engine: Engine,
) -> dict[str, PackedSplit]:
    """Pack the sequences that were chosen and write the rows, `work/rows/SPLIT/00000.parquet` and so on.

    Shows on stderr how far it is. A split without a sequence has no rows. `tokenized`: the plan of `work/spool`.
    """
    (work / "packing").mkdir(parents=True, exist_ok=True)
    shards: list[Shard[RowsWork]] = []
    reports: dict[str, BinsReport] = {}
    digests: dict[str, str] = {}
    for split, chosen in splits.items():
        if len(chosen):
            lengths = sequences["length"][chosen].astype(np.int64)
            bins = pack_lengths(lengths, packing.seq_len, packing.algorithm, seed=packing.seed)
            reports[split] = bins.report()
            in_conversation = conversation_tokens(sequences, chosen)[bins.items]
            placed = sequences[chosen[bins.items]]
            digests[split] = _save_places(placed, in_conversation, bins, work / "packing" / split)
            shards += _row_shards(split, bins, packing.file_tokens)
    made_of = {"tokenized": tokenized.digest, "packing": digests, "conversation_tokens": packing.conversation_tokens}
    plan = Plan(made_of, [], shards)
    freeze(plan, work / "rows")
    totals = dict.fromkeys(reports, RowsCounts())
    weighted = any((sequences["loss_weight"][chosen] != 1).any() for chosen in splits.values())
    job = RowsJob(work, tuple(shard.name for shard in tokenized.shards), weighted, packing.conversation_tokens)
    with Progress("write") as progress:
        receipts = run_shards(plan, work / "rows", rows_shard, job, engine, RowsCounts)
        for shard, (receipt, was_done) in zip(shards, receipts, strict=True):
            totals[shard.work.split] += receipt.counts
            progress.add(rows=receipt.counts.rows, tokens=receipt.counts.tokens, was_done=was_done)
    return {split: PackedSplit(totals[split], report) for split, report in reports.items()}


def conversation_tokens(sequences: Sequences, chosen: NDArray[np.int64]) -> NDArray[np.int32]:
    """Trained tokens of the whole conversation of each chosen sequence, int32 as long as `chosen`.

    A conversation is what was chosen of it in this split, in this sequence and in others; a sequence that is chosen
    again, in another epoch, is no more of it.
    """
    once = sequences[np.unique(chosen)]
    totals = np.bincount(once["conversation"], once["trained"])
    return totals[sequences["conversation"][chosen]].astype(np.int32)


def _save_places(placed: Sequences, in_conversation: NDArray[np.int32], bins: Bins, prefix: Path) -> str:
    """Write where each placed sequence lies in the spool, int64 [3, N] (shard, begin, length), its weight in the loss,
    float32 [N], the trained tokens of its conversation, int32 [N], and where each row begins among them, int64
    [rows + 1]; returns a digest of all."""
    tables = {
        "places": np.stack([placed[name].astype("<i8") for name in ("shard", "begin", "length")]),
        "weights": placed["loss_weight"].astype("<f4"),
        "conversation_tokens": in_conversation.astype("<i4"),
        "offsets": bins.offsets.astype("<i8"),
    }
    for name, table in tables.items():
        np.save(f"{prefix}.{name}.npy", table, allow_pickle=False)
    return hashlib.sha256(b"".join(table.tobytes() for table in tables.values())).hexdigest()


def _row_shards(split: str, bins: Bins, file_tokens: int) -> list[Shard[RowsWork]]:
    """The rows of a split, cut into files of some `file_tokens` tokens."""
    row_ends = np.cumsum(np.add.reduceat(bins.lengths, bins.offsets[:-1]))
    files = max(1, round(int(row_ends[-1]) / file_tokens))
    cuts = np.searchsorted(row_ends, row_ends[-1] * np.arange(1, files) / files, side="right") + 1
    borders = sorted({0, *(min(int(cut), len(bins)) for cut in cuts), len(bins)})
    return [
        Shard(f"{split}-{number:05d}", RowsWork(split, f"{split}/{number:05d}.parquet", begin, end))
        for number, (begin, end) in enumerate(pairwise(borders))
    ]


def rows_shard(shard: Shard[RowsWork], job: RowsJob, output: ShardOutput) -> RowsCounts:
    """A task: some rows of a split as one Parquet file."""
    prefix = job.work / "packing" / shard.work.split
    offsets = np.load(f"{prefix}.offsets.npy", allow_pickle=False)[shard.work.begin : shard.work.end + 1]
    places = np.load(f"{prefix}.places.npy", mmap_mode="r", allow_pickle=False)[:, offsets[0] : offsets[-1]]
    weights = np.load(f"{prefix}.weights.npy", mmap_mode="r", allow_pickle=False)[offsets[0] : offsets[-1]]
    totals = np.load(f"{prefix}.conversation_tokens.npy", mmap_mode="r", allow_pickle=False)[offsets[0] : offsets[-1]]
    offsets -= offsets[0]
    lengths = np.array(places[2])
    row_lengths = np.add.reduceat(lengths, offsets[:-1])
    tokens = trained_tokens = 0
    schema = WEIGHTED_SCHEMA if job.weighted else PACKED_SCHEMA
    if job.conversation_tokens:
        schema = schema.append(CONVERSATION_TOKENS)
    with pq.ParquetWriter(output.path(shard.work.file), schema, compression="zstd") as writer:
        for first, last in _row_groups(row_lengths):
            items = slice(offsets[first], offsets[last])
            ends = np.cumsum(lengths[items])
            ids = np.empty(int(ends[-1]), np.int32)
            mask = np.empty(int(ends[-1]), np.uint8)
            # Shard by shard, so that two files are open at a time: a group may draw from more shards than may be open.
            by_shard = np.argsort(places[0, items], kind="stable")
            columns = [*places[:, items][:, by_shard].tolist(), ends[by_shard].tolist()]
            now_open = -1
            for number, begin, length, end in zip(*columns, strict=True):
                if number != now_open:
                    path, now_open = job.work / "spool" / job.shards[number], number
                    spool_ids = np.memmap(f"{path}.ids", dtype="<i4", mode="r")
                    spool_mask = np.memmap(f"{path}.mask", dtype="u1", mode="r")
                ids[end - length : end] = spool_ids[begin : begin + length]
                mask[end - length : end] = spool_mask[begin : begin + length]
            trained_tokens += int(np.count_nonzero(mask))
            loss_mask = mask * np.repeat(weights[items], lengths[items]) if job.weighted else mask
            rows = _table(ids, loss_mask, lengths[items], offsets[first : last + 1], row_lengths[first:last])
            if job.conversation_tokens:
                starts = rows.column("seq_start_id").chunk(0).offsets
                rows = rows.append_column(CONVERSATION_TOKENS, _lists(starts, totals[items], CONVERSATION_TOKENS))
            writer.write_table(rows)
            tokens += len(ids)
    return RowsCounts(len(row_lengths), len(lengths), tokens, trained_tokens)


def write_rows(
    file: Path, sequences: list[tuple[NDArray[np.int32], NDArray[np.uint8]]], seq_len: int, *, concatenate: bool
) -> dict[str, int]:
    """Write sequences that fit in memory (`pack_rows` takes any number), as (ids, label-aligned mask).

    Packed by best fit in the order given, or, without `concatenate`, each in a row of its own. Returns the numbers of
    rows, sequences, tokens and trained_tokens. ValueError: no sequence, or one longer than `seq_len`.
    """
    lengths = check_lengths([len(ids) for ids, _ in sequences], seq_len)
    if concatenate:
        bins = best_fit(lengths, seq_len)
        order, offsets = bins.items, bins.offsets
    else:
        order, offsets = np.arange(len(lengths)), np.arange(len(lengths) + 1)
    ids = np.concatenate([sequences[i][0] for i in order])
    mask = np.concatenate([sequences[i][1] for i in order])
    row_lengths = np.add.reduceat(lengths[order], offsets[:-1])
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(_table(ids, mask, lengths[order], offsets, row_lengths), file, compression="zstd")
    counts = {"rows": len(row_lengths), "sequences": len(lengths), "tokens": len(ids)}
    return {**counts, "trained_tokens": int(np.count_nonzero(mask))}


def publish_rows(packed: Mapping[str, PackedSplit], work: Path, output_dir: Path) -> dict[str, Path]:
    """Give the files of every split a second name in `output_dir`; returns the folder of each split.

    Copies share the bytes: what is done stays done until it is published.
    """
    for split in packed:
        shutil.copytree(work / "rows" / split, output_dir / split, copy_function=publish_file)
    return {split: output_dir / split for split in packed}


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
    mask: NDArray[np.uint8 | np.float32],
    lengths: NDArray[np.int64],
    offsets: NDArray[np.int64],
    row_lengths: NDArray[np.int64],
) -> pa.Table:
    """A table of rows without a Python object a token: values and offsets are arrays already. Weights are floats."""
    schema = WEIGHTED_SCHEMA if mask.dtype == np.float32 else PACKED_SCHEMA
    token_offsets = np.concatenate([[0], np.cumsum(row_lengths)]).astype(np.int32)
    item_offsets = (offsets - offsets[0]).astype(np.int32)
    starts = np.cumsum(lengths) - lengths  # in the group
    starts -= np.repeat(token_offsets[:-1], np.diff(item_offsets))  # in the row
    columns = ((ids, token_offsets), (mask, token_offsets), (starts.astype(np.int32), item_offsets))
    arrays = [
        _lists(pa.array(at, pa.int32()), values, kind) for (values, at), kind in zip(columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _lists(offsets: pa.Array, values: NDArray[Any], kind: pa.Field) -> pa.ListArray:
    return pa.ListArray.from_arrays(offsets, pa.array(values, kind.type.value_type), type=kind.type)
