"""The user's own data: paths or globs of JSONL, Parquet and text files, read as a stream."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nemo_runspec.errors import UserError, nearest
from nemotron.data_prep.documents import Document, Kind, split_of
from nemotron.data_prep.jsonl import read_jsonl

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
SUFFIXES = (".jsonl", ".parquet", *TEXT_SUFFIXES)
_MAX_TEXT_CHARS = 100_000  # a longer text file becomes several documents, cut at blank lines


@dataclass(frozen=True, slots=True)
class UserSource:
    """A named source of the user's documents.

    `paths`: files or globs (`**` included). `text_field`: column of JSONL and Parquet files. `max_documents`: read at
    most so many, in the order of sorted paths. `valid_fraction`: share held out, by hash of the text.
    """

    name: str
    paths: tuple[str, ...]
    kind: Kind = "prose"
    text_field: str = "text"
    valid_fraction: float = 0.02
    max_documents: int | None = None


def expand_paths(patterns: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Files behind paths and globs, sorted and without repetition, so that the order in the config does not matter.

    UserError: a path that does not exist, a glob that matches nothing, a directory, a file type that is not read.
    """
    found: set[Path] = set()
    for pattern in patterns:
        expanded = Path(pattern).expanduser()
        if glob.has_magic(pattern) and not expanded.exists():
            names = glob.glob(str(expanded), recursive=True)  # noqa: PTH207  Path.glob takes no absolute pattern
            matches = [path for path in map(Path, names) if path.is_file()]
            if not matches:
                raise UserError(f"no file matches {pattern}")
        elif expanded.is_dir():
            raise UserError(f"{pattern} is a directory", f"give a glob, such as {pattern.rstrip('/')}/*.jsonl")
        elif not expanded.is_file():
            siblings = [p.name for p in expanded.parent.iterdir()] if expanded.parent.is_dir() else []
            guess = nearest(expanded.name, siblings)
            raise UserError(f"no such file: {pattern}", f"did you mean {expanded.parent / guess}?" if guess else None)
        else:
            matches = [expanded]
        for path in matches:
            if path.suffix.lower() not in suffixes:
                raise UserError(
                    f"cannot read {path}: unknown file type {path.suffix!r}", f"known: {', '.join(suffixes)}"
                )
        found.update(matches)
    return sorted(found)


def file_digests(paths: Sequence[Path]) -> list[dict[str, str | int]]:
    """Path, size in bytes and sha256 of every file, for the lineage of what is made from them."""
    digests: list[dict[str, str | int]] = []
    for path in paths:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        digests.append({"path": str(path), "bytes": path.stat().st_size, "sha256": sha256})
    return digests


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number from 1, row) of a JSONL or Parquet file, as a stream. UserError for a malformed one."""
    if path.suffix.lower() == ".jsonl":
        yield from read_jsonl(path)
        return
    try:
        number = 0
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pa.ArrowException as error:
        raise UserError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from error


def user_documents(source: UserSource, seed: int) -> Iterator[Document]:
    """Documents of a user's source. UserError: unreadable file, missing text field, or no document at all."""
    count = 0
    for path, number, text in islice(_texts(source), source.max_documents):
        count += 1
        split = split_of(text, source.valid_fraction, seed)
        yield Document(source.name, f"{path.as_posix()}:{number}", text, source.kind, split)
    if count == 0:
        raise UserError(f"source {source.name!r} is empty: no document in {', '.join(source.paths)}")


def _texts(source: UserSource) -> Iterator[tuple[Path, int, str]]:
    for path in expand_paths(source.paths):
        if path.suffix.lower() in TEXT_SUFFIXES:
            for number, text in enumerate(_text_file(path), start=1):
                yield path, number, text
            continue
        for number, row in read_rows(path):
            value = row.get(source.text_field)
            if not isinstance(value, str):
                guess = nearest(source.text_field, list(row))
                problem = "is not text" if source.text_field in row else "is missing"
                raise UserError(
                    f"{path}:{number}: field {source.text_field!r} {problem}"
                    + (f", did you mean {guess!r}?" if guess and guess != source.text_field else ""),
                    f"fields there: {', '.join(row)}; set text_field",
                )
            yield path, number, value


def _text_file(path: Path) -> Iterator[str]:
    pending: list[str] = []
    size = 0
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                pending.append(line)
                size += len(line)
                if size >= _MAX_TEXT_CHARS and not line.strip():
                    yield "".join(pending)
                    pending, size = [], 0
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start})") from error
    if pending:
        yield "".join(pending)
