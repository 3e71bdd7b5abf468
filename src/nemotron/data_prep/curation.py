"""Curation: normalise, judge, deduplicate exactly and nearly, decontaminate; keep a table of what was dropped and why.

Held-out documents go first, so that a text that exists on both sides of the split stays held out and leaves training.
Texts are kept in a spool on disk; memory holds a digest, a MinHash signature and an offset per document. The result
does not depend on the order in which documents arrive: everything that chooses (which of two duplicates stays, the
order of the corpus) goes by content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from rensa import RMinHash, RMinHashLSH

from nemotron.data_prep.decontamination import Decontaminator, words
from nemotron.data_prep.documents import Document, stable_hash
from nemotron.data_prep.quality import defect, normalise

SAMPLES_PER_REASON = 3
SAMPLE_CHARS = 160


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

    def add(self, text: str) -> None:
        """Count one text."""
        self.documents += 1
        self.bytes += len(text.encode())


@dataclass
class CurationTable:
    """What came in, what was kept and what was dropped, by source and reason, with a few samples of each reason."""

    read: dict[str, Tally] = field(default_factory=dict)
    kept: dict[str, Tally] = field(default_factory=dict)
    dropped: dict[str, dict[str, Tally]] = field(default_factory=dict)  # source -> reason -> tally
    samples: dict[str, list[dict[str, str]]] = field(default_factory=dict)  # reason -> [{id, text}]

    def drop(self, document: Document, reason: str) -> None:
        """Record one dropped document."""
        self.dropped.setdefault(document.source, {}).setdefault(reason, Tally()).add(document.text)
        samples = self.samples.setdefault(reason, [])
        excerpt = " ".join(document.text[: 4 * SAMPLE_CHARS].split())[:SAMPLE_CHARS]
        samples.append({"source": document.source, "id": document.id, "text": excerpt})
        samples.sort(key=lambda sample: (sample["source"], sample["id"]))
        del samples[SAMPLES_PER_REASON:]

    def rows(self) -> list[dict[str, str | int]]:
        """The table as flat rows: source, outcome ("read", "kept" or the reason of the drop), documents, bytes."""
        rows: list[dict[str, str | int]] = []
        for source in sorted(self.read):
            outcomes = {"read": self.read[source], "kept": self.kept.get(source, Tally())}
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
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a kept document lies in the spool, with the key that orders the corpus."""

    source: str
    split: str
    order: int
    offset: int


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
    documents: Iterable[Document],
    work_dir: Path,
    protected_texts: Iterable[str] = (),
    settings: CurationSettings | None = None,
) -> Corpus:
    """Curate a stream of documents into a corpus whose texts lie in `work_dir`.

    `protected_texts` are the prompts of the evaluation sets; the held-out split is protected without being named.
    Returns the corpus with its table of drops. Peak memory grows by some 1.5 kB a document, not with their length.
    """
    settings = settings or CurationSettings()
    work_dir.mkdir(parents=True, exist_ok=True)
    table = CurationTable()
    staged_path = work_dir / "normalised.jsonl"
    with staged_path.open("wb") as staged:
        ranked = _normalise_and_judge(documents, staged, table, settings.seed)

    decontaminator = Decontaminator(n=settings.ngram, boilerplate_documents=settings.boilerplate_documents)
    decontaminator.protect(protected_texts)
    near = _NearDuplicates(settings)
    survivors: list[Entry] = []
    suspects: set[int] = set()
    with staged_path.open("rb") as staged:
        for entry in ranked:
            document = _read(staged, entry.offset)
            if document.kind != "task":  # instances of one template are near-duplicates of each other by design
                twin_split = near.twin_of(document)
                if twin_split is not None:
                    held_out_twin = twin_split == "valid" and document.split == "train"
                    table.drop(document, "near duplicate of held-out" if held_out_twin else "near duplicate")
                    continue
            if document.split == "valid":
                decontaminator.protect([document.text])
            elif decontaminator.observe(document.text):
                suspects.add(len(survivors))
            survivors.append(entry)
        entries = []
        for index, entry in enumerate(survivors):
            document = _read(staged, entry.offset)
            if index in suspects and decontaminator.is_contaminated(document.text):
                table.drop(document, "overlaps held-out or evaluation text")
                continue
            table.kept.setdefault(document.source, Tally()).add(document.text)
            entries.append(entry)
    return Corpus(staged_path, entries, table)


def _read(file: BinaryIO, offset: int) -> Document:
    file.seek(offset)
    return Document(**json.loads(file.readline()))


def _normalise_and_judge(
    documents: Iterable[Document], staged: BinaryIO, table: CurationTable, seed: int
) -> list[Entry]:
    """Write what is worth a closer look to `staged`; return it with held-out documents first, then by content."""
    best: dict[bytes, tuple[tuple[bool, str, str], Entry]] = {}  # text digest -> who keeps it
    losers: list[int] = []
    for document in documents:
        document = Document(document.source, document.id, normalise(document.text), document.kind, document.split)
        table.read.setdefault(document.source, Tally()).add(document.text)
        if reason := defect(document.text, document.kind):
            table.drop(document, reason)
            continue
        digest = hashlib.blake2b(" ".join(document.text.split()).encode(), digest_size=16).digest()
        order = stable_hash("order", str(seed), document.text)
        offset = staged.tell()
        rank = (document.split == "train", document.source, document.id)  # of equal texts the held-out one stays
        entry = Entry(document.source, document.split, order, offset)
        if digest in best and best[digest][0] <= rank:
            losers.append(offset)
        else:
            if digest in best:
                losers.append(best[digest][1].offset)
            best[digest] = (rank, entry)
        record = {name: getattr(document, name) for name in Document.__slots__}
        staged.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    staged.flush()
    if losers:
        with Path(staged.name).open("rb") as file:
            for dropped in sorted((_read(file, offset) for offset in losers), key=lambda d: (d.source, d.id)):
                table.drop(dropped, "exact duplicate")
    return sorted((entry for _, entry in best.values()), key=lambda e: (e.split == "train", e.order))


class _NearDuplicates:
    """MinHash signatures over word shingles in a banded index; the first document of a cluster stays."""

    def __init__(self, settings: CurationSettings) -> None:
        self._settings = settings
        self._index = RMinHashLSH(settings.near_duplicate_jaccard, settings.num_permutations, settings.num_bands)
        self._signatures: list[RMinHash] = []
        self._splits: list[str] = []

    def twin_of(self, document: Document) -> str | None:
        """Split of an earlier document that is nearly this one (held-out first); None if new, and then remembered."""
        size = self._settings.shingle_words
        tokens = words(document.text)
        signature = RMinHash(num_perm=self._settings.num_permutations, seed=self._settings.seed)
        signature.update([" ".join(tokens[i : i + size]) for i in range(max(1, len(tokens) - size + 1))])
        twins = {
            self._splits[key]
            for key in self._index.query(signature)
            if self._signatures[key].jaccard(signature) >= self._settings.near_duplicate_jaccard
        }
        if twins:
            return "valid" if "valid" in twins else "train"
        self._index.insert(len(self._signatures), signature)
        self._signatures.append(signature)
        self._splits.append(document.split)
        return None
