"""Parquet and Arrow: batches of columns, turned into rows a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from nemo_runspec.errors import RunspecError
from nemotron.data_prep.sources.files import TO_THE_END, Piece, SourceFile, reason_of
from nemotron.data_prep.sources.locations import open_binary
from nemotron.data_prep.sources.reading import (
    NO_VALUE,
    NOT_UTF8,
    TOO_LONG,
    Bad,
    DamagedError,
    Reading,
    Row,
    lacking,
)

_BATCH_BYTES = 8 << 20  # of rows that are Python objects at one time
_BATCH_ROWS = 1024
_ARROW_MAGIC = b"ARROW1"

Result = TypeVar("Result")


def read_parquet(piece: Piece, reading: Reading) -> Iterator[Row | Bad]:
    """Rows of the piece's row groups; only the columns that are asked for are read."""
    with open_binary(piece.file) as stored:
        table = _checked(pq.ParquetFile, stored, buffer_size=1 << 20, page_checksum_verification=True)
        metadata = table.metadata
        groups = range(piece.begin, metadata.num_row_groups if piece.end == TO_THE_END else piece.end)
        if groups.stop > metadata.num_row_groups:
            raise DamagedError(f"{metadata.num_row_groups} row groups instead of {groups.stop} or more")
        chosen = [metadata.row_group(i) for i in groups]
        rows = sum(group.num_rows for group in chosen)
        schema = table.schema_arrow
        if bad := _missing(_checked(getattr, schema, "names"), reading, rows):
            yield bad
            return
        unpacked = sum(group.total_byte_size for group in chosen)
        batches = table.iter_batches(
            batch_size=max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(1, unpacked))),
            row_groups=list(groups),
            columns=sorted({_path(name, schema) for name in reading.names.values()}) if reading.names else None,
        )
        index = 0
        while (batch := _checked(next, batches, None)) is not None:  # one without rows is false
            yield from _rows(batch, index, reading)
            index += batch.num_rows
        if index != rows:
            raise DamagedError(f"{index} rows instead of {rows}")


def read_arrow(piece: Piece, reading: Reading) -> Iterator[Row | Bad]:
    """Rows of the piece's record batches: of an Arrow file (Feather, too), or of a whole stream."""
    with open_binary(piece.file) as stored:
        index = 0
        for batch in (_file_batches if _is_file_format(stored) else _stream_batches)(stored, piece):
            names: list[str] = _checked(getattr, batch.schema, "names")
            if bad := _missing(names, reading, batch.num_rows):
                yield replace(bad, index=index)
                index += batch.num_rows
                continue
            if reading.names:
                tops = {_top(name, names) for name in reading.names.values()}
                batch = batch.select([i for i, name in enumerate(names) if name in tops])
            for column in batch.columns:
                _check(column)
            rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
            for begin in range(0, batch.num_rows, rows):
                part = batch.slice(begin, rows)
                yield from _rows(part, index, reading)
                index += part.num_rows


def _is_file_format(stored: BinaryIO) -> bool:
    """Whether a stream of bytes is an Arrow file, which says where each batch is, rather than an Arrow stream."""
    stored.seek(0)
    begin = stored.read(len(_ARROW_MAGIC))
    stored.seek(0)
    if begin[:4] == b"FEA1":
        raise DamagedError("Feather of version 1, which is not read any more: write it anew as Parquet")
    return begin == _ARROW_MAGIC


def _file_batches(stored: BinaryIO, piece: Piece) -> Iterator[pa.RecordBatch]:
    reader = _checked(pa.ipc.open_file, stored)
    count = reader.num_record_batches
    end = count if piece.end == TO_THE_END else piece.end
    if end > count:
        raise DamagedError(f"{count} record batches instead of {end} or more")
    for i in range(piece.begin, end):
        yield _checked(reader.get_batch, i)


def _stream_batches(stored: BinaryIO, piece: Piece) -> Iterator[pa.RecordBatch]:
    if piece.begin:
        raise DamagedError("it is an Arrow stream now, and was an Arrow file when it was cut into pieces")
    reader = _checked(pa.ipc.open_stream, stored)
    while (batch := _checked(next, reader, None)) is not None:  # one without rows is false, and others may follow
        yield batch
    # A stream ends with four or eight bytes that say so; without them it may have been cut between two batches.
    stored.seek(-8, 2)
    if stored.read(8)[4:] != b"\0\0\0\0":
        raise DamagedError("it ends without the mark of an end")


def _checked(function: Callable[..., Result], *arguments: Any, **settings: Any) -> Result:
    """Call pyarrow, which raises errors of many types for damaged bytes: its own, OSError, ValueError, …"""
    try:
        return function(*arguments, **settings)
    except (RunspecError, DamagedError):
        raise
    except OSError as error:
        if error.strerror is not None:  # of the disk, not of the format
            raise
        raise DamagedError(reason_of(error)) from error
    except Exception as error:
        raise DamagedError(reason_of(error)) from error


def _check(column: pa.Array) -> None:
    """DamagedError: offsets or lengths of a column are wrong, and reading it would read other memory."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        # Bytes that are not UTF-8 are found again row by row; by now the offsets have been checked.
        if "UTF8" not in str(error) or not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            raise DamagedError(reason_of(error)) from error


def _rows(batch: pa.RecordBatch, first: int, reading: Reading) -> Iterator[Row | Bad]:
    """A batch's rows. A value without a Python equivalent (not UTF-8, too large) costs only its own row."""
    if not batch.num_columns:  # the table has none of the columns
        yield from (Row(first + i, {}) for i in range(batch.num_rows))
        return
    batch = _as_json(batch)
    in_python = {field.name: convert for field in batch.schema if (convert := _in_python(field.type))}
    too_long: set[int] = set()
    if batch.nbytes > reading.max_record_bytes:
        too_long = {i for i in range(batch.num_rows) if batch.slice(i, 1).nbytes > reading.max_record_bytes}
    values: list[dict[str, Any]] | None = None
    if not too_long:
        with suppress(Exception):  # found again below, in its row
            values = batch.to_pylist()
    if values is not None:
        for name, convert in in_python.items():
            for value in values:
                value[name] = convert(value[name])
        yield from map(Row, count(first), values)
        return
    for i in range(batch.num_rows):
        row = batch.slice(i, 1)
        if i in too_long:
            yield Bad(first + i, TOO_LONG, f"{row.nbytes} bytes, more than {reading.max_record_bytes}")
            continue
        try:
            [value] = row.to_pylist()
        except UnicodeDecodeError as error:
            yield Bad(first + i, NOT_UTF8, f"byte {error.start} of a value")
        except Exception as error:  # SystemError and OverflowError among them
            yield Bad(first + i, NO_VALUE, reason_of(error))
        else:
            yield Row(first + i, value | {name: convert(value[name]) for name, convert in in_python.items()})


def _as_json(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Times and decimals as the strings that JSON would hold, within lists and structs too: nanoseconds have no type in
    Python. A duration as the number of its units. What a dictionary holds once, as that of a pandas categorical, in
    each row that has it: else all rows would be as long as the dictionary."""
    columns = []
    for column in batch.columns:
        kind = _json_type(column.type)
        columns.append(column if kind == column.type else _checked(column.cast, kind))
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _json_type(kind: pa.DataType) -> pa.DataType:
    """The type with strings in the place of times and decimals, and without dictionaries."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if (pa.types.is_temporal(kind) and not pa.types.is_interval(kind)) or pa.types.is_decimal(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([kind.field(i).with_type(_json_type(kind.field(i).type)) for i in range(kind.num_fields)])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_json_type(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_json_type(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_json_type(kind.value_type)), kind.list_size)
    if pa.types.is_map(kind):
        key, item = (part.with_type(_json_type(part.type)) for part in (kind.key_field, kind.item_field))
        return pa.map_(key, item)
    return kind


def _in_python(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What makes JSON of a column's values in Python: an object of a map, which is a list of pairs there, the text of a
    UUID. None where they are JSON already, or bytes, which stay bytes: they are no text."""
    if isinstance(kind, pa.UuidType):
        return lambda value: None if value is None else str(value)
    if pa.types.is_map(kind):
        of_item = _in_python(kind.item_type) or (lambda value: value)
        return lambda pairs: None if pairs is None else {str(key): of_item(item) for key, item in pairs}
    if pa.types.is_struct(kind):
        fields = map(kind.field, range(kind.num_fields))
        named = {field.name: convert for field in fields if (convert := _in_python(field.type))}
        if named:
            return lambda value: (
                None if value is None else value | {n: convert(value[n]) for n, convert in named.items()}
            )
    elif hasattr(kind, "value_type") and (of_each := _in_python(kind.value_type)):
        return lambda items: None if items is None else [of_each(item) for item in items]
    return None


def _missing(names: Sequence[str], reading: Reading, rows: int) -> Bad | None:
    """What is wrong with a whole table: a column that is not there. DamagedError: one that is read is there twice."""
    tops = names if reading.names is None else [_top(name, names) for name in reading.names.values()]
    if twice := next((name for name in tops if name and names.count(name) > 1), None):
        raise DamagedError(f"{names.count(twice)} columns of the name {twice!r}")
    for wanted in (*reading.required, *reading.present):
        name = reading.columns.get(wanted, wanted)
        if _top(name, names) is None:
            return replace(lacking(wanted, name, names), index=0, count=rows)
    return None


def _top(name: str, names: Sequence[str]) -> str | None:
    """The column that holds a field, which may be nested."""
    return name if name in names else (top if (top := name.split(".")[0]) in names else None)


def _path(name: str, schema: pa.Schema) -> str:
    """A field as Parquet is asked for it: by its path within objects, of a map the whole column."""
    top, *steps = [name] if name in schema.names else name.split(".")
    if top not in schema.names:
        return name
    kind = schema.field(top).type
    for step in steps:
        if not pa.types.is_struct(kind) or kind.get_field_index(step) < 0:
            return top
        kind = kind.field(step).type
    return name


def rows_before(file: SourceFile, unit: int) -> int:
    """Rows in the row groups or record batches before one of them."""
    with open_binary(file) as stored:
        if file.format == "parquet":
            metadata = pq.read_metadata(stored)
            return sum(metadata.row_group(i).num_rows for i in range(unit))
        reader = pa.ipc.open_file(stored)
        return sum(reader.get_batch(i).num_rows for i in range(unit))


def unit_sizes(file: SourceFile) -> list[int]:
    """Stored bytes of each row group or record batch of a file; [] for an Arrow stream, which has no table of them."""
    with open_binary(file) as stored:
        if file.format == "parquet":
            metadata = pq.read_metadata(stored)
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
            return [sum(group.column(j).total_compressed_size for j in range(group.num_columns)) for group in groups]
        if not _is_file_format(stored):
            return []
        # The sizes of batches cannot be known without reading them: the file's bytes are divided evenly among them.
        count = pa.ipc.open_file(stored).num_record_batches
        return [file.size * (i + 1) // count - file.size * i // count for i in range(count)]
