"""What a payload must hold to be published, looked at before it gets a version: no later step reads a wrong one.

The weights of a model are read whole: a value that is not finite has ruined every number computed from it. Of data only
the beginning is read. Nothing here loads torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemo_runspec.errors import UserError, first_line

# Element type of a tensor -> the unsigned integer of its size, and the bits that are all set in an infinity or a NaN
# and in no finite number (IEEE 754; of E4M3, which has no infinity, in NaN alone).
_NOT_FINITE = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E5M2": ("u1", 0x7C),
    "F8_E4M3": ("u1", 0x7F),
}
_CHUNK = 64 << 20  # bytes looked at a time


def check_weights(path: Path) -> int:
    """The number of tensors in the safetensors files below a folder, or in one file.

    Raises:
        UserError: a file is malformed, holds no tensor or an empty one, or a value is NaN or infinite.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*.safetensors"))
    return sum(_check_safetensors(file) for file in files if file.suffix == ".safetensors")


def _check_safetensors(file: Path) -> int:
    import numpy as np
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):  # checks offsets, shapes and sizes against each other
            pass
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: not a whole safetensors file: {error}") from error
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    if not header:
        raise UserError(f"{file}: it holds no tensor")
    data = np.memmap(file, dtype=np.uint8, mode="r", offset=8 + length) if file.stat().st_size > 8 + length else None
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        if data is None or begin == end:
            raise UserError(f"{file}: tensor {name} is empty, its shape is {tensor['shape']}")
        if tensor["dtype"] not in _NOT_FINITE:
            continue
        unsigned, bits = _NOT_FINITE[tensor["dtype"]]
        for at in range(begin, end, _CHUNK):
            values = data[at : min(at + _CHUNK, end)].view(unsigned)
            if ((values & values.dtype.type(bits)) == bits).any():
                raise UserError(
                    f"{file}: tensor {name} has values that are NaN or infinite",
                    "training diverged: metrics.jsonl of the run says when; a smaller learning rate helps",
                )
    return len(header)


def check_not_empty(what: str, path: Path) -> None:
    """UserError where the file, the files of the folder, or those of the prefix `path` hold no byte."""
    files = [path] if path.is_file() else [*path.rglob("*")] if path.is_dir() else [*path.parent.glob(f"{path.name}*")]
    if not any(file.is_file() and file.stat().st_size for file in files):
        raise UserError(f"{what}: {path} is empty")


def check_token_streams(path: Path) -> None:
    """UserError unless there is a Megatron token stream below the folder: a .bin that is not empty and its .idx."""
    streams = [file for file in path.rglob("*.bin") if file.with_suffix(".idx").is_file()]
    if not any(file.stat().st_size for file in streams):
        raise UserError(f"{path}: no token stream in it (NAME.bin with tokens, and NAME.idx)")


def check_columns(path: Path, columns: tuple[str, ...]) -> None:
    """UserError unless the Parquet files below a folder, or the one file, have these columns, and together a row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    rows = 0
    for file in files:
        try:
            metadata = pq.read_metadata(file)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{file}: not a Parquet file: {first_line(error)}") from error
        missing = [name for name in columns if name not in metadata.schema.to_arrow_schema().names]
        if missing:
            raise UserError(f"{file}: no column {' and '.join(missing)}")
        rows += metadata.num_rows
    if not rows:
        raise UserError(f"{path}: no row in {len(files)} Parquet files")


def check_first_record(file: Path, keys: tuple[str, ...]) -> None:
    """UserError unless the first record of a JSONL file is an object with these keys."""
    with file.open(encoding="utf-8", errors="replace") as stream:
        line = stream.readline()
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise UserError(f"{file}:1: not a JSON object: {line[:60]!r}")
    missing = [key for key in keys if key not in record]
    if missing:
        raise UserError(f"{file}:1: no {' and '.join(missing)}", f"it has {', '.join(record)}")
