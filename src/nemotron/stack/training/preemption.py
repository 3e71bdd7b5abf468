"""Stopping on a signal: the handler only sets a flag, the loop polls it and saves a checkpoint first.

SIGTERM and SIGUSR1 come from schedulers (Slurm's `--signal=USR1@120`), SIGINT from Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from nemo_runspec.errors import Interrupted, Preempted

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name))


class StopRequested(Exception):
    """What `StopSignal.poll` raises, out of work deep below a loop that catches it and saves."""


class StopSignal:
    """`with StopSignal() as stop:` around a loop that asks `stop.requested` after every step.

    The first signal decides. A second SIGINT a second later or more raises KeyboardInterrupt at once, for the user who
    will not wait. Handlers are put back on exit.
    Must be entered on the main thread (ValueError otherwise, from `signal.signal`).
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.received is not None

    @property
    def exit_code(self) -> int | None:
        """130 after SIGINT, 143 after SIGTERM or SIGUSR1, None before any."""
        if self.received is None:
            return None
        return 130 if self.received == signal.SIGINT else 143

    def error(self, checkpoint: Path) -> Interrupted | Preempted:
        """What to raise once `checkpoint` is on disk: Interrupted (130) after Ctrl-C, Preempted (143) otherwise."""
        if self.received == signal.SIGINT:
            return Interrupted(f"interrupted; checkpoint saved: {checkpoint}", "the same command resumes from it")
        return Preempted(checkpoint)

    def check(self, checkpoint: Path) -> None:
        """Raise that error if a signal has come: what work after training polls, `checkpoint` being the last one."""
        if self.requested:
            raise self.error(checkpoint)

    def poll(self) -> None:
        """Raise StopRequested if a signal has come."""
        if self.requested:
            raise StopRequested

    def __enter__(self) -> StopSignal:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # Ctrl-C reaches the whole process group, and a launcher may forward it once more: that is one wish, not two.
        if number == signal.SIGINT == self.received and now - self._received_at > 1.0:
            raise KeyboardInterrupt
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), now
            if os.environ.get("RANK", "0") == "0":  # print() must not be re-entered by a handler that interrupts it
                os.write(2, f"\n{self.received.name}: stopping once the work so far is saved\n".encode())
