"""Megatron's token stream on disk: `PREFIX.bin` holds the tokens, `PREFIX.idx` where each document begins.

Layout of the index (little endian, version 1 of the format): magic `MMIDIDX\\0\\0`, version (u64), dtype code (u8),
number of sequences S (u64), number of document boundaries D (u64), then S sequence lengths (i32), S byte offsets into
the .bin (i64) and D document boundaries as sequence numbers (i64, the first is 0). Here a document is one sequence,
so D = S + 1. Megatron-Core's `IndexedDataset` reads these files.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_CODES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
_HEADER = struct.Struct("<QBQQ")
HEADER_SIZE = len(MAGIC) + _HEADER.size


def token_dtype(vocab_size: int) -> type[np.generic]:
    """uint16 while ids fit (Megatron's limit is 65,500), else int32."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedDatasetWriter:
    """Appends documents; the index is written on a clean exit only, so a crash leaves no readable half.

    Usage: `with IndexedDatasetWriter(prefix, np.uint16) as writer: writer.add_documents(tokens, lengths)`. The files
    are those that megatron-core's `IndexedDatasetBuilder` writes for the same documents, byte for byte. Memory: four
    bytes a document, and some twenty more of each while the index is written.
    """

    def __init__(self, prefix: Path, dtype: type[np.generic]) -> None:
        self._prefix = prefix
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._limits = np.iinfo(self._dtype)
        self._lengths: list[np.ndarray] = []
        self._file = prefix.with_name(prefix.name + ".bin").open("wb")

    def add_documents(self, tokens: np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Append documents.

        Args:
            tokens: integers, 1-D: the documents' ids one after another, eos included.
            lengths: how many of them are each document's; 0 is an empty document.

        Raises:
            ValueError: an id does not fit the dtype, the lengths do not add up, or one is beyond what the index holds.
        """
        sizes = np.asarray(lengths, dtype=np.int64)
        if int(sizes.sum()) != len(tokens) or (sizes < 0).any():
            raise ValueError(f"lengths of {int(sizes.sum())} tokens for {len(tokens)}")
        if len(sizes) and int(sizes.max()) > np.iinfo(np.int32).max:
            raise ValueError(f"a document of {int(sizes.max())} tokens; the index holds lengths below 2^31")
        if len(tokens) and (tokens.min() < self._limits.min or tokens.max() > self._limits.max):
            raise ValueError(f"token id outside {self._dtype.name}: {tokens.min()}..{tokens.max()}")
        self._file.write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
        self._lengths.append(sizes.astype("<i4"))

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
        if kind is None:
            self._write_index()

    def _write_index(self) -> None:
        lengths = np.concatenate([np.empty(0, "<i4"), *self._lengths])
        offsets = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1].astype("<i8") * self._dtype.itemsize, out=offsets[1:])
        boundaries = np.arange(len(lengths) + 1, dtype="<i8")
        code = next(code for code, dtype in DTYPE_CODES.items() if np.dtype(dtype).newbyteorder("<") == self._dtype)
        with self._prefix.with_name(self._prefix.name + ".idx").open("wb") as file:
            file.write(MAGIC)
            file.write(_HEADER.pack(VERSION, code, len(lengths), len(boundaries)))
            for array in (lengths, offsets, boundaries):
                file.write(array.data)
            file.flush()
            os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """What the first bytes of an index say: the tokens' type, and how many sequences and boundaries of documents."""

    dtype: np.dtype
    num_sequences: int
    num_boundaries: int

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return max(0, self.num_boundaries - 1)


def read_header(prefix: Path) -> IndexHeader:
    """The header of `PREFIX.idx`. ValueError, with the file: it is no index, or not as long as its header says."""
    path = prefix.with_name(prefix.name + ".idx")
    with path.open("rb") as file:
        raw = file.read(HEADER_SIZE)
        num_bytes = os.fstat(file.fileno()).st_size
    if len(raw) < HEADER_SIZE or not raw.startswith(MAGIC):
        raise ValueError(f"{path} is not a Megatron index (wrong magic bytes)")
    version, code, num_sequences, num_boundaries = _HEADER.unpack_from(raw, len(MAGIC))
    if version != VERSION or code not in DTYPE_CODES:
        raise ValueError(f"{path}: unknown version {version} or dtype code {code}")
    if num_bytes != HEADER_SIZE + 12 * num_sequences + 8 * num_boundaries:
        raise ValueError(f"{path} is truncated: {num_bytes} bytes for {num_sequences} sequences")
    return IndexHeader(np.dtype(DTYPE_CODES[code]), num_sequences, num_boundaries)


class IndexedDataset:
    """Memory-mapped reader. `tokens` is the whole stream, `dataset[i]` document i, `offsets` where documents begin.

    Attributes: `tokens` 1-D array of the stored dtype; `lengths` tokens per document (i32); `offsets` int64 of length
    len(dataset) + 1, in tokens: document i is `tokens[offsets[i]:offsets[i + 1]]`. Raises ValueError with the file's
    name for anything that is not such a pair of files.
    """

    def __init__(self, prefix: Path) -> None:
        header = read_header(prefix)
        raw = prefix.with_name(prefix.name + ".idx").read_bytes()
        self.dtype = header.dtype
        lengths = np.frombuffer(raw, dtype="<i4", count=header.num_sequences, offset=HEADER_SIZE)
        boundaries = np.frombuffer(raw, dtype="<i8", offset=HEADER_SIZE + 12 * header.num_sequences)
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.offsets: np.ndarray = starts[boundaries]
        self.lengths: np.ndarray = np.diff(self.offsets).astype(np.int32)
        bin_path = prefix.with_name(prefix.name + ".bin")
        expected = int(starts[-1]) * self.dtype.itemsize
        if bin_path.stat().st_size != expected:
            raise ValueError(f"{bin_path} has {bin_path.stat().st_size} bytes, its index says {expected}")
        # An empty file cannot be mapped.
        self.tokens: np.ndarray = np.memmap(bin_path, self.dtype, "r") if expected else np.empty(0, self.dtype)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Token ids of one document, 1-D, in the stored dtype; a view into the mapped file."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]
