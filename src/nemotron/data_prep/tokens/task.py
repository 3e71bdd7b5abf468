"""A task: the documents of one shard to token streams, one for each split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.extraction import page_text
from nemotron.data_prep.sources.files import Piece
from nemotron.data_prep.sources.planning import SourceWork
from nemotron.data_prep.sources.reader import place, read_piece, where
from nemotron.data_prep.sources.reading import Reading, ReadReport
from nemotron.data_prep.tokens.encoding import LONG_CHARS, Encoder, plain_tokenizer
from nemotron.data_prep.tokens.indexed_dataset import IndexedDatasetWriter
from nemotron.data_prep.work.batches import batches
from nemotron.data_prep.work.shards import Shard, ShardOutput

SPLITS = ("train", "valid", "test")
_TRAIN, _VALID, _TEST = range(3)
# Reasons of a skip, beside the reader's own.
EMPTY_TEXT = "empty text"
NO_WORDS = "a word of more than some 100,000 characters"
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


def stream_name(source: str, shard: str, split: str) -> str:
    """Prefix of a shard's files, below the folder of the plan and below that of the artifact."""
    return f"tokens/{source}/{split}-{shard.rpartition('-')[2]}"


def split_number(data: bytes, seed: int, valid: float, test: float) -> int:
    """Where a text (as UTF-8) belongs, an index of SPLITS: by its hash, so that equal texts are on one side."""
    if valid == 0 and test == 0:
        return _TRAIN
    # As `documents.split_of`, which knows no test split.
    key = b"split\0%d\0" % seed
    draw = int.from_bytes(hashlib.blake2b(key + data, digest_size=8).digest(), "big")
    if draw < valid * 2**64:
        return _VALID
    return _TEST if draw < (valid + test) * 2**64 else _TRAIN


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
                    report.skip(BEYOND_CAP, batch[used].piece.file.uri, count=len(batch) - used)
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
    capped = capped or (work.max_documents is not None and num_documents >= work.max_documents)
    return TokenizeCounts(dict(zip(SPLITS, counts, strict=True)), report, capped)


class _Document(NamedTuple):
    """A text on its way; `piece` and `row` say where it is from."""

    text: str
    num_bytes: int
    split: int
    piece: Piece
    row: int


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
                report.records -= 1
                at = place(piece, row.index) if report.has_room(reason) else ""
                report.skip(reason, at, detail)
                continue
            data = text.encode()
            if rules.split_column is None:
                split = split_number(data, seed, rules.valid, rules.test)
            else:
                split = SPLITS.index(row.value[rules.split_column])
            yield _Document(text, len(data), split, piece, row.index)
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
        named = where if rules.reading.on_error == "stop" else place
        at = named(batch[0].piece, batch[0].row)
        what = f"in a text of {len(batch[0].text):,} characters, which can only be encoded in parts"
        if rules.reading.on_error == "stop":
            raise UserError(f"{at}: {NO_WORDS} {what}", "on_error=skip leaves such records out and counts them")
        report.records -= 1
        report.skip(NO_WORDS, at, what)
    return encoded
