"""Documents to token streams, one for each split: the work of one shard, and what all shards made together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.extraction import page_text
from nemotron.data_prep.sources.documents import SPLITS, split_of
from nemotron.data_prep.sources.files import Piece
from nemotron.data_prep.sources.planning import SourceWork
from nemotron.data_prep.sources.reader import read_piece, reject, where
from nemotron.data_prep.sources.reading import Reading, ReadReport
from nemotron.data_prep.tokens.blend import SourceFiles, empty_source
from nemotron.data_prep.tokens.encoding import LONG_CHARS, Encoder, plain_tokenizer
from nemotron.data_prep.tokens.indexed_dataset import IndexedDatasetWriter
from nemotron.data_prep.work.batches import batches
from nemotron.data_prep.work.engines import Engine
from nemotron.data_prep.work.progress import Progress
from nemotron.data_prep.work.shards import Plan, Receipt, Shard, ShardOutput, publish_file, run_shards
from nemotron.kit.tables import aligned

_TRAIN = 0
# Reasons of a skip, beside the reader's own.
EMPTY_TEXT = "empty text"
NO_WORDS = "a word of more than some 500,000 characters"
BEYOND_CAP = "beyond max_tokens"
NO_MAIN_TEXT = "page without a main text"
NOT_UNREADABLE = (EMPTY_TEXT, BEYOND_CAP, NO_MAIN_TEXT)
"""Of these, the reasons that stop nothing under either policy."""
# A batch of the tokenizer: enough that a call costs nothing, few enough that it takes some 30 MB.
_BATCH_CHARS, _BATCH_DOCUMENTS = 2**18, 512
_POWERS = 2 ** np.arange(48)


@dataclass(frozen=True, slots=True)
class SourceRules:
    """How the documents of a source are read, and the shares of them that are held out.

    `split_column`: of a row (see `Reading.columns`), that says which of `SPLITS` a document is in, whatever the shares.
    """

    reading: Reading
    valid: float = 0.0
    test: float = 0.0
    split_column: str | None = None


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """What all tasks share. `bos_id`, `eos_id`: around every document, None for nothing; `dtype`: uint16 or int32."""

    tokenizer_json: str
    bos_id: int | None
    eos_id: int | None
    dtype: str
    seed: int
    sources: Mapping[str, SourceRules]


@dataclass(slots=True)
class SplitCounts:
    """What went into one split. `lengths`: tokens of a document, rounded up to a power of two -> documents."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    lengths: dict[str, int] = field(default_factory=dict)

    def add(self, lengths: NDArray[np.int64], num_bytes: int) -> None:
        """Count some documents."""
        self.documents += len(lengths)
        self.tokens += int(lengths.sum())
        self.bytes += num_bytes
        buckets = np.bincount(np.searchsorted(_POWERS, lengths))
        for bucket in np.flatnonzero(buckets):
            key = str(_POWERS[bucket])
            self.lengths[key] = self.lengths.get(key, 0) + int(buckets[bucket])


@dataclass(frozen=True, slots=True)
class TokenizeCounts:
    """What a task returns. `splits`: a key for each of `SPLITS`; `read`: the reader's account of all records.

    `capped`: whether it ended at its share of the source's max_documents or max_tokens.
    """

    splits: dict[str, SplitCounts]
    read: ReadReport
    capped: bool


# --- One shard --------------------------------------------------------------------------------------------------------


def stream_name(source: str, shard: str, split: str) -> str:
    """Prefix of a shard's files, below the folder of the plan and below that of the artifact."""
    return f"tokens/{source}/{split}-{shard.rpartition('-')[2]}"


def tokenize_shard(shard: Shard[SourceWork], job: TokenizeJob, output: ShardOutput) -> TokenizeCounts:
    """Write the shard's streams; a split without a document has none.

    Raises:
        UserError: a record that cannot be used, under `on_error: stop`.
    """
    work = shard.work
    rules = job.sources[work.source]
    encoder = Encoder(plain_tokenizer(job.tokenizer_json), job.bos_id, job.eos_id)
    report = ReadReport()
    counts = [SplitCounts() for _ in SPLITS]
    capped = False
    with ThreadPoolExecutor(1) as thread, ExitStack() as open_writers:
        writers: dict[int, IndexedDatasetWriter] = {}
        documents = _documents(work.pieces, rules, job.seed, report, work.max_documents)
        # One that is long is a batch of its own.
        for batch in batches(documents, lambda document: len(document.text), _BATCH_CHARS, _BATCH_DOCUMENTS):
            # In a thread only because that is faster: with a vocabulary of 70,000 and 4 MB of text, three times in
            # turns, the main thread took 1.2 to 1.4 times its processor seconds. The likely reason, not shown, is that
            # glibc gives a thread an arena of memory of its own.
            encoded = thread.submit(_encode, encoder, batch, rules, report).result()
            if encoded is None:
                continue
            tokens, lengths = encoded
            splits = np.array([document.split for document in batch])
            if work.max_tokens is not None:
                train_tokens = np.cumsum(lengths * (splits == _TRAIN))
                used = int(np.searchsorted(train_tokens, work.max_tokens - counts[_TRAIN].tokens, side="right"))
                if used < len(batch):
                    capped = True
                    report.records -= len(batch) - used
                    report.skip(BEYOND_CAP, batch[used].piece.file.name, count=len(batch) - used)
                    batch, splits, lengths = batch[:used], splits[:used], lengths[:used]
                    tokens = tokens[: int(lengths.sum())]
            for split in np.unique(splits):
                if split not in writers:
                    name = stream_name(work.source, shard.name, SPLITS[split])
                    paths = [output.path(f"{name}{end}") for end in (".bin", ".idx")]
                    writer = IndexedDatasetWriter(paths[0].with_suffix(""), np.dtype(job.dtype).type)
                    writers[split] = open_writers.enter_context(writer)
                mine = splits == split
                whole = mine.all()
                writers[split].add_documents(
                    tokens if whole else tokens[np.repeat(mine, lengths)], lengths if whole else lengths[mine]
                )
                num_bytes = sum(document.num_bytes for document in batch if document.split == split)
                counts[split].add(lengths if whole else lengths[mine], num_bytes)
            if capped:
                break
    num_documents = sum(count.documents for count in counts)
    if capped:
        report.records = num_documents  # not the one more that was read to see where the batch ends
    capped = capped or (work.max_documents is not None and num_documents >= work.max_documents)
    return TokenizeCounts(dict(zip(SPLITS, counts, strict=True)), report, capped)


class _Document(NamedTuple):
    """A text on its way; `piece` and `row` say where it is from, and `id` what its record calls it, if it says so."""

    text: str
    num_bytes: int
    split: int
    piece: Piece
    row: int
    id: Any


def _documents(
    pieces: Sequence[Piece], rules: SourceRules, seed: int, report: ReadReport, max_documents: int | None
) -> Iterator[_Document]:
    """The documents that can be used, in order, at most `max_documents`."""
    num_documents = 0
    for piece in pieces:
        # A page has no text yet: its main text is taken here.
        reading = replace(rules.reading, required=()) if piece.file.format == "warc" else rules.reading
        for row in read_piece(piece, reading, report):
            reason, detail = EMPTY_TEXT, ""
            if "html" in row.value:
                main_text = page_text(row.value["html"], row.value["url"])
                text = main_text if isinstance(main_text, str) else ""
                if not isinstance(main_text, str):
                    reason, detail = NO_MAIN_TEXT, main_text.reason
            else:
                text = row.value["text"]
            if not text:
                reject(piece, row.index, report, reason, detail)
                continue
            if rules.split_column is None:
                split = split_of(text, rules.valid, seed, rules.test)
            else:
                split = row.value[rules.split_column]
            yield _Document(text, len(text.encode()), SPLITS.index(split), piece, row.index, row.value.get("id"))
            num_documents += 1
            if num_documents == max_documents:
                return


def _encode(
    encoder: Encoder, batch: list[_Document], rules: SourceRules, report: ReadReport
) -> tuple[NDArray[np.int32], NDArray[np.int64]] | None:
    """Tokens and lengths of a batch; None for a text that would need too much memory, once it is reported."""
    if len(batch) > 1 or len(batch[0].text) <= LONG_CHARS:
        return encoder.encode([document.text for document in batch])
    encoded = encoder.encode_long(batch[0].text)
    if encoded is None:
        text, _, _, piece, row, name = batch[0]
        named = "" if name is None else f" ({name})"
        what = f"in a text of {len(text):,} characters{named}, which can only be encoded in parts"
        if rules.reading.on_error == "stop":
            raise UserError(
                f"{where(piece, row)}: {NO_WORDS} {what}", "on_error: skip leaves such records out and counts them"
            )
        reject(piece, row, report, NO_WORDS, what)
    return encoded


# --- All shards -------------------------------------------------------------------------------------------------------


@dataclass
class SourceStreams:
    """One source. `files` goes into blend.json; `lengths` is a histogram for each split, as in `SplitCounts`.

    `capped`: shards that ended at their share of max_documents or max_tokens.
    """

    files: SourceFiles = field(default_factory=empty_source)
    read: ReadReport = field(default_factory=ReadReport)
    lengths: dict[str, dict[str, int]] = field(default_factory=lambda: {split: {} for split in SPLITS})
    shards: int = 0
    capped: int = 0

    def add(self, work: SourceWork, receipt: Receipt[TokenizeCounts]) -> None:
        """Take in a shard; in the plan's order."""
        files: dict[str, Any] = self.files  # type: ignore[assignment]  # keys are put together
        for split in SPLITS:
            name, counts = stream_name(work.source, receipt.shard, split), receipt.counts.splits[split]
            if f"{name}.idx" in receipt.outputs:
                files[split].append(name)
            for key in ("tokens", "bytes", "documents"):
                files[key if split == "train" else f"{split}_{key}"] += getattr(counts, key)
            for upper, count in counts.lengths.items():
                self.lengths[split][upper] = self.lengths[split].get(upper, 0) + count
        self.read.add(receipt.counts.read)
        self.shards += 1
        self.capped += receipt.counts.capped

    def sorted_lengths(self) -> dict[str, dict[str, int]]:
        """The histograms, shortest first."""
        return {
            split: {upper: counts[upper] for upper in sorted(counts, key=int)} for split, counts in self.lengths.items()
        }


def tokenize_sources(
    plan: Plan[SourceWork], folder: Path, job: TokenizeJob, engine: Engine
) -> dict[str, SourceStreams]:
    """Do a frozen plan's shards in `folder`, and return its sources in its order. Shows on stderr how far it is."""
    streams: dict[str, SourceStreams] = {}
    total_bytes = sum(shard.work.stored_bytes for shard in plan.shards)
    with Progress("tokenize", total_bytes, "document") as progress:
        receipts = run_shards(plan, folder, tokenize_shard, job, engine, TokenizeCounts)
        for shard, (receipt, was_done) in zip(plan.shards, receipts, strict=True):
            streams.setdefault(shard.work.source, SourceStreams()).add(shard.work, receipt)
            splits = receipt.counts.splits.values()
            progress.add(
                rows=sum(counts.documents for counts in splits),
                tokens=sum(counts.tokens for counts in splits),
                bytes=shard.work.stored_bytes,
                was_done=was_done,
            )
    return streams


def link_streams(streams: dict[str, SourceStreams], folder: Path, output_dir: Path) -> None:
    """Give the files a second name in `output_dir`, so that they stay where a run that is stopped now would look."""
    for source in streams.values():
        for split in SPLITS:
            for prefix in source.files[split]:
                for suffix in (".bin", ".idx"):
                    publish_file(folder / f"{prefix}{suffix}", output_dir / f"{prefix}{suffix}")


def skipped_table(streams: dict[str, SourceStreams]) -> str:
    """What was read and what was not, source by source, for people; with an example of each reason."""
    rows = [("documents of source", "train", "valid", "test", "MB of text", "not used")]
    for name, source in streams.items():
        train, valid, test = (source.files[key] for key in ("documents", "valid_documents", "test_documents"))
        num_bytes = sum(source.files[key] for key in ("bytes", "valid_bytes", "test_bytes"))
        notes = [", ".join(f"{count} {reason}" for reason, count in sorted(source.read.skipped.items()))]
        if source.capped:
            notes.append(f"{source.capped} of {source.shards} shards end at their share of the cap")
        skipped = "; ".join(filter(None, notes)) or "-"
        rows.append((name, f"{train:,}", f"{valid:,}", f"{test:,}", f"{num_bytes / 1e6:.1f}", skipped))
    lines = aligned(rows, "<>>>><")
    shown: set[str] = set()
    for source in streams.values():
        for sample in source.read.samples:
            reason = sample["reason"].partition(": ")[0]
            if reason not in shown and sample["where"]:
                shown.add(reason)
                lines.append(f"  e.g. {sample['where']}: {sample['reason']}")
    return "\n".join(lines)
