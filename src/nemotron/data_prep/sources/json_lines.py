"""JSON Lines: one object a line, UTF-8."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import replace

from nemotron.data_prep.sources.files import Piece, SourceFile
from nemotron.data_prep.sources.reading import (
    MALFORMED,
    NOT_AN_OBJECT,
    NOT_UTF8,
    TOO_LONG,
    Bad,
    Reading,
    ReadReport,
    Row,
)
from nemotron.data_prep.sources.streams import lines, open_content

_BOM = b"\xef\xbb\xbf"
UTF16 = Bad(None, NOT_UTF8, "the file is UTF-16", "iconv -f UTF-16 -t UTF-8 FILE makes a file that is read")


def read_json_lines(piece: Piece, reading: Reading, report: ReadReport) -> Iterator[Row | Bad]:
    """The objects of a piece. `Row.index` counts its lines, blank ones too."""
    plain = piece.file.compression == "none"
    cut = plain and (piece.begin, piece.end) != (0, piece.file.size)
    end = piece.end if plain else None
    with open_content(piece.file, cut=cut, end=end) as content:
        before = piece.begin if plain else 0
        for index, line in enumerate(lines(content.stream, reading.max_record_bytes, before if plain else 0, end)):
            if plain:
                report.bytes += line.size
            elif (at := content.stored.tell()) > before:
                report.bytes += at - before
                before = at
            if line.data is None:
                detail = f"{line.size} bytes, more than {reading.max_record_bytes}"
                yield Bad(index, TOO_LONG, detail)
            elif (data := line.data.removeprefix(_BOM) if line.offset == 0 else line.data).strip():
                item = parse_line(data)
                if line.offset == 0 and is_utf16(data):
                    item = UTF16
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
    with open_content(file) as content:
        left = position
        while left and (chunk := content.stream.read(min(left, 1 << 20))):
            count += chunk.count(b"\n")
            left -= len(chunk)
            last = chunk[-1:]
    return count + (position > 0 and last != b"\n")
