"""Files cut into pieces; a piece to its records, with a policy for those that cannot be read; a record's place."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from nemo_runspec.errors import RunspecError, UserError
from nemotron.data_prep.sources.documents import in_share, stable_hash
from nemotron.data_prep.sources.files import TO_THE_END, Piece, SourceFile, can_be_cut
from nemotron.data_prep.sources.lines import lines_before, read_csv, read_json, read_text
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.reading import (
    DAMAGED,
    EMPTY,
    NO_FIELD,
    NOT_ERRORS,
    NOT_TEXT,
    UNREADABLE,
    Bad,
    BadRecordError,
    DamagedError,
    Reading,
    ReadReport,
    Row,
    lacking,
)
from nemotron.data_prep.work.batches import batches

_KINDS = {
    "jsonl": "JSON Lines",
    "json": "JSON",
    "csv": "CSV",
    "parquet": "Parquet",
    "arrow": "Arrow",
    "text": "text",
    "warc": "WARC",
}
# Bytes of a file that are read to find the line number of a sample; further on, the sample is named by its piece.
_CHEAP = 64 << 20


# --- Pieces -----------------------------------------------------------------------------------------------------------


def whole(file: SourceFile) -> Piece:
    """A file in one piece."""
    if not can_be_cut(file):
        return Piece(file, 0, 1, file.size)
    return Piece(file, 0, file.size if file.format == "jsonl" else TO_THE_END, file.size)


def pieces_of(file: SourceFile, target_bytes: int) -> list[Piece]:
    """Cut a file into pieces of about `target_bytes`, the same every time.

    A file that cannot be opened or understood is one piece: its reader meets the error and has a policy for it.
    ValueError: `target_bytes` is less than 1.
    """
    if target_bytes < 1:
        raise ValueError(f"target_bytes {target_bytes} must be at least 1")
    if not can_be_cut(file) or file.size <= target_bytes:
        return [whole(file)]
    if file.format == "jsonl":
        count = math.ceil(file.size / target_bytes)
        borders = [file.size * i // count for i in range(count + 1)]
        return [Piece(file, begin, end, end - begin) for begin, end in pairwise(borders)]
    from nemotron.data_prep.sources.tables import unit_sizes

    try:
        sizes = unit_sizes(file)
    except RunspecError:
        raise
    except Exception:  # pyarrow raises errors of many types for damaged metadata
        return [whole(file)]
    groups = batches(enumerate(sizes), lambda unit: unit[1], target_bytes)
    pieces = [Piece(file, group[0][0], group[-1][0] + 1, sum(size for _, size in group)) for group in groups]
    return pieces or [whole(file)]


# --- Records ----------------------------------------------------------------------------------------------------------


def read_piece(piece: Piece, reading: Reading, report: ReadReport) -> Iterator[Row]:
    """The records of a piece, one at a time; `report` counts them and what is skipped.

    A row of a text file is {"text", "path"}, one of a crawl {"html" or "text", "url", "date", …}; objects within a row
    of a table are without the fields that are null. An empty file and the records of a crawl that are not pages are
    counted, but are not errors.

    Raises:
        BadRecordError: under `stop`, at the first record or file that cannot be read; names file, row, nearest field.
        UserError: the same, where skipping such records would not help.
        RunFailed: a file has changed since it was listed, or the store of a remote one does not answer.
    """
    at = -1  # number of the last record that was reached
    try:
        for item in _items(piece, reading):
            if isinstance(item, Row):
                at = item.index
                value = _fitted(item.value, piece, reading)
                if not isinstance(value, Bad):
                    if reading.share < 1 and not in_share(_content(value), reading.share, reading.seed):
                        report.pass_over()
                        continue
                    report.records += 1
                    yield Row(at, value)
                    continue
                bad = replace(value, index=at)
            else:
                bad = item
                at = (bad.index or 0) + bad.count - 1
            if reading.share < 1 and reading.on_error == "skip" and bad.reason not in NOT_ERRORS:
                bad = _within_share(piece, bad, reading, report)
            if bad.count:
                _skip(piece, bad, reading, report)
    except (DamagedError, OSError) as error:
        read = error.read if isinstance(error, DamagedError) else None
        report.unread_bytes += piece.size if at < 0 else 0 if read is None else piece.size - read
        rest = f"; what follows {place(piece, at)} is not read" if at >= 0 else ""
        if isinstance(error, DamagedError):
            kind = piece.file.compression if piece.file.compression != "none" else _KINDS[piece.file.format]
            bad = Bad(None, DAMAGED, f"not a readable {kind} file ({error}){rest}")
        else:
            bad = Bad(None, UNREADABLE, f"{error.strerror or error}{rest}")
        _skip(piece, bad, reading, report)
    else:
        if at < 0 and piece.begin == 0 and piece.size == piece.file.size:
            _skip(piece, Bad(None, EMPTY), reading, report)


def read_texts(locations: Sequence[str]) -> Iterator[str]:
    """The documents in files and folders, one after another: `text` of records, else the file. For data that needs no
    shards. UserError: nothing readable is there, or a record cannot be used."""
    reading = Reading(columns={"text": "text"})
    for file in list_files(locations):
        for row in read_piece(whole(file), reading, ReadReport()):
            yield row.value["text"]


def reject(piece: Piece, index: int, report: ReadReport, reason: str, detail: str = "") -> None:
    """Count a record that `read_piece` gave out as one that was skipped."""
    report.records -= 1
    report.skip(reason, place(piece, index) if report.has_room(reason) else "", detail)


def where(piece: Piece, index: int) -> str:
    """`notes.jsonl:17`: the file and the exact number, from 1, of a line, row, document or record; of an array
    `notes.json, record 17`, whose lines have other numbers.

    What lies before the piece is counted, for which plain JSON Lines have to be read up to there.
    """
    try:
        number = _before(piece) + index + 1
        return f"{piece.file.name}{', record ' if piece.file.format == 'json' else ':'}{number}"
    except (DamagedError, OSError, RunspecError):  # the file is gone or has changed
        return row_id(piece, index)


def row_id(piece: Piece, index: int) -> str:
    """A name of a record that is unique among all files and needs no reading: `notes.jsonl:17` in the first piece of a
    file, `notes.jsonl@33554432:17` (counted from the piece's beginning) in others. Of an address whose query is not
    shown, a hash of it stands in its place."""
    name, uri = piece.file.name, piece.file.uri
    query = "" if name == uri else f"?{stable_hash(uri):016x}"
    return f"{name}{query}{f'@{piece.begin}' if piece.begin else ''}:{index + 1}"


def place(piece: Piece, index: int) -> str:
    """As `where`, or as `row_id` where that would read much: every piece may have samples to name."""
    cheap = piece.file.format != "jsonl" or piece.begin <= (_CHEAP if piece.file.is_local else 0)
    return where(piece, index) if cheap else row_id(piece, index)


def _before(piece: Piece) -> int:
    """Lines or rows of the file before the piece."""
    if not piece.begin:
        return 0
    if piece.file.format == "jsonl":
        return lines_before(piece.file, piece.begin)
    from nemotron.data_prep.sources.tables import rows_before

    return rows_before(piece.file, piece.begin)


def _items(piece: Piece, reading: Reading) -> Iterator[Row | Bad]:
    """The records of a piece, by its file's format."""
    if piece.file.format in ("jsonl", "json"):
        return read_json(piece, reading)
    if piece.file.format == "csv":
        return read_csv(piece, reading)
    if piece.file.format == "text":
        return read_text(piece, reading)
    if piece.file.format == "warc":
        from nemotron.data_prep.sources.warc import read_warc

        return read_warc(piece, reading)
    from nemotron.data_prep.sources.tables import read_arrow, read_parquet

    return read_parquet(piece, reading) if piece.file.format == "parquet" else read_arrow(piece, reading)


def _fitted(record: dict[str, Any], piece: Piece, reading: Reading) -> dict[str, Any] | Bad:
    """The record under the names that `reading` asks for, or what it lacks."""
    own_names = piece.file.format in ("text", "warc")
    value = record
    if reading.columns and not own_names:
        value = {name: item for name, item in record.items() if name not in reading.columns} if reading.rest else {}
        for name, field in (reading.names or reading.columns).items():
            exists, content = _lookup(record, field)
            if exists:
                value[name] = content
    for name in (*reading.required, *reading.present):
        content = value.get(name)
        if content is not None and (isinstance(content, str) or name not in reading.required):
            continue
        if own_names and "html" in value:
            hint = "curate it first: nemotron data curate takes the text out of pages"
            return Bad(None, NO_FIELD, "an HTML page, of which no text was taken yet", hint)
        field = name if own_names else reading.columns.get(name, name)
        problem = "is missing" if name not in value else "is null" if content is None else "is not text"
        return lacking(name, field, list(record), problem)
    if piece.file.format in ("parquet", "arrow"):
        return {name: _without_nulls(item) for name, item in value.items()}
    return value


def _without_nulls(value: Any) -> Any:
    """A table gives every struct of a column all fields that any of them has: null is one that was not there."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _within_share(piece: Piece, bad: Bad, reading: Reading, report: ReadReport) -> Bad:
    """Those of some unreadable records that are within the share, drawn by their places; the others are counted."""
    first = bad.index or 0
    within = [i for i in range(first, first + bad.count) if in_share(row_id(piece, i), reading.share, reading.seed)]
    report.pass_over(bad.count - len(within))
    return replace(bad, index=within[0] if within else first, count=len(within))


def _content(value: Mapping[str, Any]) -> str:
    """What a row says, wherever it lies: a text file's row also has its path."""
    return json.dumps({name: item for name, item in value.items() if name != "path"}, sort_keys=True, default=str)


def _lookup(record: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    """Whether there is a field of this name, or at this path in nested objects; and its value."""
    if name in record:
        return True, record[name]
    value: Any = record
    for step in name.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return False, None
        value = value[step]
    return True, value


def _skip(piece: Piece, bad: Bad, reading: Reading, report: ReadReport) -> None:
    """Count a record that is skipped, or stop because of it."""
    if reading.on_error == "stop" and bad.reason not in NOT_ERRORS:
        at = piece.file.name if bad.index is None else where(piece, bad.index)
        # Where already the first record lacks a field, the field has another name, and skipping would leave nothing.
        is_renamed = bad.reason in (NO_FIELD, NOT_TEXT) and not report.records
        raise (UserError if is_renamed else BadRecordError)(f"{at}: {_message(bad)}", bad.hint)
    at = ""
    if report.has_room(bad.reason):
        at = piece.file.name if bad.index is None else place(piece, bad.index)
        if bad.count > 1:
            at += f" and {bad.count - 1} more"
    detail = bad.detail
    if bad.reason in (NO_FIELD, NOT_TEXT) and bad.hint:
        detail += f" ({textwrap.shorten(bad.hint, 300, placeholder=' …')})"
    report.skip(bad.reason, at, detail, bad.count)


def _message(bad: Bad) -> str:
    if bad.reason in (NO_FIELD, NOT_TEXT, DAMAGED):
        return bad.detail
    return f"{bad.reason}: {bad.detail}" if bad.detail else bad.reason
