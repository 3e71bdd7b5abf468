"""JSON Lines: one object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_runspec.errors import UserError


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows with keys in the given order, flushed to disk."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_own_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """`file:line` and object of each line of a user's file; a byte order mark and empty lines are passed over.

    UserError: the file cannot be read, or a line is no object.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines() also cuts at U+2028, JSON does not
    except (OSError, UnicodeDecodeError) as failure:
        raise UserError(f"cannot read {path}: {failure}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except ValueError as failure:
            raise UserError(f"{where}: not JSON: {failure}") from None
        if not isinstance(record, dict):
            raise UserError(f"{where}: must be an object")
        yield where, record
