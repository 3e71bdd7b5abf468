"""What a regular expression finds in an answer, as `patterns.py` asks in a process of its own.

It imports nothing of the project: see `killable.py`.
"""

from __future__ import annotations

import re


def is_found(pattern: str, text: str) -> bool:
    """Whether the pattern is found anywhere."""
    return re.search(pattern, text) is not None


def last_found(pattern: str, text: str) -> str | None:
    """What the pattern finds last, whatever its case: its first group, empty where that took no part, if it has any,
    and else all of it; None: it finds nothing."""
    matches = list(re.finditer(pattern, text, re.IGNORECASE))
    if not matches:
        return None
    return matches[-1][1] or "" if matches[-1].re.groups else matches[-1][0]
