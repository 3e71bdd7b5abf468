"""Stopping on a signal: `StopRequested` is raised where work can be left, in training, evaluation and data work alike.

Schedulers send SIGTERM or SIGUSR1 (Slurm's `--signal=USR1@120`), a terminal that is closed SIGHUP, Ctrl-C sends SIGINT.
Work that has something to save runs inside `with StopFlag() as stop:`. The handler then only sets a flag, and
`stop.poll()` raises StopRequested where the caller can be left: at the head of a training step, at every decoding step,
between two rewards. Data work saves nothing when it leaves (what it has published stays, what it has not is not there),
so after `stop_at_once()` the handler itself raises, wherever the script is.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from nemo_runspec.errors import (
    INTERRUPTED,
    PREEMPTED,
    Interrupted,
    Preempted,
    how_to_resume,
    leaving_signals,
    say_in_handler,
)


class StopRequested(SystemExit):
    """A signal asked the process to leave. Its code is 130 for SIGINT and 143 for the others.

    A SystemExit, so that no `except Exception` around a parser or a verifier takes it for a failure of theirs.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(INTERRUPTED if number == signal.SIGINT else PREEMPTED)
        self.number = number


class StopFlag:
    """`with StopFlag() as stop:` around work that calls `stop.poll()` wherever it can be left.

    The first signal decides how the process ends. A Ctrl-C a second later or more, whatever the first signal was,
    raises KeyboardInterrupt at once, for the user who will not wait. Other signals that follow change nothing: a
    scheduler repeats its own (SIGUSR1, then SIGTERM at the limit) while the checkpoint is still being written. On
    leaving, the handlers are put back, and StopRequested becomes the error that `run_main` shows. Must be entered on
    the main thread (ValueError otherwise, from `signal.signal`).

    `checkpoint`: the newest one, for that error; whoever saves checkpoints sets it.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.checkpoint: Path | None = None
        self._received_at = 0.0
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    def poll(self) -> None:
        """Raise StopRequested if a signal has come."""
        if self.received is not None:
            raise StopRequested(self.received)

    def __enter__(self) -> StopFlag:
        for number in (*leaving_signals(), signal.SIGINT):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        if isinstance(error, StopRequested):
            raise self._failure(error) from None

    def _failure(self, request: StopRequested) -> Interrupted | Preempted:
        if self.checkpoint is not None and request.number != signal.SIGINT:
            return Preempted(self.checkpoint)
        if self.checkpoint is not None:
            return Interrupted(f"interrupted; checkpoint saved: {self.checkpoint}", how_to_resume())
        what = "interrupted" if request.number == signal.SIGINT else f"stopped by {request.number.name}"
        failure = Interrupted(f"{what}; nothing was published", "the same command starts again")
        failure.exit_code = int(request.code or 0)
        return failure

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), now
            once = f"\n{self.received.name}: stopping once the work so far is saved (Ctrl-C: at once)\n"
            say_in_handler(number, once if os.environ.get("RANK", "0") == "0" else "")
        # Ctrl-C reaches the whole process group, and a launcher may forward it once more: that is one wish, not two.
        elif number == signal.SIGINT and now - self._received_at > 1.0:
            raise KeyboardInterrupt


def stop_at_once() -> None:
    """Make SIGTERM, SIGUSR1 and SIGHUP raise StopRequested wherever the script is, as Ctrl-C raises KeyboardInterrupt.

    For a script's main thread, for as long as the process lives: it ends with one line on stderr and exit code 143.
    """
    for number in leaving_signals():
        signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    for other in leaving_signals():
        signal.signal(other, signal.SIG_IGN)  # one is enough: a second must not interrupt the cleaning up
    say_in_handler(number, f"error: stopped by {signal.Signals(number).name}\nthe same command starts again\n")
    raise StopRequested(signal.Signals(number))
