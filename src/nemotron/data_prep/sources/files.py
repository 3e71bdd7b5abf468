"""What is read: a file with its format and compression, which its name tells, and a piece of it for one task.

`notes.jsonl.gz` is JSON Lines, gzip-compressed. Files of this machine and of stores are the same here; locations.py
lists and opens them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, get_args

Format = Literal["jsonl", "parquet", "arrow", "text", "warc"]
Compression = Literal["none", "gzip", "zstd"]
FORMATS: tuple[Format, ...] = get_args(Format)

_PROSE = (".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex")
_CODE = """
    .py .pyi .ipy .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .rs .go .java .kt .scala .swift .js .jsx .mjs .ts .tsx .rb .php
    .pl .lua .jl .r .hs .ml .ex .exs .erl .clj .cs .fs .sh .bash .zsh .sql .proto .cmake .toml .yaml .yml .ini .cfg .css
"""
SUFFIXES: Mapping[str, Format] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".arrow", ".arrows", ".feather", ".ipc"), "arrow"),
    **dict.fromkeys((*_PROSE, *_CODE.split()), "text"),
    **dict.fromkeys((".warc", ".wet"), "warc"),
}
"""File name's end -> format. `.json` is one object a line, too, where it is named or matched by a glob; in a folder it
is passed over: most are settings."""
COMPRESSION_SUFFIXES: Mapping[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
# Parquet and Arrow compress inside.
COMPRESSIBLE: tuple[Format, ...] = ("jsonl", "text", "warc")

MAGIC_BYTES = 4
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read.

    `uri`: absolute path on this machine, or an address (`s3://…`, `gs://…`, `https://…`, `hf://datasets/…@COMMIT/…`).
    `size`: bytes as stored. `version` tells it from its later self: time of change here, else ETag or blob id.
    """

    uri: str
    size: int
    version: str
    format: Format
    compression: Compression = "none"

    @property
    def name(self) -> str:
        """The file as messages and records name it: its `uri` without a query string, where signatures are."""
        if self.is_local:
            return self.uri
        return shown(self.uri)

    @property
    def is_local(self) -> bool:
        """Whether it is a path of this machine."""
        return not is_address(self.uri)


def is_address(location: str) -> bool:
    """Whether a location is one of a store (`s3://…`) rather than a path."""
    return "://" in location


def format_of(name: str) -> tuple[Format, Compression] | None:
    """Format and compression that a file's name tells; None for one that is not read."""
    path = PurePath(name.lower())
    suffix = path.suffix
    compression = COMPRESSION_SUFFIXES.get(suffix, "none")
    if compression != "none":
        suffix = PurePath(path.stem).suffix
    known = "jsonl" if suffix == ".json" else SUFFIXES.get(suffix)
    if known is None or (compression != "none" and known not in COMPRESSIBLE):
        return None
    return known, compression


def shown(uri: str) -> str:
    """An address as messages show it: no credentials, no query string (where signatures are)."""
    return re.sub(r"(https?://[^?#\s]*)\?[^\s'\"]*", r"\1", re.sub(r"://[^/@\s]*@", "://", uri))


def compression_of(begin: bytes) -> Compression:
    """Compression of a file by its first four bytes."""
    if begin.startswith(GZIP_MAGIC):
        return "gzip"
    return "zstd" if begin == ZSTD_MAGIC else "none"


TO_THE_END = -1
"""As `Piece.end`: all that is there."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one task reads of a file.

    From `begin` to before `end`: bytes of plain JSON Lines, at any borders (a line belongs to the piece in which it
    begins); row groups of Parquet; record batches of an Arrow file. Anything else is read whole: 0 and 1.
    `size`: stored bytes that belong to it, for the balance of tasks.
    """

    file: SourceFile
    begin: int
    end: int
    size: int
