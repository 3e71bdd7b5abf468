"""Reader of Megatron's `.bin`/`.idx` token files (MMapIndexedDataset), memory-mapped.

Layout of `.idx`, little-endian: magic `MMIDIDX\\0\\0`, u64 version 1, u8 dtype code, u64 sequence count S, u64 document
count D, i32[S] sequence lengths in tokens, i64[S] byte offsets into `.bin`, i64[D] index of each document's first
sequence. `.bin` is the tokens one after another. Source: megatron-core `datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nemo_runspec.errors import UserError
from nemotron.kit.open_files import allow_open_files

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
# Megatron's enum; only the types that hold token ids are accepted.
DTYPES: dict[int, type[np.integer]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class IndexedTokens:
    """The sequences of `prefix`.bin/.idx. `len()` counts sequences; `tokens(i)` is a read-only 1-D array view.

    Raises UserError naming the file if one is missing, is no such file, or is shorter than its header says.
    """

    def __init__(self, prefix: Path) -> None:
        index_path, token_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in (index_path, token_path):
            if not path.is_file():
                raise UserError(f"{path}: no such file")
        raw = index_path.read_bytes()
        if len(raw) < HEADER.size or raw[: len(MAGIC)] != MAGIC:
            raise UserError(f"{index_path}: not a Megatron token index (magic MMIDIDX missing)")
        _, version, code, num_sequences, num_documents = HEADER.unpack_from(raw)
        if version != 1 or code not in DTYPES:
            raise UserError(f"{index_path}: version {version} with dtype code {code} is not supported")
        if len(raw) != HEADER.size + 12 * num_sequences + 8 * num_documents:
            raise UserError(f"{index_path}: truncated or too long for {num_sequences} sequences")
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        self.lengths: NDArray[np.int32] = np.frombuffer(raw, "<i4", num_sequences, HEADER.size)
        self.offsets: NDArray[np.int64] = np.frombuffer(raw, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        if token_path.stat().st_size < self.num_tokens * self.dtype.itemsize:
            raise UserError(f"{token_path}: shorter than its index says ({self.num_tokens} tokens)")
        # numpy refuses to map an empty file
        self._bin = np.memmap(token_path, dtype=np.uint8, mode="r") if self.num_tokens else np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, sequence: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        """Token ids `start:stop` of one sequence; positions beyond its end are cut off, as in slicing."""
        length = int(self.lengths[sequence])
        stop = length if stop is None else min(stop, length)
        count = max(stop - start, 0)
        offset = int(self.offsets[sequence]) + start * self.dtype.itemsize
        return np.frombuffer(self._bin, self.dtype, count, offset) if count else np.empty(0, self.dtype)


class JoinedTokens:
    """The sequences of several files one after another, numbered through; otherwise as `IndexedTokens`.

    Raises UserError as that does, and for no file at all.
    """

    def __init__(self, prefixes: Sequence[Path]) -> None:
        if not prefixes:
            raise UserError("no token files to read")
        allow_open_files()  # each of them stays mapped
        self._files = [IndexedTokens(prefix) for prefix in prefixes]
        self._firsts = np.cumsum([0, *(len(file) for file in self._files)])
        self.lengths: NDArray[np.int32] = np.concatenate([file.lengths for file in self._files])
        self.num_tokens = sum(file.num_tokens for file in self._files)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, sequence: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
        """Token ids `start:stop` of one sequence; positions beyond its end are cut off, as in slicing."""
        number = int(np.searchsorted(self._firsts, sequence, side="right")) - 1
        return self._files[number].tokens(sequence - int(self._firsts[number]), start, stop)
