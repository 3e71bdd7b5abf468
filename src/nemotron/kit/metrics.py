"""The metrics of a run: a JSONL log that survives being killed, and the line that shows how far a run is."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, SupportsFloat, TextIO

from nemo_runspec.errors import UserError
from nemo_runspec.write import write_in_one_step

# JSON has no such numbers; a loss that became NaN must still be told from one that was not logged.
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_WINDOW_STEPS = 20  # steps over which speed is averaged
_TTY_SECONDS = 0.1  # least time between two redraws
_PLAIN_SECONDS = 10.0  # least time between two plain lines
# Seconds that the end of a run waits for what all trackers together still have to send, and one that did not finish:
# 30 s after SIGTERM Slurm kills it.
_CLOSE_SECONDS = 30.0
_CLOSE_UNFINISHED_SECONDS = 10.0


class Mirror(Protocol):
    """Takes every record that a log gets; see `kit/trackers.py`."""

    def log(self, record: dict[str, Any]) -> None: ...
    def close(self, finished: bool) -> None: ...
    def wait(self, seconds: float) -> None: ...


def close_mirrors(mirrors: Sequence[Mirror], finished: bool) -> None:
    """Let all mirrors send what is left, at the same time, and wait for them until one deadline."""
    deadline = time.monotonic() + (_CLOSE_SECONDS if finished else _CLOSE_UNFINISHED_SECONDS)
    for mirror in mirrors:
        mirror.close(finished)
    for mirror in mirrors:
        mirror.wait(max(0.0, deadline - time.monotonic()))


class MetricsLog:
    """Append-only metrics of one run, one JSON object a line: `{"step": 12, "time": 1700000000.1, "loss": 3.21}`.

    The first `log` creates the file, or drops a last line there that a kill cut off. Each line reaches the operating
    system before `log` returns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mirrors: Sequence[Mirror] = ()
        self._stream: TextIO | None = None
        self._num_records: int | None = None

    @property
    def num_records(self) -> int:
        """How many records the log has; what a checkpoint notes for `truncate`."""
        if self._num_records is None:
            self._num_records = len(self.read())
        return self._num_records

    def log(self, step: int, **values: Any) -> None:
        """Append `values` of `step`: numbers, strings, booleans, None, 0-d tensors, and lists or dicts of them.

        Raises TypeError, ValueError or RuntimeError for anything else.
        """
        record = {"step": int(step), "time": round(time.time(), 3), **_plain(values)}
        if self._stream is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _drop_cut_line(self.path)
            self._stream = self.path.open("a", encoding="utf-8")
        self._stream.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._stream.flush()
        self._num_records = None if self._num_records is None else self._num_records + 1
        for mirror in self.mirrors:
            mirror.log(record)

    def truncate(self, num_records: int) -> None:
        """Keep the first `num_records` records only.

        A resumed run calls it with the number that its checkpoint noted (0 without one), so that nothing is logged
        twice. Raises UserError naming file and line where one of them is none; what is dropped may be anything.
        """
        self.close()
        if not self.path.exists():
            return
        kept = b"".join(line + b"\n" for line in self.path.read_bytes().split(b"\n")[:-1][:num_records])
        self._num_records = len(parse_metrics(kept, str(self.path)))
        write_in_one_step(self.path, kept.decode())

    def read(self) -> list[dict[str, Any]]:
        """All records so far, in the order in which they were logged."""
        return read_metrics(self.path)

    def close(self) -> None:
        """Close the file. It stays on disk, and another `log` opens it again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line that was cut off is left out. An absent file has none.

    Raises UserError naming file and line where a line is not a JSON object.
    """
    return parse_metrics(path.read_bytes(), str(path)) if path.exists() else []


def parse_metrics(content: bytes, where: str) -> list[dict[str, Any]]:
    """As `read_metrics`, of the content of such a file; `where` is its name for messages."""
    records = []
    # Lines are decoded one by one: the last one may be cut within a character.
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            records.append({key: _restored(value) for key, value in json.loads(line.decode()).items()})
        except (ValueError, AttributeError):
            shown = line.decode(errors="replace")[:60]
            raise UserError(f"{where}:{number}: not a JSON object: {shown}") from None
    return records


def numbers_in(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record, NaN and infinities too: `{"valid_loss": {"web": 2.5}}` -> `{"valid_loss.web": 2.5}`."""
    numbers: dict[str, float] = {}
    for key, value in record.items():
        value = _restored(value)
        if isinstance(value, dict):
            numbers |= {f"{key}.{name}": number for name, number in numbers_in(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[key] = float(value)
    return numbers


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON object to a JSONL file, after dropping a last line there that a kill cut off."""
    _drop_cut_line(path)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")


class StatusLine:
    """The last line of a stream: rewritten in place on a terminal; elsewhere each showing is a line of its own.

    Threads may share it: whoever shows something takes the line over, and whoever ends it ends it for all.
    """

    _lock = threading.RLock()
    _open: ClassVar = weakref.WeakSet[TextIO]()  # streams whose last line is not ended

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.on_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"

    def show(self, text: str) -> None:
        """Put `text` there, cut to the width of the terminal."""
        if self.on_terminal:
            columns = shutil.get_terminal_size().columns
            with self._lock:
                self._stream.write("\r\x1b[2K" + text[: columns - 1])
                self._stream.flush()
                self._open.add(self._stream)
        else:
            self.note(text)

    def note(self, text: str) -> None:
        """A line that stays, under the last one."""
        with self._lock:
            self.end()
            self._stream.write(text + "\n")
            self._stream.flush()

    def end(self) -> None:
        """End the line, so that what is printed next starts on a new one."""
        with self._lock:
            if self._stream in self._open:
                self._stream.write("\n")
                self._stream.flush()
                self._open.discard(self._stream)


class Progress:
    """One line that says how far a run is: step, loss, tokens/s, share of the measured matmul peak, ETA.

    On a terminal the line is redrawn in place; elsewhere plain lines appear, at most one every ten seconds, and always
    the first and the last step. (`rich.progress` prints nothing until the end where stderr is no terminal, as in the
    log of a job.)

    Args:
        total: the number of steps of the whole run.
        label: what is running, the line's first word.
        start: steps done before this process (a resumed run); speed and ETA count only what came after.
        peak_flops: the machine's measured matmul peak in FLOP/s; without it no share is shown.
        only_if_slow: show nothing of what ends within the least time between two lines: a part of a longer run.
        stream: where to; default stderr, because stdout belongs to the pipe.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        total: int,
        *,
        label: str = "train",
        start: int = 0,
        peak_flops: float | None = None,
        only_if_slow: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.total = total
        self.label = label
        self.peak_flops = peak_flops
        self._stream = stream if stream is not None else sys.stderr
        self._line = StatusLine(self._stream)
        self._clock = clock
        self._tokens = 0
        self._flops = 0.0
        # (clock, step, tokens so far, FLOPs so far) at the end of each of the last steps
        self._marks: deque[tuple[float, int, int, float]] = deque([(clock(), start, 0, 0.0)], maxlen=_WINDOW_STEPS + 1)
        self._shown_at = clock() if only_if_slow else -math.inf
        self._is_shown = not only_if_slow

    def update(self, step: int, *, tokens: int = 0, flops: float = 0.0, **values: Any) -> None:
        """Tell that `step` steps are done. `tokens` and `flops` are those since the last update; `values` are shown."""
        self._tokens += tokens
        self._flops += flops
        now = self._clock()
        self._marks.append((now, step, self._tokens, self._flops))
        due = now - self._shown_at >= (_TTY_SECONDS if self._line.on_terminal else _PLAIN_SECONDS)
        if due or (step >= self.total and self._is_shown):
            self._line.show(self.line(**values))
            self._shown_at, self._is_shown = now, True

    def line(self, **values: Any) -> str:
        """The line for the last update, without what is not known yet."""
        start_time, start_step, start_tokens, start_flops = self._marks[0]
        now, step, tokens, flops = self._marks[-1]
        seconds = max(now - start_time, 1e-9)
        width = len(str(self.total))
        parts = [f"{self.label}  {step:>{width}}/{self.total}  {step / max(self.total, 1):4.0%}"]
        parts += [f"{key} {_short(value)}" for key, value in values.items()]
        if tokens > start_tokens:
            parts.append(f"{_thousands((tokens - start_tokens) / seconds)} tok/s")
        if self.peak_flops and flops > start_flops:
            parts.append(f"{(flops - start_flops) / seconds / self.peak_flops:.0%} of peak")
        if step > start_step and step < self.total:
            parts.append(f"ETA {format_seconds((self.total - step) * seconds / (step - start_step))}")
        return "  ".join(parts)

    def note(self, text: str) -> None:
        """Print a line of its own (a validation result, a checkpoint) without tearing the progress line."""
        self._line.note(text)

    def close(self) -> None:
        """End the line, so that what is printed next starts on a new one."""
        self._line.end()


def format_seconds(seconds: float) -> str:
    """A duration as m:ss, or h:mm:ss from an hour on: 95.2 -> '1:35'."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _short(value: Any) -> str:
    value = _plain(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _thousands(rate: float) -> str:
    return f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.0f}"


def _plain(value: Any) -> Any:
    """The JSON value for `value`: non-finite numbers as text, 0-d arrays and tensors as numbers."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):  # a NumPy or torch scalar
        return _plain(value.item())
    if isinstance(value, SupportsFloat):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    raise TypeError(f"cannot log a {type(value).__name__}")


def _restored(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _drop_cut_line(path: Path) -> None:
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with path.open("r+b") as stream:
            stream.truncate(whole)
