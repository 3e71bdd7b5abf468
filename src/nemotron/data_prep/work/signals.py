"""Leaving on a signal. Preparing data saves no checkpoints: it stops at once, and the same command starts again.

What was published stays, what was not is not there: a version appears in the registry whole or not at all.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from nemo_runspec.errors import PREEMPTED

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


def leave_on_signals() -> None:
    """Make SIGTERM and SIGUSR1, which schedulers send, end this process with one line on stderr and exit code 143.

    They raise SystemExit wherever the script is, as Ctrl-C raises KeyboardInterrupt; no `except Exception` stops it.
    For a script's main thread, for as long as the process lives.
    """
    for number in SIGNALS:
        signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # one is enough: a second must not interrupt the cleaning up
    # print() must not be re-entered by a handler that interrupts it.
    os.write(2, f"error: stopped by {signal.Signals(number).name}\nthe same command starts again\n".encode())
    raise SystemExit(PREEMPTED)
