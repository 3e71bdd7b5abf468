"""Plain text: one document a file, a long one cut at blank lines."""

from __future__ import annotations

from collections.abc import Iterator

from nemotron.data_prep.sources.files import Piece
from nemotron.data_prep.sources.json_lines import UTF16, is_utf16
from nemotron.data_prep.sources.reading import NOT_UTF8, TOO_LONG, Bad, Reading, ReadReport, Row
from nemotron.data_prep.sources.streams import lines, open_content

DOCUMENT_CHARS = 100_000
"""A document ends at the first blank line after so many characters."""


def read_text(piece: Piece, reading: Reading, report: ReadReport) -> Iterator[Row | Bad]:
    """Documents of a text file: {"text", "path"}. Line ends become `\\n`."""
    index = 0
    document: list[str] = []
    chars = size = 0
    wrong: tuple[str, str] | None = None  # reason and detail: what makes the document unreadable
    with open_content(piece.file) as content:
        before = 0
        for line in lines(content.stream, reading.max_record_bytes):
            at = content.stored.tell()
            report.bytes, before = report.bytes + at - before, at
            size += line.size
            if size > reading.max_record_bytes or line.data is None:
                wrong = TOO_LONG, f"no blank line in {reading.max_record_bytes} bytes"
            elif wrong is None:
                try:
                    text = line.data.decode("utf-8-sig" if line.offset == 0 else "utf-8")
                    document.append(text.replace("\r\n", "\n").replace("\r", "\n"))
                    chars += len(document[-1])
                except UnicodeDecodeError as error:
                    utf16 = line.offset == 0 and is_utf16(line.data)
                    wrong = NOT_UTF8, UTF16.detail if utf16 else f"byte {line.offset + error.start}"
            if wrong is not None:
                document.clear()
                chars = max(chars, size)
            if chars >= DOCUMENT_CHARS and line.data is not None and line.data.isspace():
                yield _document(piece, index, document, wrong)
                index += 1
                document, chars, size, wrong = [], 0, 0, None
    # Blank lines after the last cut are the end of that document, and not another one.
    if wrong or (document and not (index and all(map(str.isspace, document)))):
        yield _document(piece, index, document, wrong)


def _document(piece: Piece, index: int, lines: list[str], wrong: tuple[str, str] | None) -> Row | Bad:
    if wrong is not None:
        return Bad(index, *wrong, hint=UTF16.hint if wrong == (NOT_UTF8, UTF16.detail) else None)
    return Row(index, {"text": "".join(lines), "path": piece.file.name})
