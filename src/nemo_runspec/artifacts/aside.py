"""Directories in which a version is built, beside the published ones, and what killed processes left of theirs.

`<root>/.aside/<host>.<pid>.<random>` is the directory, and the same name with `.lock` is a file on which its owner
holds a flock for as long as it lives. The kernel drops that lock when the owner dies, however it dies, so a lock that
can be taken is the proof that nobody is at work there. On a file system shared between hosts flock may hold on one host
only: what another host left behind is therefore removed only after a day.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

ASIDE_DIR = ".aside"
_OTHER_HOST_SECONDS = 24 * 3600.0


@contextlib.contextmanager
def aside_directory(root: Path) -> Iterator[Path]:
    """A new empty directory on the file system of `root`, removed on the way out unless it was renamed away."""
    area = root / ASIDE_DIR
    make_folder(area)
    remove_stale(area)
    lock, descriptor = _take_new_lock(area)
    directory = lock.with_suffix("")
    try:
        directory.mkdir()
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder of a registry, if it is not there, with the permissions of the one that it is in.

    So whom the registry's own folder lets in can publish beside its maker, whatever the umask of that one.
    """
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # another user was quicker, or the file system knows no permissions
            folder.chmod(stat.S_IMODE(folder.parent.stat().st_mode))


def remove_stale(area: Path) -> list[str]:
    """Remove what dead processes left in `area`, and return the names of the directories that were removed."""
    removed = []
    for lock in sorted(area.glob("*.lock")):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # its owner has finished, or another user owns it
        try:
            if _is_stale(lock, descriptor):
                directory = lock.with_suffix("")
                shutil.rmtree(directory, ignore_errors=True)
                lock.unlink(missing_ok=True)
                removed.append(directory.name)
        finally:
            os.close(descriptor)
    return removed


def fsync_directory(path: Path) -> None:
    """Bring a directory's entries to disk, so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_new_lock(area: Path) -> tuple[Path, int]:
    while True:
        lock = area / f"{_host()}.{os.getpid()}.{secrets.token_hex(6)}.lock"
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without flock: then age alone decides what is stale
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Between creation and flock another process may have taken the file for a dead one's and removed it.
        if lock.exists():
            return lock, descriptor
        os.close(descriptor)


def _is_stale(lock: Path, descriptor: int) -> bool:
    local = lock.name.startswith(f"{_host()}.")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        local = False  # no flock here: as little is known as of another host's
    return local or time.time() - os.fstat(descriptor).st_mtime > _OTHER_HOST_SECONDS


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()) or "localhost"
