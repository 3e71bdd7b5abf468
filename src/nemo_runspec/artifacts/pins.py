"""Which version `name` means in this job: one answer for all its ranks, nodes and attempts.

`latest` may move while a job starts. Rank 0 therefore looks up the versions that a config leaves open and
writes them to a file; the other ranks read it, and so does the same job when it is requeued, so that it resumes.

    $RUNSPEC_JOB_DIR/pins.json      {"corpus": "corpus:3@<digest>"}; a folder that the nodes of a job share
    $RUNSPEC_PUBLISHED_DIR/corpus   corpus:3@<digest>, left there by the job of a pipeline that published it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_runspec.artifacts.naming import parse_reference
from nemo_runspec.env import output_root
from nemo_runspec.errors import RunFailed, UserError
from nemo_runspec.variables import JOB_DIR, PUBLISHED_DIR
from nemo_runspec.write import write_in_one_step

PINS_FILE = "pins.json"
_LAUNCHES = ".launches"  # in the output root
_SECONDS = 1800.0  # how long other ranks wait for rank 0
_KEPT_SECONDS = 7 * 24 * 3600.0


def agree(names: Sequence[str], look_up: Callable[[str], str]) -> dict[str, str]:
    """For each artifact name the pinned reference that all processes of this job use (`corpus:3@<digest>`).

    Args:
        look_up: the pinned reference of the latest version of a name; called by rank 0 alone, for names that no
            earlier attempt of the job has pinned. What an earlier job of the same pipeline published goes before it.

    Returns:
        The map. A single process that is part of no job agrees with nobody: its map is empty, unless the name was
        published by an earlier job of its pipeline.

    Raises:
        UserError: from `look_up`; or several nodes were started by hand, with nothing that tells this launch from the
            one before it.
        RunFailed: rank 0 did not write its answer.
    """
    path = _pins_file()
    if path is None:
        return {name: reference for name in names if (reference := published_earlier(name)) is not None}
    if os.environ.get("RANK", "0") != "0":
        return _wait_for(path, names)
    pins = _read(path)
    new = {name: published_earlier(name) or look_up(name) for name in names if name not in pins}
    if new:
        _write(path, {**pins, **new}, first=not pins)
        pins = _read(path)  # another process that took itself for rank 0 may have been quicker
        if not new.keys() <= pins.keys():  # with other inputs, those of another script of the job
            pins = {**new, **pins}
            _write(path, pins, first=False)
    return {name: pins[name] for name in names}


def published_earlier(name: str) -> str | None:
    """What an earlier job of the same pipeline published under `name`, as `name:3@<digest>`, or None."""
    folder = os.environ.get(PUBLISHED_DIR)
    if not folder:
        return None
    with contextlib.suppress(FileNotFoundError):
        reference = (Path(folder) / name).read_text(encoding="utf-8").strip()
        parse_reference(reference)
        return reference
    return None


def leave_published(name: str, pinned: str) -> None:
    """Tell the later jobs of the same pipeline what was published; without a pipeline nothing happens.

    Raises RunFailed when it cannot be written: they would read some other version.
    """
    folder = os.environ.get(PUBLISHED_DIR)
    if not folder:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_in_one_step(Path(folder) / name, f"{pinned}\n")
    except OSError as error:
        raise RunFailed(
            f"{pinned.partition('@')[0]} is published, but {folder} cannot be written: {error.strerror}",
            "the steps after this one look there for what to read",
        ) from error


def _pins_file() -> Path | None:
    job = os.environ.get(JOB_DIR)
    if job:
        return Path(job) / PINS_FILE
    return _launch_file() if int(os.environ.get("WORLD_SIZE") or "1") > 1 else None


def _launch_file() -> Path:
    """For torchrun without a job: a file that all ranks of this launch find, and those of no other launch."""
    run_id, job = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("SLURM_JOB_ID", "")
    parts = [run_id, job, os.environ.get("SLURM_STEP_ID", ""), os.environ.get("MASTER_PORT", "")]
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):  # one node: one launcher process
        parts += [str(os.getppid()), _started_at(os.getppid())]
    elif run_id in ("", "none") and not job:
        raise UserError(
            "an input has no version, and processes on several nodes must agree on one",
            f"write name:3, give torchrun a new --rdzv-id, or set {JOB_DIR} to a new folder that the nodes share",
        )
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return output_root() / _LAUNCHES / f"{digest}.json"


def _started_at(pid: int) -> str:
    """When a process began, in clock ticks since boot: with its id, it is one process and no later one."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _wait_for(path: Path, names: Sequence[str]) -> dict[str, str]:
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        pins = _read(path)
        if all(name in pins for name in names):
            return {name: pins[name] for name in names}
        time.sleep(0.05)
    raise RunFailed(f"rank 0 did not write {path} within {_SECONDS:.0f} s")


def _read(path: Path) -> dict[str, str]:
    try:
        pins = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(pins, dict):
            raise ValueError("not a map of references")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunFailed(
            f"{path}: cannot be read: {error}", "remove it; the job then looks its inputs up again"
        ) from None
    return {str(name): str(reference) for name, reference in pins.items()}


def _write(path: Path, pins: dict[str, str], *, first: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent.name == _LAUNCHES:
        for old in path.parent.glob("*.json"):
            with contextlib.suppress(OSError):
                if time.time() - old.stat().st_mtime > _KEPT_SECONDS:
                    old.unlink()
    text = json.dumps(pins, indent=2, sort_keys=True) + "\n"
    write_in_one_step(path, text, only_new=first)
