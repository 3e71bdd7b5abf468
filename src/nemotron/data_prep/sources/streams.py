"""Stored bytes -> content: decompressed as a stream, in lines of bounded length."""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, cast

from nemotron.data_prep.sources.files import MAGIC_BYTES, Compression, SourceFile, compression_of
from nemotron.data_prep.sources.locations import open_binary

_BUFFER = 1 << 20


class DamagedError(Exception):
    """The bytes of a file, or of the rest of it, are not what its format asks for."""


class Content(NamedTuple):
    """A file's content. `stored` tells (`.tell()`) how far its stored bytes have been read."""

    stream: BinaryIO
    stored: BinaryIO


@contextlib.contextmanager
def open_content(file: SourceFile, *, cut: bool = False, end: int | None = None) -> Iterator[Content]:
    """Open a file and decompress it. `cut`: it was cut into pieces as a plain file, so it must not be compressed.

    Raises:
        DamagedError: also later, by every read.
        OSError: it cannot be opened or read.
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
        yield Content(decompressed(stored, compression), stored)


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
            data = self._inner.read(len(buffer))
        except (EOFError, zlib.error) as error:
            raise DamagedError(str(error).splitlines()[0]) from error
        except OSError as error:
            if error.strerror is not None:  # of the disk, not of the format
                raise
            raise DamagedError(str(error).splitlines()[0]) from error
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
