"""The last `\\boxed{…}` of an answer, which is what published math and multiple-choice records are judged by."""

from __future__ import annotations

import re

_OPENING = "\\boxed{"
_BOXES = re.compile(r"(?:\\boxed\{\s*)+")


def last_boxed(answer: str) -> str | None:
    """What stands in the last `\\boxed{…}`, without blanks around it and without boxes around all of it.

    None where there is no box, where one is not closed, and where the last one holds a further box among other text:
    it does not say which of the two is meant. A brace with a backslash before it is a character, and closes nothing.
    """
    content, start = None, answer.find(_OPENING)
    while start >= 0:
        end = _closing_brace(answer, start + len(_OPENING))
        if end is None:
            return None
        content = answer[start + len(_OPENING) : end].strip()
        start = answer.find(_OPENING, end)
    if content is None or _OPENING not in content:
        return content
    # All boxes around it at once: one by one takes quadratic time.
    around = _BOXES.match(content)
    inner = content[around.end() :] if around else content
    for _ in range(around[0].count(_OPENING) if around else 0):
        inner = inner.rstrip().removesuffix("}")
    is_all = _OPENING not in inner and _closing_brace(inner + "}", 0) == len(inner)
    return inner.strip() if is_all else None


def _closing_brace(text: str, start: int) -> int | None:
    """Where the brace that was opened before `start` is closed."""
    depth = 1
    for token in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        if token[0] in "{}":
            depth += 1 if token[0] == "{" else -1
        if depth == 0:
            return token.start()
    return None
