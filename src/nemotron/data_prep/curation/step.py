"""What all steps of a curation share: document shards, a task a shard, a table of what was dropped, an artifact.

A step reads the document shards of the step before it and writes shards of the same names::

    with open_step(cfg, __file__) as step:
        with step.run.phase("identify"):
            table = step.filter(judge, settings)
        step.publish(table)

`judge(document, settings)` is a module's function that returns `Keep(document)` or `Drop("reason")`. A step that is
killed goes on where it was: a shard with a receipt is not done again (see `shards.py`).

**Documents** are JSON objects, one a line, in zstd-compressed files `documents/NAME.jsonl.zst`. Each has `id` (unique;
says where it is from) and `text`, strings both; web documents have `url`, and steps add `source`, `language`,
`language_score`, `quality`, `bucket` and so on.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from nemo_runspec.errors import RunFailed, UserError
from nemo_runspec.words import counted
from nemotron.data_prep.sources.documents import stable_hash
from nemotron.data_prep.work.engines import Engine, open_engine
from nemotron.data_prep.work.progress import Progress
from nemotron.data_prep.work.shards import (
    RECEIPTS,
    InputFile,
    Plan,
    Shard,
    ShardOutput,
    freeze,
    publish_file,
    restore,
    run_shards,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

    from nemotron.kit import Run, Source

Document = dict[str, Any]
"""A document between two steps: `id`, `text` and what steps have added."""
Shared = TypeVar("Shared")
Work = TypeVar("Work")
SettingsT = TypeVar("SettingsT", bound="BaseModel")

DOCUMENTS, SUFFIX = "documents", ".jsonl.zst"
SAMPLES_PER_REASON = 5
SAMPLE_CHARS = 160
DROPPED = "dropped: "
_CHUNK = 1 << 20  # bytes handed to or taken from the codec at a time


# --- Document shards ------------------------------------------------------------------------------------------------


def list_documents(path: Path) -> list[Path]:
    """The document shards of a step's artifact (`path`, its payload) or of a folder, by name; UserError if none."""
    folder = path / DOCUMENTS if (path / DOCUMENTS).is_dir() else path
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise UserError(f"{folder}: no document shards (*{SUFFIX}) there")
    return files


def read_documents(path: Path) -> Iterator[Document]:
    """Yield the documents of one shard, one at a time.

    UserError for a file that is no whole zstd stream and for a line that is no document, with its number; RunFailed
    for one that the system does not let be read.
    """
    import pyarrow as pa

    try:
        with io.BufferedReader(pa.CompressedInputStream(str(path), "zstd"), _CHUNK) as lines:
            for number, line in enumerate(lines, start=1):
                yield _document(line, f"{path}:{number}")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:  # pyarrow's, without errno: truncated or flipped bytes
        if error.errno is not None:
            raise RunFailed(f"{path}: cannot read: {os.strerror(error.errno)}") from error
        raise UserError(f"{path}: not a whole zstd file: {error}") from error


def _document(line: bytes, where: str) -> Document:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: malformed JSON: {error}") from error
    if not isinstance(document, dict):
        raise UserError(f"{where}: expected a JSON object, found {type(document).__name__}")
    for key in ("id", "text"):
        if not isinstance(document.get(key), str):
            raise UserError(f"{where}: no string {key!r} in this document")
    return document


class DocumentWriter:
    """Writes one document shard; use as a context manager. `tally` counts what was written."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self.tally = Tally()
        self._file = io.BufferedWriter(pa.CompressedOutputStream(str(path), "zstd"), _CHUNK)

    def write(self, document: Mapping[str, Any]) -> None:
        """Append one document, keys in the given order."""
        self.tally.add(document)
        try:
            line = json.dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell and utf-8 cannot
            line = json.dumps(document).encode()
        self._file.write(line + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def write_documents(path: Path, documents: Iterable[Mapping[str, Any]]) -> Tally:
    """Write one document shard; returns documents and bytes of text in it."""
    with DocumentWriter(path) as writer:
        for document in documents:
            writer.write(document)
    return writer.tally


# --- What was dropped and why ---------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Documents and the utf-8 bytes of their texts."""

    documents: int = 0
    bytes: int = 0

    def add(self, document: Mapping[str, Any]) -> None:
        """Count one document."""
        self.add_bytes(len(document["text"].encode("utf-8", "surrogatepass")))

    def add_bytes(self, num_bytes: int) -> None:
        """Count one document of so many bytes (a page, say, that is no text yet)."""
        self.documents += 1
        self.bytes += num_bytes

    def merge(self, other: Tally) -> None:
        """Add what another one counted."""
        self.documents += other.documents
        self.bytes += other.bytes


def excerpt(text: str) -> str:
    """The beginning of a text in one line, for samples."""
    return " ".join(text[: 4 * SAMPLE_CHARS].split())[:SAMPLE_CHARS]


@dataclass
class StepTable:
    """What a step read, kept and dropped, by reason, with some samples of each reason; mergeable in any order.

    `noted`: documents that were kept with a remark (an e-mail address replaced, a bucket), by remark.
    `samples`: reason -> the dropped documents with the smallest hashes, so that they are the same however shards were
    cut and whatever order they came in.
    """

    read: Tally = field(default_factory=Tally)
    kept: Tally = field(default_factory=Tally)
    dropped: dict[str, Tally] = field(default_factory=dict)
    noted: dict[str, Tally] = field(default_factory=dict)
    samples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def keep(self, document: Mapping[str, Any], notes: Iterable[str] = ()) -> None:
        """Count a document that stays."""
        self.kept.add(document)
        for note in notes:
            self.noted.setdefault(note, Tally()).add(document)

    def drop(self, document: Mapping[str, Any], reason: str, detail: str = "", num_bytes: int | None = None) -> None:
        """Count a document that goes. `detail` (the twin's id, the passage) stands beside its sample.

        `num_bytes`: what to count it as, where that is not the length of its text.
        """
        tally = self.dropped.setdefault(reason, Tally())
        if num_bytes is None:
            tally.add(document)
        else:
            tally.add_bytes(num_bytes)
        sample = {"id": str(document["id"]), "text": excerpt(document["text"])} | ({"detail": detail} if detail else {})
        self._add_samples(reason, [sample])

    def count_unread(self, reason: str, count: int, samples: Sequence[Mapping[str, str]]) -> None:
        """Count records that no document was made of; `samples`: {"where", "reason"} of some."""
        self.dropped.setdefault(reason, Tally()).merge(Tally(count))
        self._add_samples(reason, [{"id": sample["where"], "text": sample["reason"]} for sample in samples])

    def merge(self, other: StepTable) -> None:
        """Add what another table counted."""
        self.read.merge(other.read)
        self.kept.merge(other.kept)
        for mine, theirs in ((self.dropped, other.dropped), (self.noted, other.noted)):
            for name, tally in theirs.items():
                mine.setdefault(name, Tally()).merge(tally)
        for reason, samples in other.samples.items():
            self._add_samples(reason, samples)

    def _add_samples(self, reason: str, samples: list[dict[str, str]]) -> None:
        known = self.samples.setdefault(reason, [])
        known.extend(samples)
        known.sort(key=lambda sample: (stable_hash("sample", sample["id"]), sample["id"]))
        del known[SAMPLES_PER_REASON:]

    def to_json(self) -> dict[str, Any]:
        """For the metrics of the artifact; reasons in alphabetical order."""
        return {name: dict(sorted(part.items())) for name, part in asdict(self).items()}

    def outcomes(self) -> Iterator[tuple[str, Tally]]:
        """What became of the documents, in the order in which people read it: read, kept, remarks, reasons of drops."""
        yield "read", self.read
        yield "kept", self.kept
        for note, tally in sorted(self.noted.items()):
            yield f"  {note}", tally
        for reason, tally in sorted(self.dropped.items()):
            yield f"{DROPPED}{reason}", tally

    def __str__(self) -> str:
        """For people: a line for read, kept, every reason and every note, with one sample a reason."""
        lines = [f"{'outcome':<38} {'documents':>10} {'MB':>9}"]
        for outcome, tally in self.outcomes():
            lines.append(f"{outcome:<38} {tally.documents:>10} {tally.bytes / 1e6:>9.3f}")
            if outcome.startswith(DROPPED):
                for sample in self.samples.get(outcome.removeprefix(DROPPED), [])[:1]:
                    detail = f" ({sample['detail'][:60]})" if "detail" in sample else ""
                    lines.append(f"    {sample['id']}: {sample['text'][:80]}{detail}")
        return "\n".join(lines)


# --- A task a shard -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Keep:
    """The document stays, as given here. `notes` are counted in the table ("email", "bucket 12")."""

    document: Document
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Drop:
    """The document goes. `reason`: a short name, one of few; `detail`: whatever helps to understand this very case."""

    reason: str
    detail: str = ""


Judge = Callable[[Document, Shared], "Keep | Drop"]


DocumentShard = Shard[Path]
"""The work of a task is the document shard that it reads."""


def plan_step(input_files: Sequence[Path], settings: Mapping[str, Any]) -> Plan[Path]:
    """One shard of work for each input file, named as the file is.

    Args:
        input_files: what `list_documents` gave. Their names must differ.
        settings: JSON; everything that decides about the output besides the files.
    """
    shards, names = [], set()
    for path in input_files:
        name = path.name.removesuffix(SUFFIX)
        if name in names:
            raise UserError(f"{path}: another input file is called {name}, too", "rename one of them")
        names.add(name)
        shards.append(Shard(name, path))
    return Plan(settings=dict(settings), inputs=[_identity(path) for path in input_files], shards=shards)


def _identity(path: Path) -> InputFile:
    status = path.stat()
    return InputFile(str(path), status.st_size, str(status.st_mtime_ns))


def output_name(shard: Shard[Any]) -> str:
    """What a task calls the document shard that it writes."""
    return f"{DOCUMENTS}/{shard.name}{SUFFIX}"


def filter_shards(plan: Plan[Path], work_dir: Path, judge: Judge[Shared], shared: Shared, engine: Engine) -> StepTable:
    """Judge every document of every shard by itself and write those that stay.

    Returns the table of the whole step, also of what an earlier attempt did. Raises what `freeze`, `run_shards` and
    `judge` raise.
    """
    return collect(plan, work_dir, _filter_shard, (judge, shared), engine)


def collect(
    plan: Plan[Work],
    work_dir: Path,
    function: Callable[[Shard[Work], Shared, ShardOutput], StepTable],
    shared: Shared,
    engine: Engine,
) -> StepTable:
    """Run a task a shard, whatever it does, and add up the tables that the tasks return.

    Shows on stderr how far it is, by the bytes of the input files.
    """
    freeze(plan, work_dir)
    table = StepTable()
    total_bytes = sum(file.size for file in plan.inputs)
    with Progress(str(plan.settings.get("step", "documents")), total_bytes, "document") as progress:
        receipts = run_shards(plan, work_dir, function, shared, engine, StepTable)
        for file, (receipt, was_done) in zip(plan.inputs, receipts, strict=True):
            progress.add(rows=receipt.counts.read.documents, bytes=file.size, was_done=was_done)
            table.merge(receipt.counts)
    return table


def tables_by_source(work_dirs: Sequence[Path]) -> dict[str, StepTable]:
    """What became of the documents of each source in steps that follow each other: read by the first, kept by the last.

    A shard's name begins with that of its source and `-`; of a source that skips a step, the others count.
    """
    tables: dict[str, StepTable] = {}
    for work_dir in work_dirs:
        of_step: dict[str, StepTable] = {}
        for path in sorted((work_dir / RECEIPTS).glob("*.json")):
            receipt = json.loads(path.read_text(encoding="utf-8"))
            source = receipt["shard"].partition("-")[0]
            of_step.setdefault(source, StepTable()).merge(restore(StepTable, receipt["counts"]))
        for source, table in of_step.items():
            whole = tables.setdefault(source, StepTable(read=table.read))
            whole.merge(StepTable(dropped=table.dropped, noted=table.noted, samples=table.samples))
            whole.kept = table.kept
    return tables


def source_rows(tables: Mapping[str, StepTable]) -> list[dict[str, str | int]]:
    """Tables by source as flat rows: source, outcome, documents, bytes of text in utf-8.

    An outcome is `read`, `kept`, a remark about some that were not dropped, `note: REMARK`, or the reason of a drop.
    """
    return [
        {"source": source, "outcome": outcome, "documents": tally.documents, "bytes": tally.bytes}
        for source, table in sorted(tables.items())
        for outcome, tally in [
            ("read", table.read),
            ("kept", table.kept),
            *((f"note: {note}", tally) for note, tally in sorted(table.noted.items())),
            *sorted(table.dropped.items()),
        ]
    ]


def source_samples(tables: Mapping[str, StepTable]) -> dict[str, list[dict[str, str]]]:
    """The samples of every reason: source, id, text, and a detail where there is one."""
    samples: dict[str, list[dict[str, str]]] = {}
    for source, table in sorted(tables.items()):
        for reason, of_reason in table.samples.items():
            samples.setdefault(reason, []).extend({"source": source, **sample} for sample in of_reason)
    return dict(sorted(samples.items()))


def source_table(tables: Mapping[str, StepTable]) -> str:
    """Tables by source, for people."""
    lines = [f"{'source':<16} {'outcome':<38} {'documents':>10} {'MB':>9}"]
    for row in source_rows(tables):
        megabytes = f"{int(row['bytes']) / 1e6:.3f}"
        lines.append(f"{row['source']:<16} {row['outcome']:<38} {row['documents']:>10} {megabytes:>9}")
    return "\n".join(lines)


def _filter_shard(shard: DocumentShard, job: tuple[Judge[Any], Any], output: ShardOutput) -> StepTable:
    judge, shared = job
    table = StepTable()
    with DocumentWriter(output.path(output_name(shard))) as writer:
        for document in read_documents(shard.work):
            table.read.add(document)
            before = dict(document)  # a judge may well change the one that it was given
            verdict = judge(document, shared)
            if isinstance(verdict, Drop):
                table.drop(before, verdict.reason, verdict.detail)
                continue
            table.keep(verdict.document, verdict.notes)
            writer.write(verdict.document)
    return table


# --- A step under way -----------------------------------------------------------------------------------------------


class StepRun:
    """A step that is under way, as `open_step` gives it. `work_dir`: where its tasks write."""

    def __init__(self, run: Run, engine: Engine) -> None:
        self.run = run
        self.engine = engine
        self.work_dir = run.dir / "work"

    def documents(self) -> list[Path]:
        """The document shards of the step before (`run.data`)."""
        from nemotron.kit import Dataset

        return list_documents(Dataset.load(self.run.config["run"]["data"]).path)

    def filter(self, judge: Judge[SettingsT], settings: SettingsT) -> StepTable:
        """Judge every document by itself: see `filter_shards`."""
        plan = plan_step(self.documents(), {"step": self.run.spec.script_path.stem, **settings.model_dump()})
        return filter_shards(plan, self.work_dir, judge, settings, self.engine)

    def publish(
        self,
        table: StepTable,
        metrics: Mapping[str, Any] | None = None,
        files: Mapping[str, Path] | None = None,
        sources: Sequence[Source] = (),
    ) -> None:
        """Publish the document shards in `work_dir` as the Dataset that `run.output` names; then remove `work_dir`.

        Shows `table` and what was published.

        Args:
            metrics: what the step measured besides `table`, whose JSON is the metric `table`.
            files: more files for the payload, by name there.
            sources: raw material that no artifact stands behind.

        Raises:
            RunFailed: nothing was kept. The message has the most frequent reason.
        """
        from nemotron.kit import Dataset, print_complete

        print(table, file=sys.stderr)
        if not table.kept.documents:
            most = max(table.dropped, key=lambda reason: table.dropped[reason].documents, default="nothing was read")
            raise RunFailed(f"none of {table.read.documents} documents is left", f"most frequent reason: {most}")
        output_dir = self.run.output_dir
        shutil.rmtree(output_dir, ignore_errors=True)
        for path in sorted((self.work_dir / DOCUMENTS).glob(f"*{SUFFIX}")):
            publish_file(path, output_dir / DOCUMENTS / path.name)
        for name, path in (files or {}).items():
            publish_file(path, output_dir / name)
        dataset = Dataset(
            path=output_dir,
            num_examples=table.kept.documents,
            train_path=output_dir / DOCUMENTS,
            metrics={"table": table.to_json(), **(metrics or {})},
            sources=list(sources),
        )
        dataset.save(move=True)
        shutil.rmtree(self.work_dir, ignore_errors=True)
        print(f"{dataset.ref}: {counted(table.kept.documents, 'document')}", file=sys.stderr)
        print_complete({"data": dataset})


@contextmanager
def open_step(config: BaseModel, script: str) -> Iterator[StepRun]:
    """The run of a step, and an engine for its tasks. `script`: the step's `__file__`."""
    from nemotron.kit import open_run

    with open_engine() as engine, open_run(config, script=script) as run:
        yield StepRun(run, engine)
