"""Files of lines: stored bytes are decompressed as a stream, cut into lines of bounded length, and read as records.

JSON: one object a line, or an array of objects, UTF-8. CSV: a header, and a record a row whose values are all text.
Plain text: one document a file, a long one cut at blank lines.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO, NamedTuple, cast

from nemo_runspec.errors import first_line
from nemotron.data_prep.sources.files import (
    BEGIN_BYTES,
    MAGIC_BYTES,
    Compression,
    Piece,
    SourceFile,
    can_be_cut,
    compression_of,
    is_json_array,
)
from nemotron.data_prep.sources.locations import check_unchanged, open_binary
from nemotron.data_prep.sources.reading import (
    MALFORMED,
    MALFORMED_CSV,
    NOT_AN_OBJECT,
    NOT_UTF8,
    TOO_LONG,
    Bad,
    DamagedError,
    Reading,
    Row,
)

_BUFFER = 1 << 20
_STEP = 1 << 14  # bytes decompressed at a time: what a file holds before the place where it is cut is given out
_BOM = b"\xef\xbb\xbf"
UTF16 = Bad(None, NOT_UTF8, "the file is UTF-16", "iconv -f UTF-16 -t UTF-8 FILE makes a file that is read")

_TSV = re.compile(r"\.tsv(\.gz|\.zstd?)?$")
_BETWEEN_ITEMS = re.compile(r"\s*(?:,\s*)?")
_LONGEST_WORD = len("-Infinity")

DOCUMENT_CHARS = 100_000
"""A document ends at the first blank line after so many characters."""


# --- Stored bytes -> content -> lines ---------------------------------------------------------------------------------


@contextlib.contextmanager
def open_content(file: SourceFile, *, cut: bool = False, end: int | None = None) -> Iterator[BinaryIO]:
    """Open a file and decompress it. `cut`: it was cut into pieces as a plain file, so it must not be compressed.

    Raises:
        DamagedError: also later, by every read.
        OSError: it cannot be opened or read.
        RunFailed: it is another than the one that was listed, or has changed while it was read.
    """
    with open_binary(file, end) as stored:
        compression = file.compression
        if not (cut and file.is_local):  # the first bytes of a local file were looked at when it was listed
            begin = stored.read(MAGIC_BYTES)
            stored.seek(0)
            if begin == b"PAR1":
                raise DamagedError("its bytes are Parquet; it needs the suffix .parquet")
            if not begin and compression != "none":
                raise DamagedError("not a byte in it")
            compression = compression_of(begin) if len(begin) == MAGIC_BYTES else compression
            if cut and compression != "none":
                suffix = ".gz" if compression == "gzip" else ".zst"
                raise DamagedError(f"its bytes are {compression}; it needs the suffix {suffix}")
        try:
            yield decompressed(stored, compression)
        except DamagedError as error:
            error.read = stored.tell()
            raise
        if file.is_local:
            check_unchanged(stored, file)


def decompressed(stored: BinaryIO, compression: Compression) -> BinaryIO:
    if compression == "none":
        return stored
    if compression == "gzip":
        import gzip

        inner: Any = gzip.GzipFile(fileobj=stored, mode="rb")
    else:
        import pyarrow as pa

        inner = pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), "zstd")
    return cast(BinaryIO, io.BufferedReader(_Decompressing(inner), _BUFFER))


class _Decompressing(io.RawIOBase):
    """A decompressor as a raw stream that raises DamagedError."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        try:
            data = self._inner.read1(min(len(buffer), _STEP))
        except (EOFError, zlib.error) as error:
            raise DamagedError(first_line(error)) from error
        except OSError as error:
            if error.strerror is not None:  # of the disk, not of the format
                raise
            raise DamagedError(first_line(error)) from error
        buffer[: len(data)] = data
        return len(data)


class Line(NamedTuple):
    """A line with its end; `data` None where it is too long. `offset`: of its first byte in the content."""

    offset: int
    data: bytes | None
    size: int


def lines(stream: BinaryIO, max_bytes: int, begin: int = 0, end: int | None = None) -> Iterator[Line]:
    """Lines that begin from `begin` to before `end`; one that is longer than `max_bytes` is not held in memory."""
    offset = begin
    if begin:
        stream.seek(begin - 1)  # if the byte before is a line's end, a line begins here
        offset = begin - 1
        while part := stream.readline(_BUFFER):
            offset += len(part)
            if part.endswith(b"\n"):
                break
    while end is None or offset < end:
        # Two for the end of the line, one to know that it is too long.
        data = stream.readline(max_bytes + 3)
        if not data:
            return
        size = len(data)
        if size > max_bytes and len(data.rstrip(b"\r\n")) > max_bytes:
            ended = data.endswith(b"\n")
            del data
            while not ended and (part := stream.readline(_BUFFER)):
                size += len(part)
                ended = part.endswith(b"\n")
            yield Line(offset, None, size)
        else:
            yield Line(offset, data, size)
        offset += size


# --- JSON -------------------------------------------------------------------------------------------------------------


def read_json(piece: Piece, reading: Reading) -> Iterator[Row | Bad]:
    """The objects of a piece of JSON Lines, or of an array."""
    is_array = False
    if piece.file.format == "json":
        with open_content(piece.file) as stream:
            is_array = is_json_array(stream.read(BEGIN_BYTES))
    return _read_array(piece, reading) if is_array else _read_json_lines(piece, reading)


def _read_array(piece: Piece, reading: Reading) -> Iterator[Row | Bad]:
    """The objects of a JSON array, one at a time. `Row.index` counts its items.

    DamagedError: what is no JSON, or an item that is longer than records may be: what follows it cannot be found. Or
    anything but white space behind the array.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    decode = json.JSONDecoder().raw_decode
    text, at, index, is_open = "", 0, 0, False
    with open_content(piece.file) as stream:
        while True:
            # More bytes are read where the item is not whole, and twice as many each time, so that a long item is not
            # decoded from its beginning a thousand times.
            data = stream.read(max(_BUFFER, len(text) - at))
            is_whole = not data
            try:
                text, at = text[at:] + decoder.decode(data, final=is_whole), 0
            except UnicodeDecodeError as error:
                raise DamagedError(f"not UTF-8 behind {index} items") from error
            if not is_open:
                if "[" not in text:
                    continue
                at, is_open = text.index("[") + 1, True
            while True:
                at = _BETWEEN_ITEMS.match(text, at).end()  # type: ignore[union-attr]  # nothing is a match, too
                if text.startswith("]", at):
                    _check_end(text[at + 1 :], stream, decoder, index)
                    return
                try:
                    value, end = decode(text, at)
                except (ValueError, RecursionError) as error:
                    if is_whole or not _may_go_on(error, text):
                        raise DamagedError(f"item {index + 1}: {str(error).partition(': line')[0]}") from error
                    break
                if end == len(text) and not is_whole:  # more digits may follow a number
                    break
                if end - at > reading.max_record_bytes:
                    yield Bad(index, TOO_LONG, f"{end - at} characters, more than {reading.max_record_bytes}")
                else:
                    yield _object(value, index)
                index, at = index + 1, end
            if len(text) - at > reading.max_record_bytes:
                raise DamagedError(f"item {index + 1} is longer than {reading.max_record_bytes} bytes")


def _check_end(rest: str, stream: BinaryIO, decoder: codecs.IncrementalDecoder, items: int) -> None:
    """DamagedError: something follows an array of so many items. `rest`: what was decoded behind its bracket."""
    is_whole = False
    while not rest.strip():
        if is_whole:
            return
        data = stream.read(_BUFFER)
        is_whole = not data
        try:
            rest = decoder.decode(data, final=is_whole)
        except UnicodeDecodeError as error:
            raise DamagedError(f"not UTF-8 behind the array of {items} items") from error
    raise DamagedError(f"{rest.strip()[:20]!r} behind the array of {items} items")


def _may_go_on(error: Exception, text: str) -> bool:
    """Whether JSON that cannot be decoded may only lack its end: in a string, or within the last word of it."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - _LONGEST_WORD


def _object(value: object, index: int) -> Row | Bad:
    """An item of an array as a record."""
    if not isinstance(value, dict):
        return Bad(index, NOT_AN_OBJECT, f"expected a JSON object, found {type(value).__name__}")
    return Row(index, value) if _is_unicode(value) else Bad(index, MALFORMED, "half of a surrogate pair")


def _read_json_lines(piece: Piece, reading: Reading) -> Iterator[Row | Bad]:
    """The objects of a piece. `Row.index` counts its lines, blank ones too."""
    plain = can_be_cut(piece.file)
    cut = plain and (piece.begin, piece.end) != (0, piece.file.size)
    begin, end = (piece.begin, piece.end) if plain else (0, None)
    with open_content(piece.file, cut=cut, end=end) as stream:
        for index, line in enumerate(lines(stream, reading.max_record_bytes, begin, end)):
            if line.data is None:
                detail = f"{line.size} bytes, more than {reading.max_record_bytes}"
                yield Bad(index, TOO_LONG, detail)
            elif (data := line.data.removeprefix(_BOM) if line.offset == 0 else line.data).strip():
                item = parse_line(data)
                if line.offset == 0 and is_utf16(data):
                    item = UTF16
                elif line.offset == 0 and isinstance(item, Bad) and is_json_array(data):
                    item = replace(item, hint="a JSON array is read from a file whose name ends in .json or .json.gz")
                elif line.offset == 0 and isinstance(item, Bad) and data.strip() == b"{":
                    item = replace(item, hint="an object of several lines: write one a line, or an array of them")
                if isinstance(item, Bad):
                    yield replace(item, index=index)
                else:
                    yield Row(index, item)


def is_utf16(begin: bytes) -> bool:
    """Whether a file's first bytes are the byte order mark of UTF-16."""
    return begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def parse_line(data: bytes) -> dict[str, object] | Bad:
    """The object of one line, or what is wrong with it."""
    try:
        value = json.loads(data.rstrip(b"\r\n").decode())
        # json takes an escaped half of a surrogate pair, which is no text: UTF-8 cannot hold it.
        is_text = b"\\" not in data or _is_unicode(value)
    except UnicodeDecodeError as error:
        return Bad(None, NOT_UTF8, f"byte {error.start} of the line")
    except json.JSONDecodeError as error:
        return Bad(None, MALFORMED, f"{error.msg} (column {error.colno})")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, nesting without end
        return Bad(None, MALFORMED, str(error))
    if not isinstance(value, dict):
        return Bad(None, NOT_AN_OBJECT, f"expected a JSON object, found {type(value).__name__}")
    if not is_text:
        return Bad(None, MALFORMED, "half of a surrogate pair")
    return value


def _is_unicode(value: object) -> bool:
    """Whether all strings in a JSON value can be written."""
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                return False
        return True
    if isinstance(value, dict):
        return all(_is_unicode(name) and _is_unicode(item) for name, item in value.items())
    return not isinstance(value, list) or all(map(_is_unicode, value))


def lines_before(file: SourceFile, position: int) -> int:
    """How many lines begin before a byte of a plain file, the one that `position` falls into included."""
    count, last = 0, b"\n"
    with open_content(file) as stream:
        left = position
        while left and (chunk := stream.read(min(left, 1 << 20))):
            count += chunk.count(b"\n")
            left -= len(chunk)
            last = chunk[-1:]
    return count + (position > 0 and last != b"\n")


# --- CSV --------------------------------------------------------------------------------------------------------------


def read_csv(piece: Piece, reading: Reading) -> Iterator[Row | Bad]:
    """The rows of a file under the names of its header, all values text; an empty cell is none.

    `Row.index` counts rows behind the header. A column without a name, as pandas writes its index, is left out.

    DamagedError: quotes that never end, a value longer than records may be, no name or one name twice in the header.
    """
    csv.field_size_limit(reading.max_record_bytes)
    is_tsv = bool(_TSV.search(piece.file.name.lower()))
    with open_content(piece.file) as stream:
        # Bytes that are not UTF-8 cost their own row only.
        content = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        try:
            rows = csv.reader(content, delimiter="\t" if is_tsv else ",", strict=True)
            header = next(rows, [])
            if header and is_utf16(header[0].encode("utf-8", "surrogateescape")):
                yield replace(UTF16, index=0)
                return
            if not _is_unicode(header):
                name = next(name for name in header if not _is_unicode(name))
                shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                raise DamagedError(f"the header is not UTF-8: {shown}; of Latin 1 iconv -f LATIN1 -t UTF-8 makes it")
            named = list(filter(None, header))
            if header and len(set(named)) < max(len(named), 1):
                raise DamagedError(f"the header needs names, each another: {', '.join(header)}")
            for index, values in enumerate(row for row in rows if row):
                record = dict(zip(header, values, strict=False))
                if len(values) != len(header):
                    yield Bad(
                        index, MALFORMED_CSV, f"{len(values)} field{'s' * (len(values) != 1)} under {len(header)} names"
                    )
                elif not _is_unicode(record):
                    yield Bad(index, NOT_UTF8)
                else:
                    yield Row(index, {name: value for name, value in record.items() if name and value})
        except csv.Error as error:
            raise DamagedError(str(error)) from error
        finally:
            content.detach()


# --- Text -------------------------------------------------------------------------------------------------------------


def read_text(piece: Piece, reading: Reading) -> Iterator[Row | Bad]:
    """Documents of a text file: {"text", "path"}. Line ends become `\\n`."""
    index = 0
    document: list[str] = []
    chars = size = 0
    bad: Bad | None = None  # what makes the document unreadable
    with open_content(piece.file) as stream:
        for line in lines(stream, reading.max_record_bytes):
            size += line.size
            if size > reading.max_record_bytes or line.data is None:
                bad = Bad(index, TOO_LONG, f"no blank line in {reading.max_record_bytes} bytes")
            elif bad is None:
                try:
                    text = line.data.decode("utf-8-sig" if line.offset == 0 else "utf-8")
                    document.append(text.replace("\r\n", "\n").replace("\r", "\n"))
                    chars += len(document[-1])
                except UnicodeDecodeError as error:
                    bad = Bad(index, NOT_UTF8, f"byte {line.offset + error.start}")
                    if line.offset == 0 and is_utf16(line.data):
                        bad = replace(UTF16, index=index)
            if bad is not None:
                document.clear()
                chars = max(chars, size)
            if chars >= DOCUMENT_CHARS and line.data is not None and line.data.isspace():
                yield bad or _document(piece, index, document)
                index += 1
                document, chars, size, bad = [], 0, 0, None
    # Blank lines after the last cut are the end of that document, and not another one.
    if bad or (document and not (index and all(map(str.isspace, document)))):
        yield bad or _document(piece, index, document)


def _document(piece: Piece, index: int, lines: list[str]) -> Row:
    return Row(index, {"text": "".join(lines), "path": piece.file.name})
