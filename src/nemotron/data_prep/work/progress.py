"""The line that says how far a data preparation is: rows/s, tokens/s, MB/s, share done and ETA.

with Progress("tokenize", total_bytes) as progress:
    for receipt, was_done in run_shards(...):
        progress.add(rows=r, tokens=t, bytes=b, was_done=was_done)

Not rich.progress: tried, it writes one line at the end where stderr is no terminal, and it knows one rate of a task.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self, TextIO

from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.words import counted
from nemotron.kit.metrics import StatusLine, format_seconds

TTY_SECONDS, PLAIN_SECONDS = 1.0, 10.0  # least time between two lines
# Rates are those of the last minute, but of eight reports at least: shards of many seconds each end in bursts.
WINDOW_SECONDS, WINDOW_REPORTS = 60.0, 8
MARK_SECONDS = 0.1


class _Mark(NamedTuple):
    """The clock, and what this process had done by then."""

    time: float
    rows: int
    tokens: int
    bytes: int


class Progress:
    """One line on stderr: rewritten in place on a terminal, at most once a second; elsewhere a line every ten seconds.

    The end of the `with` writes a last line with the totals. No colours, so that NO_COLOR has nothing to switch off.

    Args:
        phase: what is running, the line's first word.
        total_bytes: bytes of input that there are, what is done included; None: no share and no ETA is shown.
        unit: what one row is called.
        stream: where to; default stderr, because stdout belongs to the pipe.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        phase: str,
        total_bytes: int | None = None,
        unit: str = "row",
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.phase, self.total_bytes, self.unit = phase, total_bytes, unit
        self.rows = self.tokens = self.bytes = 0
        """What is done, found or added."""
        self._line = StatusLine(sys.stderr if stream is None else stream)
        self._clock = clock
        self._started = clock()
        self._added = _Mark(self._started, 0, 0, 0)
        self._marks: deque[_Mark] = deque([self._added])
        self._shown_at = self._started

    def add(self, *, rows: int = 0, tokens: int = 0, bytes: int = 0, was_done: bool = False) -> None:
        """Count work, `bytes` of the input, and show the line where one is due.

        `was_done`: before this process began. Such work is part of the share, not of the rates.
        """
        self.rows += rows
        self.tokens += tokens
        self.bytes += bytes
        if was_done:
            return
        before, now = self._added, self._clock()
        self._added = _Mark(now, before.rows + rows, before.tokens + tokens, before.bytes + bytes)
        if len(self._marks) > 1 and now - self._marks[-2].time < MARK_SECONDS:
            self._marks.pop()  # reports by the thousand need no thousand marks
        self._marks.append(self._added)
        while len(self._marks) > WINDOW_REPORTS + 1 and now - self._marks[1].time >= WINDOW_SECONDS:
            self._marks.popleft()
        if now - self._shown_at >= (TTY_SECONDS if self._line.on_terminal else PLAIN_SECONDS):
            self._shown_at = now
            self._line.show(self.line())

    def line(self) -> str:
        """The line as of the last report."""
        parts = [self.phase]
        if self.total_bytes is not None:
            share = min(self.bytes / self.total_bytes, 1.0) if self.total_bytes else 1.0
            parts.append(f"{share:4.0%} of {human_size(self.total_bytes)}")
        else:
            parts.append(human_size(self.bytes) if self.bytes else counted(self.rows, self.unit))
        first, last = self._marks[0], self._marks[-1]
        parts += self._rates(first, last)
        rate = (last.bytes - first.bytes) / max(last.time - first.time, 1e-9)
        if self.total_bytes is not None and rate > 0 and self.bytes < self.total_bytes:
            parts.append(f"ETA {format_seconds((self.total_bytes - self.bytes) / rate)}")
        return "  ".join(parts)

    def summary(self) -> str:
        """The last line: totals, time, and the rates over all of it."""
        now = self._clock()
        parts = [self.phase, counted(self.rows, self.unit)]
        parts += [f"{_short(self.tokens)} tokens"] * bool(self.tokens) + [human_size(self.bytes)] * bool(self.bytes)
        parts.append(format_seconds(now - self._started))
        parts += self._rates(_Mark(self._started, 0, 0, 0), self._added._replace(time=now))
        return "  ".join(parts)

    def _rates(self, first: _Mark, last: _Mark) -> list[str]:
        """Rows/s, tokens/s and MB/s between two marks, those that there are."""
        seconds = max(last.time - first.time, 1e-9)
        rates = [
            (last.rows - first.rows, f"{self.unit}s/s"),
            (last.tokens - first.tokens, "tokens/s"),
        ]
        shown = [f"{_short(count / seconds)} {what}" for count, what in rates if count]
        num_bytes = last.bytes - first.bytes
        return shown + [f"{num_bytes / seconds / 1e6:.1f} MB/s"] * bool(num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self._line.show(self.summary())
        self._line.end()


def _short(number: float) -> str:
    """A number to three digits with its SI prefix: 12345678 -> '12.3M', 890 -> '890'."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            scaled = number / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{prefix}"
    return f"{number:.0f}"
