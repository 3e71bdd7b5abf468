"""Files of every format, written by the libraries that everybody writes them with, for the tests of the readers."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from nemotron.data_prep.sources.files import Piece
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.reader import pieces_of, read_piece, where
from nemotron.data_prep.sources.reading import Reading, ReadReport


def json_lines(rows: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


def parquet(rows: Sequence[Any], row_group_size: int = 1000) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), buffer, row_group_size=row_group_size)
    return buffer.getvalue()


def arrow(
    rows: Sequence[Any], batch_rows: int = 1000, *, stream: bool = False, compression: str | None = None
) -> bytes:
    table = pa.Table.from_pylist(list(rows))
    buffer = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(buffer, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return buffer.getvalue()


def response(url: str, body: bytes, status: str = "200 OK", **headers: str) -> tuple[str, str, bytes, StatusAndHeaders]:
    named = [(name.replace("_", "-"), value) for name, value in {"Content_Type": "text/html", **headers}.items()]
    return "response", url, body, StatusAndHeaders(status, named, protocol="HTTP/1.1")


def warc(
    records: Sequence[tuple[str, str, bytes, StatusAndHeaders | None]], *, gz: bool = True, info: bool = True
) -> bytes:
    """(kind, url, payload, HTTP headers) -> a WARC file, with a record that describes the file at its beginning."""
    buffer = io.BytesIO()
    writer = WARCWriter(buffer, gzip=gz)
    if info:
        writer.write_record(writer.create_warcinfo_record("x.warc", {"software": "test"}))
    for kind, url, payload, headers in records:
        writer.write_record(
            writer.create_warc_record(
                url,
                kind,
                payload=io.BytesIO(payload),
                http_headers=headers,
                warc_content_type="" if headers else "text/plain",
                warc_headers_dict={"WARC-Date": "2024-05-06T07:08:09Z"},
            )
        )
    return buffer.getvalue()


def every_format(folder: Path, rows: Sequence[Any]) -> dict[str, Path]:
    """The same rows in every format that holds rows."""
    body = json_lines(rows)
    contents = {
        "plain.jsonl": body,
        "lines.json": body,
        "array.json": b"\xef\xbb\xbf" + json.dumps(rows, indent=1, ensure_ascii=False).encode(),
        "array.json.gz": gzip.compress(json.dumps(rows).encode()),
        "packed.jsonl.gz": gzip.compress(body),
        "packed.jsonl.zst": zstd(body),
        "table.parquet": parquet(rows, 7),
        "file.arrow": arrow(rows, 7),
        "stream.arrow": arrow(rows, 7, stream=True),
        "packed.feather": arrow(rows, 7, compression="zstd"),
    }
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {name: folder / name for name in contents}


def pieces(*paths: Path | str, target_bytes: int = 1 << 30) -> list[Piece]:
    return [piece for file in list_files([str(path) for path in paths]) for piece in pieces_of(file, target_bytes)]


def read(
    *paths: Path | str, target_bytes: int = 1 << 30, **settings: Any
) -> tuple[list[tuple[str, dict[str, Any]]], ReadReport]:
    """(name:number, row) of all that is read, and the account."""
    report = ReadReport()
    rows = []
    for piece in pieces(*paths, target_bytes=target_bytes):
        for row in read_piece(piece, Reading(**settings), report):
            rows.append((where(piece, row.index).rsplit("/", 1)[-1], row.value))
    return rows, report


PROSE = "The ferry leaves at noon and comes back before the tide turns, unless the wind says otherwise."


def page(number: int) -> bytes:
    """An HTML page with a paragraph of prose."""
    noise = random.Random(number).randbytes(300).hex()  # so that compression does not make records tiny
    return f"<html><body><article><h1>Page {number}</h1><p>{PROSE} {noise}</p></article></body></html>".encode()


def warc_records(bodies: Sequence[bytes], *, gz: bool = True) -> list[bytes]:
    """The records of a WARC file with these pages, each by itself."""
    return [warc([response(f"https://a.example/{n}", body)], gz=gz, info=False) for n, body in enumerate(bodies)]
