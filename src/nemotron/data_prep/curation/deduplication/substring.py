"""Exact substring deduplication: of passages of `min_tokens` tokens or more that occur twice, the first one stays.

The goal is that of Lee et al. 2022 (arXiv 2107.06499, section 4.1), who sort all suffixes of the corpus. Here every
window of `min_tokens` tokens is hashed instead, to 128 bits, and the hashes are sorted: a passage of at least so many
tokens occurs twice if and only if its windows do. What a sort finds is compared token by token before it is cut out, so
that the result is exact.

**Tokens** are runs of characters without whitespace; in scripts without spaces (Chinese, Japanese, Thai, …) every
character is one. Whitespace does not count, case and punctuation do. No passage crosses the border of a document.

**First** is in the document whose id has the smallest 64-bit hash, and there the leftmost. Every window that is not the
first of its kind loses its tokens, but for those which the first one itself covers (`a b a b a b`: a first occurrence
and its repetition overlap). So afterwards no passage of `min_tokens` tokens that stood whole in the input is there
twice. A document that lost something and has fewer than `min_tokens_left` left goes as a whole.

Passes: tasks tokenise their shard and write its window hashes in order; a task for every range of hashes merges what
all shards have there and notes the windows that are not first; tasks cut. Time is that of sorting. A task needs some 60
bytes of memory for every token of its shard, or 35 for every window of its range and some 130 for one that occurs
again; the disk holds 33 bytes a token in between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_runspec.errors import RunFailed
from nemotron.data_prep.curation.deduplication.columns import (
    MOST_OPEN,
    Columns,
    Names,
    Rows,
    save_array,
    text_batches,
    write_columns,
)
from nemotron.data_prep.curation.deduplication.exact import check_ids
from nemotron.data_prep.curation.deduplication.removal import first_of_groups
from nemotron.data_prep.curation.deduplication.text_hashes import (
    BASES,
    I64,
    U64,
    code_points,
    find_tokens,
    mix_points,
    span_hashes,
    window_hashes,
)
from nemotron.data_prep.curation.step import (
    SAMPLES_PER_REASON,
    DocumentShard,
    DocumentWriter,
    StepTable,
    excerpt,
    output_name,
    plan_step,
    read_documents,
)
from nemotron.data_prep.sources.documents import stable_hash
from nemotron.data_prep.work.engines import Engine
from nemotron.data_prep.work.progress import Progress
from nemotron.data_prep.work.shards import Plan, Shard, ShardOutput, freeze, run_shards
from nemotron.kit.schemas.curation import SubstringSettings

REASON, NOTE = "too short after its repeated passages", "lost repeated passages"
INDEX, MATCHES = "index", "matches"


@dataclass
class Cuts:
    """What was cut out. `bytes`: of text in utf-8, in documents that stayed; `passages`: places that were cut."""

    documents: int = 0
    passages: int = 0
    tokens: int = 0
    bytes: int = 0
    samples: list[dict[str, str]] = field(default_factory=list)  # [{id, text, stays_in}]

    def add(self, other: Cuts) -> None:
        """Add what another one counted; samples are those with the smallest hashes, in whatever order they come."""
        self.documents += other.documents
        self.passages += other.passages
        self.tokens += other.tokens
        self.bytes += other.bytes
        self.samples.extend(other.samples)
        self.samples.sort(key=lambda sample: (stable_hash("sample", sample["id"], sample["text"]), sample["id"]))
        del self.samples[SAMPLES_PER_REASON:]

    def __str__(self) -> str:
        """Counts in a line, and a sample."""
        lines = [f"cut out: {self.passages} passages, {self.tokens} tokens, {self.bytes / 1e6:.3f} MB"]
        lines[0] += f", in {self.documents} documents that stay"
        lines += [f"    {s['id']}: {s['text'][:80]} (stays in {s['stays_in']})" for s in self.samples[:1]]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class HashRange:
    """Work of the second pass: range `number` of `count` equal ones of all hashes."""

    number: int
    count: int


@dataclass(frozen=True, slots=True)
class CutCounts:
    """What a task of the last pass returns."""

    table: StepTable
    cuts: Cuts


def deduplicate(
    files: Sequence[Path], settings: SubstringSettings, work_dir: Path, engine: Engine
) -> tuple[StepTable, Cuts]:
    """Write the documents of `files` without repeated passages to `work_dir`.

    Raises:
        RunFailed: two documents have the same id, or two different windows the same hash.
        UserError: a file is no document shard, or has changed since the run began.
    """
    about = {"step": "substring_dedup", **settings.model_dump()}

    # Index: tokens, and windows in the order of their hashes.
    folder = work_dir / INDEX
    plan = plan_step(files, {**about, "pass": INDEX})
    indexed = write_columns(plan, folder, _index, settings.min_tokens, engine)
    columns = Columns(folder, {receipt.shard: receipt.counts.rows for receipt in indexed})
    _check_keys(columns)
    made = hashlib.sha256("".join(r.outputs[f"{r.shard}.high.npy"].sha256 for r in indexed).encode())

    # Matches: a task for every range of hashes.
    count = max(1, -(-sum(path.stat().st_size for path in files) // settings.range_bytes))
    ranges = [Shard(f"range-{number:05d}", HashRange(number, count)) for number in range(count)]
    match_plan = Plan({**about, "pass": MATCHES, "index": made.hexdigest()}, plan.inputs, ranges)
    matched = write_columns(match_plan, work_dir / MATCHES, _match, columns, engine)
    matches = Columns(work_dir / MATCHES, {receipt.shard: receipt.counts.rows for receipt in matched})
    made.update("".join(str(sorted(receipt.outputs.items())) for receipt in matched).encode())

    # Cut.
    plan = plan_step(files, {**about, "pass": "cut", "matches": made.hexdigest()})
    freeze(plan, work_dir)
    table, cuts = StepTable(), Cuts()
    with Progress("substring_dedup", sum(file.size for file in plan.inputs), "document") as progress:
        receipts = run_shards(plan, work_dir, _cut, (columns, matches, settings), engine, CutCounts)
        for file, (receipt, was_done) in zip(plan.inputs, receipts, strict=True):
            progress.add(rows=receipt.counts.table.read.documents, bytes=file.size, was_done=was_done)
            table.merge(receipt.counts.table)
            cuts.add(receipt.counts.cuts)
    return table, cuts


# --- Index: a task a shard --------------------------------------------------------------------------------------------


def _index(shard: DocumentShard, min_tokens: int, output: ShardOutput) -> Rows:
    names = Names()
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in ("text", "starts", "high", "low", "at")}
    token_ends = [0]  # tokens of this shard up to the end of each document, after a 0
    size = 0  # bytes of canonical text so far
    for batch in text_batches(read_documents(shard.work)):
        for document in batch:
            names.add(document)
        tokens = _Tokens([document["text"] for document in batch])
        at, high, low = tokens.windows(min_tokens)
        parts["at"].append(at + token_ends[-1])
        parts["high"].append(high)
        parts["low"].append(low)
        text, starts = tokens.canonical()
        parts["text"].append(text)
        parts["starts"].append(starts + size)
        size += len(text)
        token_ends.extend((tokens.document_tokens[1:] + token_ends[-1]).tolist())
    names.save(output, shard.name)
    empty = {"text": np.uint8, "starts": np.int64, "high": np.uint64, "low": np.uint64, "at": np.int64}
    columns = {name: np.concatenate([np.empty(0, dtype=empty[name]), *parts.pop(name)]) for name in list(parts)}
    order = np.argsort(columns["high"])
    for name in ("high", "low", "at"):
        columns[name] = columns[name][order]
    columns["starts"] = np.append(columns["starts"], size)
    columns["token_ends"] = np.array(token_ends, dtype=np.int64)
    for name, column in columns.items():
        save_array(output, f"{shard.name}.{name}", column)
    return Rows(len(token_ends) - 1)


class _Tokens:
    """The tokens of some texts. `document_tokens`: number of the first token of each text, then that of all."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.points, bounds = code_points(texts)
        self.starts, self.ends = find_tokens(self.points, bounds)
        self.document_tokens: I64 = np.searchsorted(self.starts, bounds)

    def windows(self, size: int) -> tuple[I64, U64, U64]:
        """All windows of `size` tokens within a text: number of the first token, two independent hashes."""
        room = np.maximum(np.diff(self.document_tokens) - size + 1, 0)
        offsets = np.cumsum(room) - room
        at = np.arange(room.sum()) + np.repeat(self.document_tokens[:-1] - offsets, room)
        hashes = []
        for number, base in enumerate(BASES):
            values = mix_points(self.points, number)
            hashes.append(window_hashes(span_hashes(values, self.starts, self.ends, base), size, base)[at])
        return at, hashes[0], hashes[1]

    def canonical(self) -> tuple[NDArray[np.uint8], I64]:
        """The text without whitespace, in utf-8, and where each token begins in it. With both, nothing else counts."""
        visible = np.zeros(len(self.points) + 1, dtype=np.int8)
        visible[self.starts] += 1
        visible[self.ends] -= 1
        mask = np.cumsum(visible[:-1], dtype=np.int8).astype(np.bool_)
        sizes = 1 + (self.points >= 0x80).astype(np.int64) + (self.points >= 0x800) + (self.points >= 0x10000)
        sizes[~mask] = 0
        text = self.points[mask].tobytes().decode("utf-32-le", "surrogatepass").encode("utf-8", "surrogatepass")
        return np.frombuffer(text, dtype=np.uint8), (np.cumsum(sizes) - sizes)[self.starts]


def _check_keys(columns: Columns) -> None:
    """The hashes of the ids say which of two documents is first, so they must differ. RunFailed."""
    keys = columns.whole("keys")
    order = np.argsort(keys)
    same = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
    if len(same):
        check_ids(columns, int(order[same[0]]), int(order[same[0] + 1]))


# --- Matches: a task a range of hashes --------------------------------------------------------------------------------


def _match(shard: Shard[HashRange], columns: Columns, output: ShardOutput) -> Rows:
    """Note every window of the range that is not the first of its kind: its shard and token, those of the first."""
    number, count = shard.work.number, shard.work.count
    begin, end = (np.uint64(min(2**64 - 1, 2**64 * n // count)) for n in (number, number + 1))
    last = number + 1 == count
    # Copies of what is needed: a view would keep its file open, and shards are many.
    places, hashes = [], []  # of every shard: its windows in the range, from and to
    for name in columns.shards:
        high = columns.column(name, "high")
        first, stop = np.searchsorted(high, begin), len(high) if last else np.searchsorted(high, end)
        places.append((int(first), int(stop)))
        hashes.append(np.array(high[first:stop]))
    high = np.concatenate(hashes)
    del hashes
    order = np.argsort(high)
    equal = high[order[1:]] == high[order[:-1]]
    shared = np.zeros(len(order), dtype=np.bool_)
    shared[1:] |= equal
    shared[:-1] |= equal
    chosen = np.sort(order[shared])
    del order, equal, shared
    high = high[chosen]
    bounds = np.cumsum([0, *(stop - first for first, stop in places)])
    edges = np.searchsorted(chosen, bounds)
    where = np.repeat(np.arange(len(places), dtype=np.int32), np.diff(edges))
    low, at = np.empty(len(chosen), dtype=np.uint64), np.empty(len(chosen), dtype=np.int64)
    for place, name in enumerate(columns.shards):
        mine = slice(edges[place], edges[place + 1])
        rows = chosen[mine] - bounds[place] + places[place][0]
        low[mine], at[mine] = columns.column(name, "low")[rows], columns.column(name, "at")[rows]
    groups = np.unique(np.stack([high, low], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    keys = np.empty(len(at), dtype=np.uint64)
    for place in np.unique(where).tolist():
        mine = where == place
        rows = np.searchsorted(columns.column(columns.shards[place], "token_ends"), at[mine], side="right") - 1
        keys[mine] = columns.column(columns.shards[place], "keys")[rows]
    members, firsts = first_of_groups(groups, keys, at)
    goes = members != firsts
    members, firsts = members[goes], firsts[goes]
    # By shard and token, for the tasks that cut.
    order = np.lexsort((at[members], where[members]))
    members, firsts = members[order], firsts[order]
    for column, values in (
        ("shard", where[members]),
        ("at", at[members]),
        ("first_shard", where[firsts]),
        ("first_at", at[firsts]),
    ):
        save_array(output, f"{shard.name}.{column}", values)
    return Rows(len(members))


# --- Cut: a task a shard ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Repeats:
    """The windows of one shard that are not first, by token: where they begin, and where the first one of each does."""

    at: I64
    first_shard: NDArray[np.int32]
    first_at: I64

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Ranges of windows that follow each other, here as there: a passage that is longer than a window."""
        if not len(self.at):
            return []
        new = np.ones(len(self.at), dtype=np.bool_)
        new[1:] = (
            (np.diff(self.at) != 1) | (np.diff(self.first_at) != 1) | (self.first_shard[1:] != self.first_shard[:-1])
        )
        begins = np.flatnonzero(new)
        return list(zip(begins.tolist(), [*begins[1:].tolist(), len(self.at)], strict=True))


def _cut(shard: DocumentShard, job: tuple[Columns, Columns, SubstringSettings], output: ShardOutput) -> CutCounts:
    columns, matches, settings = job
    place, size = columns.shards.index(shard.name), settings.min_tokens
    repeats = _repeats_of(place, matches)
    _verify(shard.name, repeats, columns, size)

    # Tokens that go: those of every window that is not the first of its kind, but for those that the first one covers.
    token_ends = columns.column(shard.name, "token_ends")
    begins, ends = repeats.at, repeats.at + size
    overlap = (repeats.first_shard == place) & (repeats.first_at < begins) & (repeats.first_at + size > begins)
    begins = np.where(overlap, repeats.first_at + size, begins)
    change = np.zeros(int(token_ends[-1]) + 1, dtype=np.int32)
    np.add.at(change, begins, 1)
    np.subtract.at(change, ends, 1)
    goes = np.cumsum(change[:-1]) > 0
    counted = np.append(goes, False).astype(np.int64)
    touched = np.add.reduceat(counted, token_ends[:-1]) if len(token_ends) > 1 else np.empty(0, dtype=np.int64)
    touched = np.where(np.diff(token_ends) > 0, touched, 0)  # reduceat takes the next one for an empty range

    table, cuts = StepTable(), Cuts()
    with DocumentWriter(output.path(output_name(shard))) as writer:
        for row, document in enumerate(read_documents(shard.work)):
            table.read.add(document)
            if not touched[row]:
                table.keep(document)
                writer.write(document)
                continue
            begin, end = int(token_ends[row]), int(token_ends[row + 1])
            left, passages = cut_tokens(document["text"], goes[begin:end])
            # The first window that goes here, and where its twin stays.
            window = int(np.searchsorted(repeats.at, begin))
            other = columns.shards[int(repeats.first_shard[window])]
            twin = int(np.searchsorted(columns.column(other, "token_ends"), repeats.first_at[window], side="right") - 1)
            twin_id = columns.text("ids", int(columns.bounds[columns.shards.index(other)]) + twin)
            if end - begin - int(touched[row]) < settings.min_tokens_left:
                table.drop(document, REASON, f"stays in {twin_id}: {excerpt(passages[0])}")
                continue
            table.keep({**document, "text": left}, (NOTE,))
            writer.write({**document, "text": left})
            sample = {"id": document["id"], "text": excerpt(passages[0]), "stays_in": twin_id}
            lost = len(document["text"].encode("utf-8", "surrogatepass")) - len(left.encode("utf-8", "surrogatepass"))
            cuts.add(Cuts(1, len(passages), int(touched[row]), lost, [sample]))
    return CutCounts(table, cuts)


def _repeats_of(place: int, matches: Columns) -> _Repeats:
    parts: dict[str, list[NDArray[Any]]] = {"at": [], "first_shard": [], "first_at": []}
    for name in matches.shards:
        first, stop = np.searchsorted(matches.column(name, "shard"), [place, place + 1])
        for column, values in parts.items():
            values.append(np.array(matches.column(name, column)[first:stop]))  # a view would keep its file open
    at, first_shard, first_at = (np.concatenate(values) for values in parts.values())
    order = np.argsort(at)
    return _Repeats(at[order], first_shard[order], first_at[order])


def _verify(shard: str, repeats: _Repeats, columns: Columns, size: int) -> None:
    """Compare every repeated passage with its first occurrence, token by token. RunFailed if one differs."""
    texts: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}

    def passage(name: str, begin: int, tokens: int) -> tuple[bytes, NDArray[Any]]:
        if name not in texts:
            if 2 * len(texts) >= MOST_OPEN:
                texts.clear()
            texts[name] = columns.column(name, "text"), columns.column(name, "starts")
        text, starts = texts[name]
        bounds = starts[begin : begin + tokens + 1]
        return text[bounds[0] : bounds[-1]].tobytes(), bounds - bounds[0]

    for begin, end in repeats.runs:
        tokens = end - begin - 1 + size
        mine, my_bounds = passage(shard, int(repeats.at[begin]), tokens)
        other = columns.shards[int(repeats.first_shard[begin])]
        theirs, their_bounds = passage(other, int(repeats.first_at[begin]), tokens)
        if mine != theirs or not np.array_equal(my_bounds, their_bounds):
            text = excerpt(mine.decode(errors="replace"))
            raise RunFailed(
                f"two different passages of {shard} and {other} have one hash of 128 bits: {text!r}",
                "another min_tokens gives other hashes",
            )


def cut_tokens(text: str, goes: NDArray[np.bool_]) -> tuple[str, list[str]]:
    """A text without some of its tokens, and the passages that went.

    `goes`: a mark for every token. Between what is left and right of a passage stays that of the two gaps around it
    which has more line ends, so that paragraphs do not run into each other; of equal ones, the left one. At the ends
    of the text, a gap beside a passage goes with it.
    """
    points, bounds = code_points([text])
    starts, ends = find_tokens(points, bounds)
    change = np.flatnonzero(np.diff(np.concatenate([[False], goes, [False]]).astype(np.int8)))
    kept: list[str] = []
    passages: list[str] = []
    copied_to = 0  # characters of the text that are kept or cut
    for first, stop in change.reshape(-1, 2).tolist():
        passages.append(text[starts[first] : ends[stop - 1]])
        before = text[int(ends[first - 1]) : int(starts[first])] if first else ""
        after = text[int(ends[stop - 1]) : int(starts[stop])] if stop < len(starts) else ""
        kept.append(text[copied_to : int(ends[first - 1])] if first else "")
        if first and stop < len(starts):
            kept.append(after if after.count("\n") > before.count("\n") else before)
        copied_to = int(starts[stop]) if stop < len(starts) else len(text)
    kept.append(text[copied_to:])
    return "".join(kept), passages
