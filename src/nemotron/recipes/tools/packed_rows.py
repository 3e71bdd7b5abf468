"""Packed conversations in Parquet files, for the tools that show data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nemo_runspec.errors import UserError, first_line
from nemotron.data_prep.chat.encoding import PACKED_SCHEMA


class PackedRow(NamedTuple):
    """A row. `loss_mask`: float32 where records have weights. `seq_start_id`: where each of its sequences starts."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8 | np.float32]
    seq_start_id: NDArray[np.int32]


def packed_files(path: Path) -> list[Path]:
    """The Parquet files at `path` with the columns of packed rows.

    Raises:
        UserError: one cannot be read, and it is `path` itself or lies beside packed ones, of which it may be one.
    """
    packed: list[Path] = []
    damaged: list[UserError] = []
    for file in sorted(path.rglob("*.parquet")) if path.is_dir() else [path] * (path.suffix == ".parquet"):
        try:
            names = pq.read_schema(file).names
        except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
            reason = first_line(error)
            damaged.append(UserError(f"{file}: damaged file: not a readable Parquet file ({reason})"))
        else:
            packed += [file] * (set(PACKED_SCHEMA.names) <= set(names))
    if damaged and (packed or path.is_file()):
        raise damaged[0]
    return packed


def read_rows(file: Path, row_groups: Sequence[int] | None = None) -> Iterator[PackedRow]:
    """The rows of a file or of some of its row groups, in order."""
    with pq.ParquetFile(file) as parquet:
        for batch in parquet.iter_batches(batch_size=64, row_groups=row_groups, columns=PACKED_SCHEMA.names):
            for cells in zip(*batch.columns, strict=True):
                yield PackedRow(*(cell.values.to_numpy() for cell in cells))
