"""The first step of a curation: documents of any origin to document shards.

Files (`ingest_files`) are read by tasks, a shard each; documents that a recipe generates (`ingest_documents`) are
written by the driver. Both are normalised, and get the fields that later steps go by:

    source   name that the weights of a blend refer to
    kind     which quality heuristics apply
    split    train or valid; what is held out stays where it is in doubt, and protects itself (see `decontamination`)

A source is a plan of its own, in a folder of its own, and its shards are called `SOURCE-00000`. A task that reads much
text, as of one large compressed file, writes several: `SOURCE-00000_00001` and so on. The next step has a task each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.extraction import page_text
from nemotron.data_prep.curation.step import Document, DocumentWriter, StepTable, output_name
from nemotron.data_prep.sources.documents import normalise, split_of
from nemotron.data_prep.sources.files import SourceFile
from nemotron.data_prep.sources.planning import SourceInput, SourceWork, make_plan
from nemotron.data_prep.sources.reader import read_piece, row_id
from nemotron.data_prep.sources.reading import BEYOND_SCALE, BadRecordError, Reading, ReadReport
from nemotron.data_prep.work.engines import Engine, SerialEngine
from nemotron.data_prep.work.progress import Progress
from nemotron.data_prep.work.shards import Plan, Shard, ShardOutput, freeze, run_shards

NOT_READ = "not read: "
MORE = "the first only (max_documents)"
"""Remark at every document of a source that holds more than were asked for."""
SKIP_HINT = "on_error: skip leaves such out and counts them"
_SHARD_BYTES = 16 << 20
_TEXT_BYTES = 64 << 20
"""Of text: a document shard with as much is full."""
_SHARD_DOCUMENTS = 512


@dataclass(frozen=True, slots=True)
class DocumentSource:
    """A named source of files. `valid_fraction`: share held out, by hash of the text as it was read.

    `max_documents`: the first so many, in the order of sorted paths.
    """

    name: str
    reading: Reading
    kind: str
    valid_fraction: float = 0.0
    max_documents: int | None = None


def ingest_files(
    source: DocumentSource, files: Sequence[SourceFile], seed: int, work_dir: Path, engine: Engine
) -> StepTable:
    """Write the documents of files to `work_dir`.

    Raises:
        UserError: a record that is not right, under `stop`; there is no document at all. That none is within the scale
            is for the caller to say (`check_scale`).
    """
    settings = {"step": "documents", "source": asdict(source), "seed": seed}
    # The first documents are those that one task meets first.
    num_shards = None if source.max_documents is None else 1
    inputs = [SourceInput(source.name, files, source.max_documents)]
    plan = make_plan(settings, inputs, shard_bytes=_SHARD_BYTES, num_shards=num_shards)
    freeze(plan, work_dir)
    table = StepTable()
    with Progress(f"read {source.name}", sum(file.size for file in files), "document") as progress:
        receipts = run_shards(plan, work_dir, _ingest_shard, (source, seed), engine, StepTable)
        for shard, (receipt, was_done) in zip(plan.shards, receipts, strict=True):
            progress.add(rows=receipt.counts.read.documents, bytes=shard.work.stored_bytes, was_done=was_done)
            table.merge(receipt.counts)
    if not table.read.documents and NOT_READ + BEYOND_SCALE not in table.dropped:
        raise UserError(
            f"source {source.name!r} is empty: no document in {len(files)} files, the first of them {files[0].name}",
            ", ".join(f"{tally.documents} {reason}" for reason, tally in sorted(table.dropped.items())) or None,
        )
    return table


def _ingest_shard(shard: Shard[SourceWork], job: tuple[DocumentSource, int], output: ShardOutput) -> StepTable:
    source, seed = job
    table, report = StepTable(), ReadReport()
    documents = _documents(shard.work, source, seed, report)
    wanted = islice(documents, shard.work.max_documents)
    for number in count():
        part = replace(shard, name=f"{shard.name}_{number:05d}") if number else shard
        with DocumentWriter(output.path(output_name(part))) as writer:
            for document in wanted:
                table.read.add(document)
                table.keep(document)
                writer.write(document)
                if writer.tally.bytes >= _TEXT_BYTES:
                    break
            else:
                break
    if shard.work.max_documents is not None:
        try:
            more = next(documents, None) is not None
        except UserError:  # what is behind the cap stops nobody
            more = True
        if more:
            table.noted[MORE] = table.kept
    for reason, records in report.skipped.items():
        table.count_unread(NOT_READ + reason, records, report.samples_of(reason))
    return table


def _documents(work: SourceWork, source: DocumentSource, seed: int, report: ReadReport) -> Iterator[Document]:
    for piece in work.pieces:
        reading = source.reading
        if piece.file.format == "warc":  # pages have html, and others text
            reading = replace(reading, columns={}, required=())
        try:
            for row in read_piece(piece, reading, report):
                text = row.value["text"] if "text" in row.value else page_text(row.value["html"], row.value["url"])
                if isinstance(text, str):
                    yield {
                        "id": f"{source.name}:{row_id(piece, row.index)}",
                        "text": normalise(text),
                        "source": source.name,
                        "kind": source.kind,
                        "split": split_of(text, source.valid_fraction, seed),
                    }
                else:
                    report.skip(text.reason, row_id(piece, row.index), str(row.value["url"]))
        except BadRecordError as error:
            raise UserError(error.message, "; ".join(filter(None, (error.hint, SKIP_HINT)))) from error


# --- Documents that are there already ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slice:
    """Documents [begin, end) of those that were handed over."""

    begin: int
    end: int


def ingest_documents(name: str, documents: Sequence[Mapping[str, Any]], work_dir: Path) -> StepTable:
    """Write documents, which have all fields, to `work_dir`. `name`: of the source, and of its shards."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(repr(sorted(document.items())).encode("utf-8", "surrogatepass"))
    borders = [*range(0, len(documents), _SHARD_DOCUMENTS), len(documents)]
    shards = [Shard(f"{name}-{i:05d}", Slice(*border)) for i, border in enumerate(pairwise(borders))]
    plan = Plan({"step": "documents", "digest": digest.hexdigest()}, [], shards)
    freeze(plan, work_dir)
    table = StepTable()
    for receipt, _ in run_shards(plan, work_dir, _ingest_slice, documents, SerialEngine(), StepTable):
        table.merge(receipt.counts)
    return table


def _ingest_slice(shard: Shard[Slice], documents: Sequence[Mapping[str, Any]], output: ShardOutput) -> StepTable:
    table = StepTable()
    with DocumentWriter(output.path(output_name(shard))) as writer:
        for document in documents[shard.work.begin : shard.work.end]:
            normal = {**document, "text": normalise(document["text"])}
            table.read.add(normal)
            table.keep(normal)
            writer.write(normal)
    return table
