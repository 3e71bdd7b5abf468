"""What a command that is attached to a job needs: the job is not its child, and may go on without it.

Ctrl-C and SIGTERM are noted, Ctrl-C asks whether to cancel, and a cluster that does not answer is waited for.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Protocol

from nemo_runspec.errors import FAILED, PREEMPTED, RunFailed, report

# How long a cluster may not answer, in seconds.
PATIENCE_AWAY = 600.0

# Signals that nobody has looked at; one more and the command is stuck in something, and ends.
_UNSEEN = 3


def say(text: str) -> None:
    """Print to stderr: what happens to a job, while stdout has its log."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def handling(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> Iterator[None]:
    """Inside, `handler` is that of these signals."""
    old = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)


class Unreachable(RunFailed):
    """The cluster does not answer, or the connection to it was lost. What was started over there goes on."""


class SignalNoted(Exception):
    """A signal is in the list of `noted_signals`."""


class Patience:
    """With a cluster that does not answer just now."""

    def __init__(self) -> None:
        self._since: float | None = None

    def lost(self, note: str, error: Exception) -> None:
        """No answer: print `note` the first time, and raise `error` once that has lasted for PATIENCE_AWAY seconds."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            say(note)
        if now - self._since > PATIENCE_AWAY:
            raise error

    def answered(self, note: str) -> None:
        """An answer: print `note` if there was none before."""
        if self._since is not None:
            self._since = None
            say(note)


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

    with handling((signal.SIGINT, signal.SIGTERM), note):
        yield noted


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
                say(note)
            return not first
        print(f"\ncancel {what}? [y/N] ", end="", file=sys.stderr, flush=True)
        with handling([signal.SIGINT], signal.default_int_handler):
            try:
                return sys.stdin.readline().strip().lower() in ("y", "yes")
            except KeyboardInterrupt:
                print(file=sys.stderr)
                return True


class Follower(Protocol):
    """Where following jobs has got to; goes on there after a question.

    `signals`: as `noted_signals` yields them. `told_to_stop`: the cluster has taken the order to cancel the jobs.
    """

    signals: list[int]
    told_to_stop: bool

    @property
    def left(self) -> str:
        """The jobs that have not ended, as `job 17`."""

    @property
    def how_to_go_on(self) -> str:
        """The cluster's own commands for these jobs."""

    def run(self) -> int:
        """Follow the jobs to their end, and return the exit code; raises SignalNoted, Unreachable."""

    def cancel(self) -> int:
        """Cancel the jobs, follow them to their end, and return the exit code; raises Unreachable."""


def attend(follower: Follower) -> int:
    """Stay with jobs to their end, and return the exit code of the command.

    Ctrl-C asks once whether to cancel, and a second one cancels; without a terminal to ask on, the first says what a
    second one does. SIGTERM leaves the jobs running, and the command ends with 143. Where the cluster no longer
    answers it ends with 1, and says how to go on.
    """
    question = CancelQuestion()
    with noted_signals() as follower.signals:
        while True:
            try:
                with contextlib.suppress(SignalNoted):
                    return follower.run()
                if signal.SIGTERM in follower.signals:
                    say(f"stopped by SIGTERM; {follower.left} not cancelled\n{follower.how_to_go_on}")
                    return PREEMPTED
                follower.signals.pop(0)
                if question.ask(follower.left):
                    return follower.cancel()
            except Unreachable as error:
                fate = "told to stop" if follower.told_to_stop else "not cancelled"
                report(RunFailed(f"{error.message}; {follower.left} {fate}", follower.how_to_go_on))
                return FAILED
