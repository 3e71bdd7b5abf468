"""Numbers of things in messages."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """`document` of 1, `documents` of any other number; for nouns whose plural has an s."""
    return noun if count == 1 else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """`1 document`, `2,000 documents`."""
    return f"{count:,} {plural(count, noun)}"
