"""What is read: a file, whose name says its format and compression, and a piece of it for one task.

`notes.jsonl.gz` is JSON Lines, gzip-compressed. Nothing here depends on where a file is: locations.py lists and opens.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, get_args

from nemo_runspec.errors import first_line
from nemo_runspec.secrets import redact as redact

Format = Literal["jsonl", "json", "csv", "parquet", "arrow", "text", "warc"]
Compression = Literal["none", "gzip", "zstd"]
FORMATS: tuple[Format, ...] = get_args(Format)
RECORD_FORMATS: tuple[Format, ...] = ("jsonl", "json", "csv", "parquet", "arrow")
"""Formats whose records have named fields."""

_PROSE = (".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex")
_CODE = """
    .py .pyi .ipy .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .rs .go .java .kt .scala .swift .js .jsx .mjs .ts .tsx .rb .php
    .pl .lua .jl .r .hs .ml .ex .exs .erl .clj .cs .fs .sh .bash .zsh .sql .proto .cmake .toml .yaml .yml .ini .cfg .css
"""
SUFFIXES: Mapping[str, Format] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), "jsonl"),
    **dict.fromkeys((".json",), "json"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".arrow", ".arrows", ".feather", ".ipc"), "arrow"),
    **dict.fromkeys((*_PROSE, *_CODE.split()), "text"),
    **dict.fromkeys((".warc", ".wet"), "warc"),
}
"""Suffix -> format. A `.json` file holds an array of records, or JSON Lines: its beginning says which. So it does of a
`.jsonl` file on this machine that is not compressed."""
SETTINGS_TOO: tuple[Format, ...] = ("json", "csv")
"""In a folder, plain ones of these are read only where nothing else is: beside other data they mostly hold settings and
tables. Nobody compresses settings."""
COMPRESSION_SUFFIXES: Mapping[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
# Parquet and Arrow compress inside.
COMPRESSIBLE: tuple[Format, ...] = ("jsonl", "json", "csv", "text", "warc")

MAGIC_BYTES = 4
BEGIN_BYTES = 256  # in which a JSON array has its bracket
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read.

    `uri`: absolute path on this machine, or an address (`s3://…`, `gs://…`, `https://…`, `hf://datasets/…@COMMIT/…`).
    `size`: bytes as stored. `version` changes with the content: time of modification on this machine, else what the
    store has for it (ETag, generation, blob id).
    """

    uri: str
    size: int
    version: str
    format: Format
    compression: Compression = "none"

    @property
    def name(self) -> str:
        """The file as messages and records name it: its `uri` without a query string, where signatures are."""
        return self.uri if self.is_local else redact(self.uri)

    @property
    def is_local(self) -> bool:
        """Whether it is a path of this machine."""
        return "://" not in self.uri


def format_of(name: str) -> tuple[Format, Compression] | None:
    """Format and compression by a file's name; None for a file that is not read."""
    path = PurePath(name.lower())
    suffix = path.suffix
    compression = COMPRESSION_SUFFIXES.get(suffix, "none")
    if compression != "none":
        suffix = PurePath(path.stem).suffix
    file_format = SUFFIXES.get(suffix)
    if file_format is None or (compression != "none" and file_format not in COMPRESSIBLE):
        return None
    return file_format, compression


def can_be_cut(file: SourceFile) -> bool:
    """Whether a file of this format can be read in pieces."""
    return (file.format == "jsonl" and file.compression == "none") or file.format in ("parquet", "arrow")


def reason_of(error: BaseException) -> str:
    """What an error says, in one line and without secrets."""
    return redact(first_line(error))


def compression_of(begin: bytes) -> Compression:
    """Compression of a file by its first four bytes."""
    if begin.startswith(GZIP_MAGIC):
        return "gzip"
    # A frame of user data (0x184D2A50 to 5F), as pzstd writes one to say how long the next is.
    is_skippable = begin[1:] == b"\x2a\x4d\x18" and begin[0] >> 4 == 5
    return "zstd" if begin == ZSTD_MAGIC or is_skippable else "none"


def is_json_array(begin: bytes) -> bool:
    """Whether a file's first bytes are those of a JSON array."""
    return begin.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


TO_THE_END = -1
"""As `Piece.end`: up to the end of the file."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one task reads of a file.

    From `begin` to before `end`: bytes of plain JSON Lines, cut anywhere (a line belongs to the piece in which it
    begins); row groups of Parquet; record batches of an Arrow file. Other files are one piece, from 0 to 1.
    `size`: its stored bytes, by which work is divided.
    """

    file: SourceFile
    begin: int
    end: int
    size: int
