"""Files cut into pieces, so that several tasks can read one file."""

from __future__ import annotations

import math
from itertools import pairwise

from nemo_runspec.errors import RunspecError
from nemotron.data_prep.sources.files import TO_THE_END, Piece, SourceFile
from nemotron.data_prep.sources.locations import open_binary


def whole(file: SourceFile) -> Piece:
    """A file in one piece."""
    if not can_be_cut(file):
        return Piece(file, 0, 1, file.size)
    return Piece(file, 0, file.size if file.format == "jsonl" else TO_THE_END, file.size)


def can_be_cut(file: SourceFile) -> bool:
    """Whether a file of this format can be read in pieces."""
    return (file.format == "jsonl" and file.compression == "none") or file.format in ("parquet", "arrow")


def pieces_of(file: SourceFile, target_bytes: int) -> list[Piece]:
    """Cut a file into pieces of about `target_bytes`, the same every time.

    A file that cannot be opened or understood is one piece: its reader meets the error and has a policy for it.
    """
    if target_bytes < 1:
        raise ValueError(f"target_bytes {target_bytes} must be at least 1")
    if not can_be_cut(file) or file.size <= target_bytes:
        return [whole(file)]
    if file.format == "jsonl":
        count = math.ceil(file.size / target_bytes)
        borders = [file.size * i // count for i in range(count + 1)]
        return [Piece(file, begin, end, end - begin) for begin, end in pairwise(borders)]
    try:
        sizes = _parquet_sizes(file) if file.format == "parquet" else _arrow_sizes(file)
    except RunspecError:
        raise
    except Exception:  # pyarrow raises errors of many types for damaged metadata
        return [whole(file)]
    return _grouped(file, sizes, target_bytes) or [whole(file)]


def _grouped(file: SourceFile, sizes: list[int], target_bytes: int) -> list[Piece]:
    """Neighbouring units together, until a piece has its size."""
    pieces: list[Piece] = []
    begin = size = 0
    for number, unit in enumerate(sizes):
        if size and size + unit > target_bytes:
            pieces.append(Piece(file, begin, number, size))
            begin, size = number, 0
        size += unit
    if begin < len(sizes):
        pieces.append(Piece(file, begin, len(sizes), size))
    return pieces


def _parquet_sizes(file: SourceFile) -> list[int]:
    """Stored bytes of each row group."""
    import pyarrow.parquet as pq

    with open_binary(file) as stream:
        metadata = pq.read_metadata(stream)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        return [sum(group.column(j).total_compressed_size for j in range(group.num_columns)) for group in groups]


def _arrow_sizes(file: SourceFile) -> list[int]:
    """The file's bytes divided evenly among its record batches, whose own sizes cannot be known without reading them.

    Empty for a stream, which has no table of batches.
    """
    import pyarrow as pa

    from nemotron.data_prep.sources.tables import is_file_format

    with open_binary(file) as stream:
        if not is_file_format(stream):
            return []
        count = pa.ipc.open_file(stream).num_record_batches
        return [file.size * (i + 1) // count - file.size * i // count for i in range(count)]
