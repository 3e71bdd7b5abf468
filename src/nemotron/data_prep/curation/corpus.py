"""Curation: normalise, judge, deduplicate exactly and nearly, decontaminate; keep a table of what was dropped and why.

Held-out documents go first, so that a text that exists on both sides of the split stays held out and leaves training.
Texts are kept in a spool on disk; memory holds a digest, a MinHash signature and an offset per document. The result
does not depend on the order in which documents arrive: everything that chooses (which of two duplicates stays, the
order of the corpus) goes by content. What needs one document only (extracting, judging, signing, looking for protected
text) is done in tasks of an engine; what compares documents is done here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, groupby, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from rensa import RMinHash, RMinHashLSH

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.decontamination import Decontaminator, GramHasher, hits, words
from nemotron.data_prep.curation.text_quality import defect, normalise
from nemotron.data_prep.sources.documents import Document, Part, Skipped, Split, in_parts, stable_hash
from nemotron.data_prep.work.engines import Engine, SerialEngine

SAMPLES_PER_REASON = 3
SAMPLE_CHARS = 160
_BATCH = 256  # documents a task


@dataclass(frozen=True, slots=True)
class CurationSettings:
    """Knobs of curation.

    `num_permutations` and `num_bands` shape the locality-sensitive hashing (16 bands of 8 rows make a candidate of half
    of all pairs at a Jaccard similarity of 0.71 and of 94 % at 0.80); pairs are dropped at an estimated similarity of
    `near_duplicate_jaccard` or more over word 5-grams.
    """

    near_duplicate_jaccard: float = 0.8
    num_permutations: int = 128
    num_bands: int = 16
    shingle_words: int = 5
    ngram: int = 13
    boilerplate_documents: int = 10
    seed: int = 1234


@dataclass
class Tally:
    """Documents and utf-8 bytes."""

    documents: int = 0
    bytes: int = 0

    def add(self, num_bytes: int) -> None:
        """Count one text."""
        self.documents += 1
        self.bytes += num_bytes


@dataclass
class CurationTable:
    """What came in, what was kept and what was dropped, by source and reason, with a few samples of each reason."""

    read: dict[str, Tally] = field(default_factory=dict)
    not_read: dict[str, dict[str, int]] = field(default_factory=dict)  # source -> reason -> records
    kept: dict[str, Tally] = field(default_factory=dict)
    dropped: dict[str, dict[str, Tally]] = field(default_factory=dict)  # source -> reason -> tally
    samples: dict[str, list[dict[str, str]]] = field(default_factory=dict)  # reason -> [{id, text}]
    capped: set[str] = field(default_factory=set)  # sources that hold more than their limit

    def drop(self, document: Document, reason: str) -> None:
        """Record one dropped document."""
        self.dropped.setdefault(document.source, {}).setdefault(reason, Tally()).add(len(document.text.encode()))
        samples = self.samples.setdefault(reason, [])
        excerpt = " ".join(document.text[: 4 * SAMPLE_CHARS].split())[:SAMPLE_CHARS]
        samples.append({"source": document.source, "id": document.id, "text": excerpt})
        samples.sort(key=lambda sample: (sample["source"], sample["id"]))
        del samples[SAMPLES_PER_REASON:]

    def skip(self, skipped: Skipped) -> None:
        """Record what no document was made of."""
        reasons = self.not_read.setdefault(skipped.source, {})
        reasons[skipped.reason] = reasons.get(skipped.reason, 0) + skipped.count
        samples = self.samples.setdefault(f"not read: {skipped.reason}", [])
        samples += [{"source": skipped.source, "id": where, "text": what} for where, what in skipped.samples]
        del samples[SAMPLES_PER_REASON:]

    def rows(self) -> list[dict[str, str | int]]:
        """The table as flat rows: source, outcome, documents, bytes.

        Outcomes: "read", "kept", "the first only (max_documents)" where a limit left out the rest of a source, "not
        read: REASON" of a record that is no document, and the reason of a drop.
        """
        rows: list[dict[str, str | int]] = []
        for source in sorted({*self.read, *self.not_read}):
            outcomes = {"read": self.read.get(source, Tally()), "kept": self.kept.get(source, Tally())}
            if source in self.capped:
                outcomes["the first only (max_documents)"] = outcomes["read"]
            not_read = sorted(self.not_read.get(source, {}).items())
            outcomes.update({f"not read: {reason}": Tally(count) for reason, count in not_read})
            outcomes.update(sorted(self.dropped.get(source, {}).items()))
            for outcome, tally in outcomes.items():
                rows.append({"source": source, "outcome": outcome, "documents": tally.documents, "bytes": tally.bytes})
        return rows

    def __str__(self) -> str:
        """The table for people, one line a row."""
        lines = [f"{'source':<16} {'outcome':<38} {'documents':>10} {'MB':>9}"]
        for row in self.rows():
            megabytes = f"{int(row['bytes']) / 1e6:.3f}"
            lines.append(f"{row['source']:<16} {row['outcome']:<38} {row['documents']:>10} {megabytes:>9}")
        for source in sorted(self.capped):
            lines.append(
                f"max_documents: the first {self.read[source].documents} documents of {source}; more are there"
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a kept document lies in the spool, the key that orders the corpus, and the size of its text in utf-8."""

    source: str
    split: str
    order: int
    offset: int
    bytes: int


@dataclass
class Corpus:
    """Curated documents on disk. Iterate `documents(source, split)`; the order is a seeded shuffle by content."""

    spool: Path
    entries: list[Entry]
    table: CurationTable

    def sources(self) -> list[str]:
        """Names of the sources that have documents, sorted."""
        return sorted({entry.source for entry in self.entries})

    def documents(self, source: str, split: str) -> Iterator[Document]:
        """Documents of one source and split, shuffled."""
        chosen = sorted((e for e in self.entries if (e.source, e.split) == (source, split)), key=lambda e: e.order)
        with self.spool.open("rb") as file:
            for entry in chosen:
                file.seek(entry.offset)
                yield Document(**json.loads(file.readline()))


def curate(
    documents: Iterable[Document | Part | Skipped],
    work_dir: Path,
    protected_texts: Iterable[str] = (),
    settings: CurationSettings | None = None,
    engine: Engine | None = None,
    limits: Mapping[str, int] | None = None,
) -> Corpus:
    """Curate documents into a corpus whose texts lie in `work_dir`.

    A `Part` among the documents is extracted where it is judged: on a worker of `engine` (default: this process).
    Of a source in `limits` the first so many documents are taken, the rest is not read, and the table says so.
    `protected_texts` are the prompts of the evaluation sets; the held-out split is protected without being named.
    Returns the corpus with its table of drops. Peak memory grows by some 1.5 kB a document, not with their length.
    """
    settings = settings or CurationSettings()
    engine = engine or SerialEngine()
    work_dir.mkdir(parents=True, exist_ok=True)
    table = CurationTable()
    staged_path = work_dir / "normalised.jsonl"
    with staged_path.open("wb") as staged:
        ranked, signatures = _normalise_and_judge(documents, staged, table, settings, engine, limits or {})

    with staged_path.open("rb") as staged:
        near = _NearDuplicates(settings)
        survivors: list[Entry] = []
        for entry in ranked:
            signature = signatures.pop(entry.offset, None)
            twin_split = near.twin_of(signature, entry.split) if signature is not None else None
            if twin_split is None:
                survivors.append(entry)
                continue
            held_out_twin = twin_split == "valid" and entry.split == "train"
            reason = "near duplicate of held-out" if held_out_twin else "near duplicate"
            table.drop(_read(staged, entry.offset), reason)

        decontaminator = Decontaminator(n=settings.ngram, boilerplate_documents=settings.boilerplate_documents)
        decontaminator.protect(protected_texts)
        decontaminator.protect(_read(staged, entry.offset).text for entry in survivors if entry.split == "valid")
        training = [entry for entry in survivors if entry.split == "train"]
        texts = (_read(staged, entry.offset).text for entry in training)
        found = engine.map_ordered(_hits, _batches(texts), decontaminator.protected())
        suspects: dict[int, np.ndarray] = {}  # offset -> hits
        for entry, hit in zip(training, chain.from_iterable(found), strict=True):
            if len(hit):
                decontaminator.count(hit)
                suspects[entry.offset] = hit
        entries = []
        for entry in survivors:
            if entry.offset in suspects and decontaminator.is_leak(suspects[entry.offset]):
                table.drop(_read(staged, entry.offset), "overlaps held-out or evaluation text")
                continue
            table.kept.setdefault(entry.source, Tally()).add(entry.bytes)
            entries.append(entry)
    return Corpus(staged_path, entries, table)


def _read(file: BinaryIO, offset: int) -> Document:
    file.seek(offset)
    return Document(**json.loads(file.readline()))


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(islice(texts, _BATCH)):
        yield batch


def _hits(texts: list[str], protected: dict[int, np.ndarray]) -> list[np.ndarray]:
    """A task of the second pass: the protected grams in each text."""
    hasher = _hasher()
    return [hits(text, protected, hasher) for text in texts]


@cache
def _hasher() -> GramHasher:
    return GramHasher()  # its cache of word hashes lasts as long as the process


@dataclass(frozen=True, slots=True)
class _Judged:
    """What a task of the first pass says of one document; only of a good one all that follows `reason`."""

    source: str
    size: int  # of the text in utf-8
    document: Document | None  # a bad one, for the table
    reason: str | None = None
    line: bytes = b""  # of the spool
    split: Split = "train"
    id: str = ""
    digest: bytes = b""
    order: int = 0
    signature: RMinHash | None = None


@dataclass(frozen=True, slots=True)
class _Stop:
    """A record that stops the curation, unless so many documents of its source are not wanted."""

    source: str | None
    error: UserError


def _judge(part: Part, settings: CurationSettings) -> list[_Judged | Skipped | _Stop]:
    """A task of the first pass: extract, normalise, judge, sign."""
    judged: list[_Judged | Skipped | _Stop] = []
    for document in _until_error(part):
        if isinstance(document, _Stop):
            judged.append(document)
            continue
        if isinstance(document, Skipped):
            judged.append(document)
            continue
        document = Document(document.source, document.id, normalise(document.text), document.kind, document.split)
        size = len(document.text.encode())
        if reason := defect(document.text, document.kind):
            judged.append(_Judged(document.source, size, document, reason))
            continue
        record = {name: getattr(document, name) for name in Document.__slots__}
        judged.append(
            _Judged(
                document.source,
                size,
                None,
                line=json.dumps(record, ensure_ascii=False).encode() + b"\n",
                split=document.split,
                id=document.id,
                digest=hashlib.blake2b(" ".join(document.text.split()).encode(), digest_size=16).digest(),
                order=stable_hash("order", str(settings.seed), document.text),
                # Instances of one template are near-duplicates of each other by design.
                signature=None if document.kind == "task" else _signature(document.text, settings),
            )
        )
    return judged


def _until_error(part: Part) -> Iterator[Document | Skipped | _Stop]:
    # Another worker may read on in a source while its last document that is wanted is still on its way.
    try:
        yield from part.documents()
    except UserError as error:
        yield _Stop(part.source, error)


def _normalise_and_judge(
    documents: Iterable[Document | Part | Skipped],
    staged: BinaryIO,
    table: CurationTable,
    settings: CurationSettings,
    engine: Engine,
    limits: Mapping[str, int],
) -> tuple[list[Entry], dict[int, RMinHash]]:
    """Write what is worth a closer look to `staged`.

    Returns it with held-out documents first, then by content, and the signatures by offset.
    """
    best: dict[bytes, tuple[tuple[bool, str, str], Entry]] = {}  # text digest -> who keeps it
    signatures: dict[int, RMinHash] = {}
    losers: list[int] = []
    full: set[str | None] = set()  # sources that have reached their limit

    def wanted() -> Iterator[Document | Part | Skipped]:
        for item in documents:
            if item.source not in full:
                yield item
            elif item.source is not None and not isinstance(item, Skipped):
                table.capped.add(item.source)

    for judged in chain.from_iterable(engine.map_ordered(_judge, _as_parts(wanted()), settings)):
        if judged.source in full:
            if judged.source is not None and not isinstance(judged, Skipped):
                table.capped.add(judged.source)
            continue
        if isinstance(judged, _Stop):
            raise judged.error
        if isinstance(judged, Skipped):
            table.skip(judged)
            continue
        read = table.read.setdefault(judged.source, Tally())
        read.add(judged.size)
        if read.documents == limits.get(judged.source):
            full.add(judged.source)
        if judged.document is not None:
            table.drop(judged.document, str(judged.reason))
            continue
        offset = staged.tell()
        staged.write(judged.line)
        # Of equal texts the held-out one stays.
        rank = (judged.split == "train", judged.source, judged.id)
        entry = Entry(judged.source, judged.split, judged.order, offset, judged.size)
        known = best.get(judged.digest)
        if known is not None and known[0] <= rank:
            losers.append(offset)
            continue
        if known is not None:
            losers.append(known[1].offset)
            signatures.pop(known[1].offset, None)
        best[judged.digest] = (rank, entry)
        if judged.signature is not None:
            signatures[offset] = judged.signature
    staged.flush()
    if losers:
        with Path(staged.name).open("rb") as file:
            for dropped in sorted((_read(file, offset) for offset in losers), key=lambda d: (d.source, d.id)):
                table.drop(dropped, "exact duplicate")
    return sorted((entry for _, entry in best.values()), key=lambda e: (e.split == "train", e.order)), signatures


def _as_parts(documents: Iterable[Document | Part | Skipped]) -> Iterator[Part]:
    """Parts as they are; documents between them in parts of their own."""
    for is_part, items in groupby(documents, lambda item: isinstance(item, Part)):
        if is_part:
            yield from items  # type: ignore[misc]
        else:
            yield from in_parts(items, _BATCH)  # type: ignore[arg-type]


def _signature(text: str, settings: CurationSettings) -> RMinHash:
    """MinHash over word shingles."""
    size = settings.shingle_words
    tokens = words(text)
    signature = RMinHash(num_perm=settings.num_permutations, seed=settings.seed)
    signature.update([" ".join(tokens[i : i + size]) for i in range(max(1, len(tokens) - size + 1))])
    return signature


class _NearDuplicates:
    """MinHash signatures in a banded index; the first document of a cluster stays."""

    def __init__(self, settings: CurationSettings) -> None:
        self._settings = settings
        self._index = RMinHashLSH(settings.near_duplicate_jaccard, settings.num_permutations, settings.num_bands)
        self._signatures: list[RMinHash] = []
        self._splits: list[str] = []

    def twin_of(self, signature: RMinHash, split: str) -> str | None:
        """Split of an earlier document that is nearly this one (held-out first); None if new, and then remembered."""
        twins = {
            self._splits[key]
            for key in self._index.query(signature)
            if self._signatures[key].jaccard(signature) >= self._settings.near_duplicate_jaccard
        }
        if twins:
            return "valid" if "valid" in twins else "train"
        self._index.insert(len(self._signatures), signature)
        self._signatures.append(signature)
        self._splits.append(split)
        return None
