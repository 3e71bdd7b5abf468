"""What the stores share: a request asked again, and a remote file as a seekable stream.

It is read in ranges of bytes, with read-ahead that grows while it is read in order.

The caches of fsspec read ahead by a fixed number of bytes. A small one makes many requests of a long read, a large one
fetches far more than a row group or a record needs.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from nemo_runspec.errors import RunFailed
from nemotron.data_prep.sources.files import SourceFile, redact

# Bytes. A read that continues where the last one ended fetches twice as many as that one, up to the greatest.
_LEAST_FETCH, _GREATEST_FETCH = 1 << 16, 16 << 20
_BUFFER = 1 << 16
# Faults of this code and not of a store: no error message of ours may hide them.
BUGS = (TypeError, AttributeError, LookupError, AssertionError)
TRANSIENT_STATUS = (408, 425, 429, 500, 502, 503, 504)
_FIRST_WAIT = 0.5  # seconds before a request is made a second time; doubled every time
T = TypeVar("T")


class StoredObject(NamedTuple):
    """A file as its store lists it."""

    uri: str
    size: int
    version: str


def retried(request: Callable[[], T], pause: Callable[[Exception], float | None], attempts: int) -> T:
    """What `request` returns, which is made at most `attempts` times.

    `pause`: seconds to wait at least before it is made again; None for an error that will not pass.
    """
    for attempt in range(attempts - 1):
        try:
            return request()
        except Exception as error:
            seconds = pause(error)
            if seconds is None:
                raise
        time.sleep(max(seconds, _FIRST_WAIT * 2**attempt))
    return request()


class _RangeFile(io.RawIOBase):
    """A file of known size over `fetch(begin, end)`, with read-ahead while it is read in order."""

    def __init__(self, name: str, size: int, fetch: Callable[[int, int], bytes], end: int | None) -> None:
        super().__init__()
        self.name = name
        self._size, self._fetch = size, fetch
        self._ahead_to = size if end is None else min(end, size)
        self._position = 0
        self._chunk, self._chunk_begin = b"", 0
        self._next_fetch = _LEAST_FETCH

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(22, "a position before the file's beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), self._size - self._position)
        if wanted <= 0:
            return 0
        offset = self._position - self._chunk_begin
        if not 0 <= offset < len(self._chunk):
            self._fetch_at(self._position, wanted)
            offset = 0
        part = self._chunk[offset : offset + wanted]
        view[: len(part)] = part
        self._position += len(part)
        return len(part)

    def _fetch_at(self, begin: int, wanted: int) -> None:
        # Behind the reader's `end` the steps are small again: what is read there is mostly the rest of one line.
        in_order = begin == self._chunk_begin + len(self._chunk) and begin != self._ahead_to
        self._next_fetch = min(2 * self._next_fetch, _GREATEST_FETCH) if in_order else _LEAST_FETCH
        ahead = min(begin + self._next_fetch, self._ahead_to if begin < self._ahead_to else self._size)
        self._chunk, self._chunk_begin = b"", begin  # at most one in memory
        self._chunk = self._fetch(begin, max(begin + wanted, ahead))


def range_stream(file: SourceFile, fetch: Callable[[int, int], bytes], end: int | None = None) -> BinaryIO:
    """A buffered, seekable stream over `fetch(begin, end)`. RunFailed: three answers had fewer bytes than asked for."""

    def whole(begin: int, end: int) -> bytes:
        for _ in range(3):
            data = fetch(begin, end)
            if len(data) == end - begin:
                return data
        raise RunFailed(f"{redact(file.uri)}: {len(data)} of {end - begin} bytes came from position {begin} on")

    return cast(BinaryIO, io.BufferedReader(_RangeFile(redact(file.uri), file.size, whole, end), _BUFFER))


def changed_error(file: SourceFile) -> RunFailed:
    """The error for a file that is no longer what was listed."""
    return RunFailed(f"{redact(file.uri)} changed after it was listed", "--force starts anew, with what is there now")
