"""WARC and WET: the pages and texts of a crawl, through warcio.

Only what was fetched is a record here: a response of HTTP status 200 or a resource, HTML or plain text, and in WET the
text that was made of a page (`conversion`). The rest (requests, metadata, redirects, images) is counted by kind.
"""

from __future__ import annotations

import codecs
import importlib.util
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from nemo_runspec.errors import UserError
from nemotron.data_prep.sources.files import Piece, SourceFile
from nemotron.data_prep.sources.reading import (
    MALFORMED_HTTP,
    NO_PAGE,
    NOT_UTF8,
    OTHER_CONTENT,
    OTHER_ENCODING,
    OTHER_STATUS,
    TOO_LONG,
    Bad,
    Reading,
    ReadReport,
    Row,
)
from nemotron.data_prep.sources.streams import DamagedError, open_content

_LINE = 1 << 20  # bytes of a header's line
_HTML = ("text/html", "application/xhtml+xml")
# Spellings that the codecs of Python know and no browser does; some of them decode to what is no Unicode.
_NO_CHARSETS = ("utf-7", "unicode_escape", "raw_unicode_escape", "punycode", "idna", "undefined")


def require_extra(files: Sequence[SourceFile]) -> None:
    """UserError, before any work, if there are WARC files and what reads them and their pages is not installed."""
    crawls = [file for file in files if file.format == "warc"]
    # WET files hold text, of which nothing has to be taken out.
    pages = any(".wet" not in PurePosixPath(file.name.lower()).suffixes for file in crawls)
    for module, needed in (("warcio", bool(crawls)), ("trafilatura", pages)):
        if needed and importlib.util.find_spec(module) is None:
            raise UserError(f"{crawls[0].name}: reading WARC files needs {module}", "pip install -e '.[curation]'")


def read_warc(piece: Piece, reading: Reading, report: ReadReport) -> Iterator[Row | Bad]:
    """Pages {"html", "url", "date", "content_type"} and texts {"text", "url", "date"}.

    `Row.index` counts the records of the file, of every kind.
    """
    from warcio.exceptions import ArchiveLoadFailed
    from warcio.recordloader import ArcWarcRecordLoader

    loader = ArcWarcRecordLoader(verify_http=True)
    with open_content(piece.file) as content:
        stream = _Bounded(content.stream)
        index = before = 0
        while first := _first_line(stream):
            try:
                # The HTTP part is parsed below: a response with a broken one costs only itself.
                record = loader.parse_record_stream(stream, first, "warc", no_record_parse=True)
            except ArchiveLoadFailed as error:
                raise DamagedError(str(error).strip()[:200]) from error
            # warcio takes one that is no number for 0.
            if not (record.rec_headers.get_header("Content-Length") or "").strip().isdecimal():
                raise DamagedError("a record without a Content-Length, or a file cut off in a record's header")
            row = _row(record, index, loader.http_parser, reading.max_record_bytes)
            while record.raw_stream.read(_LINE):
                pass
            if record.raw_stream.limit:  # before its row is given out, which may be half a page
                raise DamagedError(f"cut off in record {index + 1}")
            yield row
            at = content.stored.tell()
            report.bytes, before, index = report.bytes + at - before, at, index + 1


class _Bounded:
    """A stream whose lines end: what is no WARC may have none."""

    def __init__(self, stream: BinaryIO) -> None:
        self.read = stream.read
        self._readline = stream.readline

    def readline(self, size: int | None = None) -> bytes:
        return self._readline(_LINE if size is None else min(size, _LINE))


def _first_line(stream: _Bounded) -> bytes:
    """The next line that is not blank; empty at the end."""
    while (line := stream.readline()).isspace():
        pass
    return line


def _row(record: Any, index: int, http_parser: Any, max_bytes: int) -> Row | Bad:
    kind = record.rec_type
    if kind not in ("response", "resource", "conversion"):
        return Bad(index, NO_PAGE, str(kind))
    if record.length > max_bytes:
        return Bad(index, TOO_LONG, f"{record.length} bytes, more than {max_bytes}")
    known = {
        "url": record.rec_headers.get_header("WARC-Target-URI"),
        "date": record.rec_headers.get_header("WARC-Date"),
    }
    declared = record.content_type or ""
    if kind == "response":
        from warcio.statusandheaders import StatusAndHeadersParserException

        if not declared.startswith("application/http"):
            return Bad(index, OTHER_CONTENT, declared)
        try:
            headers = http_parser.parse(record.raw_stream)
        except (StatusAndHeadersParserException, EOFError) as error:
            return Bad(index, MALFORMED_HTTP, str(error).strip()[:200])
        if headers.get_statuscode() != "200":
            return Bad(index, OTHER_STATUS, headers.get_statuscode())
        declared = headers.get_header("Content-Type") or "text/html"
        content = _http_content(record.raw_stream, headers, max_bytes)
        if isinstance(content, Bad):
            return replace(content, index=index)
    else:
        content = record.raw_stream.read(record.length)
    content_type, _, parameters = declared.partition(";")
    content_type = content_type.strip().lower()
    if kind == "conversion":
        try:
            return Row(index, {"text": content.decode(), **known})
        except UnicodeDecodeError as error:
            return Bad(index, NOT_UTF8, f"byte {error.start} of the text")
    if content_type not in (*_HTML, "text/plain"):
        return Bad(index, OTHER_CONTENT, content_type)
    name = "text" if content_type == "text/plain" else "html"
    return Row(index, {name: decode_page(content, parameters), **known, "content_type": content_type})


def _http_content(stream: Any, headers: Any, max_bytes: int) -> bytes | Bad:
    """The body of a response without its transfer and content encodings."""
    if (headers.get_header("Transfer-Encoding") or "").lower() == "chunked":
        from warcio.bufferedreaders import ChunkedDataReader

        stream = ChunkedDataReader(stream)  # passes on what is not chunked in spite of its header
    data: bytes = stream.read(max_bytes)
    encoding = (headers.get_header("Content-Encoding") or "identity").strip().lower()
    try:
        if encoding in ("gzip", "x-gzip") and data.startswith(b"\x1f\x8b"):  # else it was decoded by who fetched it
            data = zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(data, max_bytes + 1)
        elif encoding == "deflate":
            data = _inflated(data, max_bytes + 1)
        elif encoding not in ("gzip", "x-gzip", "identity", "none", ""):
            return Bad(None, OTHER_ENCODING, encoding)
    except zlib.error as error:
        return Bad(None, MALFORMED_HTTP, str(error))
    return Bad(None, TOO_LONG, f"more than {max_bytes} bytes unpacked") if len(data) > max_bytes else data


def _inflated(data: bytes, max_bytes: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, max_bytes)
    except zlib.error:  # some servers leave out zlib's header
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, max_bytes)


def decode_page(content: bytes, parameters: str = "") -> str:
    """A page's bytes as text: by its mark of byte order, the header's charset, its own <meta>, as UTF-8.

    Where none of them fits: by the declared charset with U+FFFD for what it does not know, else by windows-1252.
    """
    if content.startswith(codecs.BOM_UTF8):
        return content[3:].decode(errors="replace")
    named = re.search(r"charset\s*=\s*[\"']?([\w.:-]+)", parameters, re.IGNORECASE)
    meta = re.search(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]+)", content[:4096], re.IGNORECASE)
    declared = [named[1]] if named else []
    declared += [meta[1].decode("ascii", "replace")] if meta else []
    charsets = [charset for name in declared if (charset := _charset(name))]
    for charset in (*charsets, "utf-8"):
        try:
            return content.decode(charset)
        except UnicodeError:
            continue
    return content.decode(charsets[0] if charsets else "cp1252", errors="replace")


def _charset(name: str) -> str | None:
    """Python's name of a charset; browsers take Latin-1 and ASCII for windows-1252."""
    try:
        info = codecs.lookup(name)
    except (LookupError, ValueError):
        return None
    if info.name in _NO_CHARSETS or not info._is_text_encoding:
        return None
    return "cp1252" if info.name in ("iso8859-1", "ascii") else str(info.name)
