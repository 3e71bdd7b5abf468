"""Numbers of things and paths, as messages show them."""

from __future__ import annotations

import os
from pathlib import Path


def plural(count: int, noun: str) -> str:
    """`document` of 1, `documents` of any other number; for nouns whose plural has an s."""
    return noun if count == 1 else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """`1 document`, `2,000 documents`."""
    return f"{count:,} {plural(count, noun)}"


def shown(path: Path) -> str:
    """`path` as messages show it: relative to the current directory where it lies below it, else whole."""
    text, here = os.path.abspath(path), os.getcwd()  # noqa: PTH100, PTH109
    return os.path.relpath(text, here) if text.startswith(here + os.sep) else text
