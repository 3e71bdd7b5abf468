"""JSON Lines: one object a line. A malformed line is an error that names file and line number."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_runspec.errors import UserError


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object), one line in memory at a time; blank lines are skipped.

    UserError for a line that is not UTF-8, not JSON or not an object.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                value = json.loads(raw.rstrip(b"\r\n"))
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: not UTF-8 (byte {error.start} of the line)") from error
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: malformed JSON: {error.msg} (column {error.colno})") from error
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, nesting without end
                raise UserError(f"{path}:{number}: malformed JSON: {error}") from error
            if not isinstance(value, dict):
                raise UserError(f"{path}:{number}: expected a JSON object, found {type(value).__name__}")
            yield number, value


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows with keys in the given order, flushed to disk; returns how many."""
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
        file.flush()
        os.fsync(file.fileno())
    return count
