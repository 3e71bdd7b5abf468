"""Writes token files as the published format describes them, independently of the writer in data_prep."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np


def write_indexed(prefix: Path, documents: list[list[int]], dtype: str = "<u2", code: int = 8) -> None:
    """`prefix`.bin and `prefix`.idx with one sequence a document."""
    arrays = [np.array(document, dtype) for document in documents]
    Path(f"{prefix}.bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    sizes = [len(document) for document in documents]
    pointers = np.cumsum([0, *(array.nbytes for array in arrays)])[:-1].astype("<i8")
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1)
        + np.array(sizes, "<i4").tobytes()
        + pointers.tobytes()
        + np.arange(len(sizes) + 1, dtype="<i8").tobytes()
    )


def write_blend(directory: Path, sources: dict[str, list[list[int]]], weights: dict[str, float]) -> None:
    """A one-phase blend directory in which every source is also its own held-out part."""
    entries = {}
    for name, documents in sources.items():
        write_indexed(directory / f"{name}_train", documents)
        write_indexed(directory / f"{name}_valid", documents)
        tokens = sum(map(len, documents))
        entries[name] = {"train": [f"{name}_train"], "valid": [f"{name}_valid"], "tokens": tokens, "bytes": 4 * tokens}
    blend = {"phases": [{"name": "only", "until": 1.0, "weights": weights}], "sources": entries, "vocab_size": 2048}
    (directory / "blend.json").write_text(json.dumps(blend))
