"""WARC and WET, the files of crawls: their records one after another, and pages and texts as rows.

warcio parses the HTTP responses. The records are read here: warcio's own iterator takes a damaged gzip member for the
end of the file, and here reading goes on at the next record, with the damage counted.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib.util
import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

from nemo_runspec.errors import UserError
from nemo_runspec.installation import install_line
from nemotron.data_prep.sources.files import MAGIC_BYTES, Piece, SourceFile, compression_of
from nemotron.data_prep.sources.lines import decompressed
from nemotron.data_prep.sources.locations import open_binary
from nemotron.data_prep.sources.reading import (
    DAMAGED,
    MALFORMED_HTTP,
    NO_PAGE,
    NOT_UTF8,
    OTHER_CONTENT,
    OTHER_ENCODING,
    OTHER_STATUS,
    TOO_LONG,
    Bad,
    DamagedError,
    Reading,
    Row,
)

_WITH_BODY = ("response", "resource", "conversion")
_HTTP_VERSIONS = ("HTTP/1.0", "HTTP/1.1", "HTTP/2.0", "HTTP/2", "HTTP/3")
HTML_TYPES = ("text/html", "application/xhtml+xml")
_READ, _SCAN = 1 << 14, 1 << 20  # bytes at a time, of a gzip member and in search of the next one
_MAX_HEADER = 1 << 16  # bytes of a record's header, HTTP's included
# Python has codecs of these names and no browser does; some of them decode to what is no Unicode.
_NO_CHARSETS = ("utf-7", "unicode-escape", "raw-unicode-escape", "punycode", "idna", "undefined")


@dataclass(frozen=True, slots=True)
class WarcRecord:
    """A record of a crawl; with `problem`, one that could not be read.

    `offset`: byte in the file at which it begins, or the gzip member that holds it; `number`: its number in that
    member, from 0. `kind`: its WARC-Type, empty where not even the record's borders could be read. `status`: of HTTP, 0
    without one. `body`: decoded as its headers say (gzip, chunks), and cut behind the limit that `read_records` was
    given. `encoding`: one that its headers name (br, zstd) and that could not be taken off.

    Responses, resources and conversions (the texts of WET) have a body; of other kinds only the place and kind is read.
    """

    offset: int
    number: int = 0
    kind: str = "response"
    url: str = ""
    date: str = ""
    status: int = 0
    content_type: str = ""
    body: bytes = b""
    encoding: str = ""
    problem: str = ""


def require_extra(files: Sequence[SourceFile]) -> None:
    """UserError, before any work, if there are WARC files and what reads them and their pages is not installed."""
    crawls = [file for file in files if file.format == "warc"]
    # WET files hold text, of which nothing has to be taken out.
    pages = any(".wet" not in PurePosixPath(file.name.lower()).suffixes for file in crawls)
    for module, needed in (("warcio", bool(crawls)), ("trafilatura", pages)):
        if needed and importlib.util.find_spec(module) is None:
            raise UserError(f"{crawls[0].name}: reading WARC files needs {module}", install_line("curation"))


# --- Rows -------------------------------------------------------------------------------------------------------------


def read_warc(piece: Piece, reading: Reading) -> Iterator[Row | Bad]:
    """Pages {"html", "url", "date", "content_type"} and texts {"text", "url", "date"}; `Row.index` counts all records.

    Only what was fetched gives a row: a response of HTTP status 200 or a resource, HTML or plain text, and in WET the
    text that was made of a page (`conversion`). The rest (requests, metadata, redirects, images) is counted by kind.
    """
    if not piece.file.size and piece.file.compression != "none":
        raise DamagedError("not a byte in it")
    for index, record in enumerate(read_records(piece.file, reading.max_record_bytes)):
        yield _row(record, index, reading.max_record_bytes)


def _row(record: WarcRecord, index: int, max_bytes: int) -> Row | Bad:
    if not record.kind:
        return Bad(index, DAMAGED, f"not a readable WARC record ({record.problem})")
    if record.problem:
        return Bad(index, MALFORMED_HTTP, record.problem)
    if record.kind not in _WITH_BODY:
        return Bad(index, NO_PAGE, record.kind)
    content_type = record.content_type.partition(";")[0].strip().lower() or "text/html"
    if record.kind == "response" and record.status != 200:
        return Bad(index, OTHER_STATUS, str(record.status))
    if record.kind != "conversion" and content_type not in (*HTML_TYPES, "text/plain"):
        return Bad(index, OTHER_CONTENT, content_type)
    if len(record.body) > max_bytes:
        return Bad(index, TOO_LONG, f"more than {max_bytes} bytes")
    if record.encoding:
        return Bad(index, OTHER_ENCODING, record.encoding)
    source = {"url": record.url, "date": record.date}
    if record.kind == "conversion":
        try:
            return Row(index, {"text": record.body.decode(), **source})
        except UnicodeDecodeError as error:
            return Bad(index, NOT_UTF8, f"byte {error.start} of the text")
    name = "text" if content_type == "text/plain" else "html"
    text, _ = decode_page(record.body, record.content_type)
    return Row(index, {name: text, **source, "content_type": content_type})


def decode_page(body: bytes, content_type: str) -> tuple[str, str]:
    """A page's bytes as text, and the encoding that was used.

    In the order of the WHATWG's encoding standard: byte order mark, HTTP header, `meta` in the head; without any of
    them, utf-8 if that fits, else Windows-1252. Bytes that do not fit become U+FFFD. These steps are w3lib's, but for
    `html_to_unicode` itself: a page that declares "hex", "undefined" or "idna" makes it raise.
    """
    try:
        from w3lib import encoding as w3lib
    except ImportError:
        raise UserError("decoding pages needs w3lib", install_line("curation")) from None
    mark_encoding, mark = w3lib.read_bom(body)
    if mark_encoding is not None and mark is not None:
        return body[len(mark) :].decode(mark_encoding, "replace"), mark_encoding
    in_header, in_head = w3lib.http_content_type_encoding(content_type), w3lib.html_body_declared_encoding(body)
    if in_head is not None and in_head.startswith("utf-16"):
        in_head = "utf-8"  # else the head could not have been read
    for encoding in (in_header, in_head):
        if encoding is not None and encoding not in _NO_CHARSETS:
            with contextlib.suppress(LookupError):  # "hex" and its like are codecs, too
                return w3lib.to_unicode(body, encoding), encoding
    try:
        return body.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        return body.decode("cp1252", "replace"), "cp1252"


# --- Records ----------------------------------------------------------------------------------------------------------


def read_records(source: SourceFile, max_body_bytes: int) -> Iterator[WarcRecord]:
    """The records of a WARC file; of each body at most one byte more than `max_body_bytes`.

    A place that is damaged (flipped bytes, a file that ends in the middle) comes as a record with `problem` and without
    `kind`, and reading goes on where the next record begins, except in zstd. Memory holds one record, cut to the limit.

    Raises what `open_binary` raises: the file is gone, or another than the one that was listed.
    """
    with open_binary(source) as file:
        compression = compression_of(file.read(MAGIC_BYTES))
        file.seek(0)
        if compression == "zstd":
            yield from _stream_records(cast("io.BufferedReader[Any]", decompressed(file, "zstd")), max_body_bytes)
        elif compression == "gzip":
            yield from _member_records(file, source.size, max_body_bytes)
        else:
            yield from _plain_records(cast("io.BufferedReader[Any]", file), source.size, max_body_bytes)


def _stream_records(stream: io.BufferedReader[Any], max_body_bytes: int) -> Iterator[WarcRecord]:
    """The records of a stream in which no other place can be sought."""
    number = 0
    try:
        while (parts := _read_parts(stream, max_body_bytes + _MAX_HEADER)) is not None:
            yield _parsed(parts, 0, number, max_body_bytes)
            number += 1
    except DamagedError as error:
        yield _damaged(0, number, error)


def _plain_records(file: io.BufferedReader[Any], size: int, max_body_bytes: int) -> Iterator[WarcRecord]:
    offset: int | None = 0
    while offset is not None and offset < size:
        file.seek(offset)
        try:
            while (parts := _read_parts(file, max_body_bytes + _MAX_HEADER)) is not None:
                yield _parsed(parts, offset, 0, max_body_bytes)
                offset = file.tell()
        except DamagedError as error:
            yield _damaged(offset, 0, error)
            position = _find(file, b"\nWARC/1.", offset)
            offset = None if position is None else position + 1


def _member_records(file: BinaryIO, size: int, max_body_bytes: int) -> Iterator[WarcRecord]:
    offset: int | None = 0
    while offset is not None and offset < size:
        file.seek(offset)
        member = _Member(file)
        stream = io.BufferedReader(member)
        number, last = 0, None
        try:
            while (parts := _read_parts(stream, max_body_bytes + _MAX_HEADER)) is not None:
                if last is not None:
                    yield last
                last = _parsed(parts, offset, number, max_body_bytes)
                number += 1
        except (DamagedError, zlib.error, EOFError) as error:
            yield _damaged(offset, number, error)
            offset = _find(file, b"\x1f\x8b\x08", offset + 1)
        else:  # only now is the last one known to be whole: the checksum stands at the member's end
            if last is not None:
                yield last
            offset = member.end


class _Member(io.RawIOBase):
    """The gzip member that begins where a file is now, decompressed as it is read. `end`: where the next one begins."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._inflate = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self.end = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._inflate.eof:
            data = self._inflate.unconsumed_tail or self._file.read(_READ)
            if not data:
                raise EOFError("the file ends in the middle of a gzip member")
            if part := self._inflate.decompress(data, len(buffer)):
                buffer[: len(part)] = part
                return len(part)
        self.end = self._file.tell() - len(self._inflate.unused_data)
        return 0


class _Parts(NamedTuple):
    """A record that is not parsed yet: its WARC fields by name, in lower case, and its content, which may be cut."""

    fields: dict[str, str]
    content: bytes
    is_cut: bool


def _read_parts(stream: io.BufferedReader[Any], limit: int) -> _Parts | None:
    """The next record with at most `limit` bytes of its content; None at the end. DamagedError: there is none."""
    if not (line := stream.readline(_MAX_HEADER)):
        return None
    if not line.startswith(b"WARC/"):
        raise DamagedError("no WARC header where a record should begin")
    fields: dict[str, str] = {}
    size = 0
    while (line := stream.readline(_MAX_HEADER)) not in (b"\r\n", b"\n"):
        size += len(line)
        if not line or size > _MAX_HEADER:
            raise DamagedError("the header of the record does not end")
        name, _, value = line.decode("utf-8", "replace").partition(":")
        fields[name.strip().lower()] = value.strip()
    declared = fields.get("content-length", "")
    if not (declared.isascii() and declared.isdigit()):
        raise DamagedError("the header of the record has no length")
    length = int(declared)
    content, left = stream.read(min(length, limit)), length - min(length, limit)
    missing = min(length, limit) - len(content)
    while left and not missing:
        skipped = len(stream.read(min(left, _SCAN)))
        left, missing = left - skipped, 0 if skipped else left
    if missing:
        raise DamagedError(f"the record ends {missing} bytes before its end")
    while stream.peek(1)[:1] in (b"\r", b"\n"):
        stream.read(1)  # blank lines between records
    return _Parts(fields, content, length > limit)


def _parsed(parts: _Parts, offset: int, number: int, max_body_bytes: int) -> WarcRecord:
    """The record; with a `problem` where a response is not HTTP, which costs this record only."""
    try:
        from warcio.bufferedreaders import BufferedReader, ChunkedDataReader
        from warcio.statusandheaders import StatusAndHeadersParser
    except ImportError:
        raise UserError("reading WARC files needs warcio", install_line("curation")) from None
    fields = parts.fields
    kind, content_type = fields.get("warc-type", "unknown"), fields.get("content-type", "")
    if kind not in _WITH_BODY:
        return WarcRecord(offset, number, kind)
    status, encoding = "", ""
    stream: Any = io.BytesIO(parts.content)
    try:
        if kind == "response" and content_type.startswith("application/http"):
            http = StatusAndHeadersParser(_HTTP_VERSIONS).parse(stream)
            status, content_type = http.get_statuscode() or "", http.get_header("Content-Type") or ""
            encoding = (http.get_header("Content-Encoding") or "").strip().lower()
            decoder = encoding if encoding in BufferedReader.get_supported_decompressors() else None
            if not parts.is_cut:  # what is encoded and cut cannot be decoded to its end
                if (http.get_header("Transfer-Encoding") or "").lower() == "chunked":
                    stream = ChunkedDataReader(stream, decomp_type=decoder)
                elif decoder:
                    stream = BufferedReader(stream, decomp_type=decoder)
            if decoder:
                encoding = ""
        body = b""
        while len(body) <= max_body_bytes and (more := stream.read(max_body_bytes + 1 - len(body))):
            body += more
    except Exception as error:  # flipped bytes take the parser to where nobody else has been
        return WarcRecord(offset, number, kind, problem=_one_line(f"{type(error).__name__}: {error}"))
    if encoding in ("identity", "none") or (encoding and _is_text(body)):
        encoding = ""  # text: whoever fetched it has taken the encoding off
    url, date = fields.get("warc-target-uri", ""), fields.get("warc-date", "")
    status_code = int(status) if status.isascii() and status.isdigit() else 0
    return WarcRecord(offset, number, kind, url, date, status_code, content_type.lower(), body, encoding)


def _damaged(offset: int, number: int, error: Exception) -> WarcRecord:
    return WarcRecord(offset, number, kind="", problem=_one_line(str(error)))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:100]


def _is_text(body: bytes) -> bool:
    """Whether bytes are utf-8, which compressed ones never are."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(body)  # which takes half a character at the end
    except UnicodeDecodeError:
        return False
    return True


def _find(file: BinaryIO, mark: bytes, begin: int) -> int | None:
    """Where `mark` stands first from byte `begin` on; None: nowhere."""
    file.seek(begin)
    tail, offset = b"", begin
    while chunk := file.read(_SCAN):
        window = tail + chunk
        if (place := window.find(mark)) >= 0:
            return offset - len(tail) + place
        offset += len(chunk)
        tail = window[-len(mark) + 1 :]
    return None
