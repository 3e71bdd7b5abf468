"""Ctrl-C and SIGTERM of a command that is attached to a job: the job is not the command's child, and may go on."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

# Signals that nobody has looked at; one more and the command is stuck in something, and ends.
_UNSEEN = 3


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Inside, SIGINT and SIGTERM are appended to the list, whose owner looks at it often and removes what it has seen.

    An exception from a handler can come up in a callback of somebody's library, and is lost there.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        if len(noted) > _UNSEEN:
            raise KeyboardInterrupt

    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


class CancelQuestion:
    """What a Ctrl-C means: the first asks, or, without a terminal to ask on, says what a second one does."""

    def __init__(self) -> None:
        self._warned = False

    def ask(self, what: str) -> bool:
        """After a Ctrl-C: whether the user wants `what` ("job 17") cancelled. Ctrl-C is a yes."""
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            first, self._warned = not self._warned, True
            if first:
                note = f"interrupted: {what} not cancelled; once more cancels, SIGTERM stops following only"
                print(note, file=sys.stderr, flush=True)
            return not first
        print(f"\ncancel {what}? [y/N] ", end="", file=sys.stderr, flush=True)
        old = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return sys.stdin.readline().strip().lower() in ("y", "yes")
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return True
        finally:
            signal.signal(signal.SIGINT, old)
