"""Regular expressions of records and of the user, matched in a process that can be killed.

`(a+)+$` takes hours for thirty letters, and whoever wrote the pattern did not write the answers. A match that takes too
long is none.
"""

from __future__ import annotations

from nemotron.stack.environments import matching
from nemotron.stack.environments.killable import OutOfTimeError, Worker

_worker = Worker(matching, cpu_seconds=1.0)


def is_found(pattern: str, text: str) -> bool:
    """Whether the pattern is found in the text, and within the limit of time."""
    try:
        return _worker.call(matching.is_found, pattern, text)
    except OutOfTimeError:
        return False


def last_found(pattern: str, text: str) -> str | None:
    """What the pattern finds last in the text, as `matching.last_found` says.

    Raises:
        OutOfTimeError: finding it takes too long.
    """
    return _worker.call(matching.last_found, pattern, text)
