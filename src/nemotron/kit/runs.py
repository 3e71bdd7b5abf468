"""Runs that there are on disk, at work or not: their state, where they are, what they logged and published."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_runspec.artifacts.aside import ASIDE_DIR, aside_directory
from nemo_runspec.env.roots import output_root
from nemo_runspec.errors import UserError, nearest
from nemo_runspec.user_files import expanded
from nemotron.kit.metrics import format_seconds, numbers_in, read_metrics
from nemotron.kit.run import LOCK_FILE, METRICS_FILE, PHASES_FILE, PUBLISHED_FILE, STATE_FILE, read_state

HEADLINES = ("loss", "reward")  # the metric that stands for a run, the first one that it logs
_TAIL_BYTES = 1 << 16
_LEAST_OF_FINGERPRINT = 4  # characters: fewer are a slip, and `runs rm` deletes what they mean


@dataclass(frozen=True)
class RecordedRun:
    """A run's directory and what its `run.json` says. `name` is the directory below the root: `nano3/sft/tiny-5fd3`."""

    name: str
    directory: Path
    state: dict[str, Any]

    @property
    def condition(self) -> str:
        """`running`, `finished`, `failed` (an error), `stopped` (a signal, Ctrl-C) or `killed` (it said nothing)."""
        if self.state.get("state") == "finished":
            return "finished"
        if is_locked(self.directory):
            return "running"
        return str(self.state.get("ended") or "killed")

    def metrics(self) -> list[dict[str, Any]]:
        """All that it logged."""
        return read_metrics(self.directory / METRICS_FILE)

    def last_metrics(self) -> dict[str, float]:
        """The newest value of each metric in the last lines of the log, with `step` and `time`; empty without a log."""
        path = self.directory / METRICS_FILE
        values: dict[str, float] = {}
        with contextlib.suppress(OSError), path.open("rb") as file:
            cut = file.seek(max(0, path.stat().st_size - _TAIL_BYTES)) > 0
            for line in file.read().split(b"\n")[cut:-1]:
                with contextlib.suppress(ValueError):  # damaged: `metrics` names file and line
                    values |= numbers_in(json.loads(line))
        return values

    def published(self) -> list[str]:
        """The versions that it published, as `name:version`."""
        return [line["version"] for line in read_metrics(self.directory / PUBLISHED_FILE)]

    def seconds_by_phase(self) -> dict[str, float]:
        """Wall time of each phase that has ended, over all attempts."""
        seconds: dict[str, float] = {}
        for line in read_metrics(self.directory / PHASES_FILE):
            seconds[line["phase"]] = seconds.get(line["phase"], 0.0) + line["seconds"]
        return seconds


def is_locked(directory: Path) -> bool:
    """Whether a process works on the run in `directory`; also where the file system cannot tell."""
    try:
        with (directory / LOCK_FILE).open("rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def recorded_runs() -> list[RecordedRun]:
    """All runs under the output root, the one that was written to last at the end; unreadable folders are passed over.

    Raises UserError where the root itself cannot be read.
    """
    root = output_root()

    def fail_at_root(error: OSError) -> None:
        if error.filename == str(root) and not isinstance(error, FileNotFoundError):
            raise UserError(f"cannot read {root}: {error.strerror}")

    runs, seen = [], set[Path]()
    for folder, below, files in os.walk(root, onerror=fail_at_root, followlinks=True):
        path = Path(folder)
        # Runs may lie behind a link, on another disk; below them links lead to data, or back.
        is_deep = path.is_symlink() and len(path.relative_to(root).parts) > len(("family", "stage", "run"))
        if is_deep or (real := path.resolve()) in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = [name for name in below if name != ASIDE_DIR and not (path == root and name == "artifacts")]
        if STATE_FILE in files and path != root:
            below.clear()
            runs.append(RecordedRun(path.relative_to(root).as_posix(), path, read_state(path)))
    return sorted(runs, key=_last_written)


def inputs_in_use() -> set[str]:
    """The versions, as `name:version`, that runs read which are at work, or which the same command would go on with."""
    unfinished = (run.state for run in recorded_runs() if run.condition != "finished")
    return {str(ref).partition("@")[0] for state in unfinished for ref in (state.get("inputs") or {}).values()}


def _last_written(run: RecordedRun) -> float:
    times = [0.0]
    for name in (STATE_FILE, METRICS_FILE):
        with contextlib.suppress(OSError):
            times.append((run.directory / name).stat().st_mtime)
    return max(times)


def remove_run(directory: Path) -> None:
    """Remove a run's directory, out of the way at once: what a kill leaves of it is no run, nor a part of the next one.

    UserError where a process works on it, one that started a moment ago included.
    """
    link, directory = directory, directory.resolve()  # it may be one, to another disk
    with (directory / LOCK_FILE).open("ab") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{directory}: a process is at work there", "stop it first") from None
        try:
            with aside_directory(directory.parent) as aside:
                removed = directory.rename(aside / directory.name)
                if link.is_symlink():
                    link.unlink()
                shutil.rmtree(removed)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            os.truncate(directory / STATE_FILE, 0)  # no room to move it aside: no command may go on with what is left
            shutil.rmtree(directory)
            if link.is_symlink():
                link.unlink()
    with contextlib.suppress(OSError):
        (directory.parent / ASIDE_DIR).rmdir()


def find_run(word: str, *, logged: bool = False) -> RecordedRun:
    """The run that `word` means: a directory, a whole name or its end, four or more characters of a fingerprint's
    start, or `nano3/sft`.

    Of several runs of `nano3/sft` the newest one; with `logged` the newest that has logged metrics, if any has.

    Raises UserError: there is none, or a fingerprint's start fits several.
    """
    if not word.strip("/"):
        raise UserError(f"no run {word!r}: the name is empty", "nemotron runs list names them")
    path, root = expanded(word), output_root()
    if (path / STATE_FILE).is_file():
        path = path.absolute()
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
        return RecordedRun(name, path, read_state(path))
    runs = recorded_runs()
    word = word.strip("/")
    of_stage = [run for run in runs if f"/{run.name.rpartition('/')[0]}".endswith(f"/{word}")]
    with_metrics = [run for run in of_stage if run.last_metrics()] if logged else []
    begun = [run for run in runs if str(run.state.get("fingerprint", "")).startswith(word)]
    for matching in (
        [run for run in runs if f"/{run.name}".endswith(f"/{word}")],
        (with_metrics or of_stage)[-1:],
        [run for run in begun if len(word) >= _LEAST_OF_FINGERPRINT],
    ):
        if len(matching) > 1:
            raise UserError(f"{word}: {len(matching)} runs", f"choose from: {', '.join(run.name for run in matching)}")
        if matching:
            if matching == with_metrics[-1:] != of_stage[-1:]:
                newest = f"the newest, {of_stage[-1].name} ({of_stage[-1].condition}), has logged no metrics"
                print(f"{word}: {matching[0].name}; {newest}", file=sys.stderr)
            return matching[0]
    if not runs:
        raise UserError(f"no run {word!r}: there are none in {root}")
    if begun:
        raise UserError(f"no run {word!r}: at least {_LEAST_OF_FINGERPRINT} characters of a fingerprint are needed")
    names = [run.name for run in runs] + [run.name.rpartition("/")[0] for run in runs]
    # All begin with the family's name, which alone brings nano3/pretrain near nano3/eval: the last part decides.
    last = word.rpartition("/")[2]
    ends = {name: name.rpartition("/")[2] for name in names}
    near = nearest(word, [name for name, end in ends.items() if end == last or nearest(last, [end])])
    raise UserError(f"no run {word!r} in {root}", f"did you mean {near}?" if near else "nemotron runs list names them")


def headline(values: dict[str, float]) -> str | None:
    """The name of the metric that stands for a run that logged `values`; None where it logged none."""
    named = next((name for name in HEADLINES if name in values), None)
    return named or next((name for name in values if name not in ("step", "time")), None)


def time_since(moment: float) -> str:
    """How long ago a time of the epoch was: `0:42 ago`, in days from two days on."""
    seconds = max(0.0, time.time() - moment)
    return f"{int(seconds // 86400)} days ago" if seconds >= 2 * 86400 else f"{format_seconds(seconds)} ago"


def size_of(directory: Path) -> int:
    """Bytes of all files below `directory`, hard links counted once."""
    sizes: dict[tuple[int, int], int] = {}
    for folder, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):
                status = (Path(folder) / name).lstat()
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
