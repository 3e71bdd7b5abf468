"""Versions on a file system: `<root>/<name>/<N>/{artifact.json, manifest.sha256, run/, payload/}`.

A version is built aside and renamed into its place in one step. The directory `<N>` is never empty, and renaming onto a
directory that is not empty fails, so the rename itself decides between processes that want the same number: no lock is
held over a publish, and one that is killed leaves either a whole version or none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from nemo_runspec.artifacts.aside import ASIDE_DIR, aside_directory, fsync_directory, make_folder
from nemo_runspec.artifacts.build import Draft, build_version
from nemo_runspec.artifacts.manifest import PAYLOAD_DIR, StoredVersion, list_files, sha256_file, size_problems
from nemo_runspec.errors import UserError
from nemo_runspec.write import write_in_one_step

_LAST = ".last"
NUMBER = re.compile(r"[1-9][0-9]*")
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class LocalStore:
    """A folder of versions. Nothing is created before the first publish."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.local_root = root

    def names(self) -> list[str]:
        """The names that have at least one version, or whose folder may not be read, sorted.

        UserError where the registry's own folder may not be read.
        """
        names = [name for name in _entries(self.root) if not name.startswith(".")]
        return sorted(name for name in names if self._may_have_versions(name))

    def versions(self, name: str) -> list[int]:
        """The version numbers of `name`, ascending; empty for an unknown name. UserError for an unreadable folder."""
        return sorted(int(entry) for entry in _entries(self.root / name) if NUMBER.fullmatch(entry))

    def latest(self, name: str) -> int | None:
        """The highest version number, None for an unknown name."""
        return max(self.versions(name), default=None)

    def has(self, name: str, number: int) -> bool:
        """Whether there is such a version."""
        return number in self.versions(name)

    def location(self, name: str, number: int, file: str = "") -> str:
        """Where a version, or a file of it, lies; for messages."""
        return str(self.root / name / str(number) / file)

    def read(self, name: str, number: int, file: str) -> bytes:
        """The record or the manifest of a version; OSError where that fails."""
        return (self.root / name / str(number) / file).read_bytes()

    def check_writable(self, names: Iterable[str] = ()) -> None:
        """OSError where nothing can be published, or no version of `names`. Nothing is made."""
        there = next(place for place in (self.root, *self.root.parents) if os.path.lexists(place))
        below = [self.root / name for name in (ASIDE_DIR, *names)]
        for place in (there, *(place for place in below if os.path.lexists(place))):
            what = "it" if place == self.root else place
            if not place.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{what} is not a folder")
            if not os.access(place, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, f"{what} cannot be written to")
            if place.stat().st_dev != there.stat().st_dev:  # a version is renamed from one to the other
                raise OSError(errno.EXDEV, f"{what} leads to another disk")

    def publish(self, name: str, draft: Draft) -> int:
        """Publish a version; its number. OSError where the disk fails."""
        with aside_directory(self.root) as directory:
            build_version(directory, name, draft)
            return self._rename_to_next(directory, self.root / name)

    def remove(self, name: str, number: int) -> None:
        """Remove a version: gone in one step, its number never to be given again. OSError where the disk fails."""
        try:
            self._move_and_remove(self.root / name, number)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            shutil.rmtree(self.root / name / str(number) / PAYLOAD_DIR)  # makes the room that noting the number takes
            self._move_and_remove(self.root / name, number)

    def fetch(self, version: StoredVersion, inside: str = "") -> None:
        """The payload is on this machine already."""

    def check_payload(self, version: StoredVersion) -> list[str]:
        """Read every byte of the payload and list what is not as it was published."""
        problems = []
        for name, sha256 in version.files.items():
            path = version.path / name
            try:
                if sha256_file(path) != sha256:
                    problems.append(f"{path}: content differs from its sha256")
            except OSError as error:
                problems.append(f"{path}: {error.strerror}")
        extra = set(list_files(version.path)) - set(version.files)
        return problems + [f"{version.path / name}: was not published with it" for name in sorted(extra)]

    def check_sizes(self, version: StoredVersion) -> list[str]:
        """List the files of the payload that are gone, or the sizes that differ; nothing is read."""
        problems, size = [], 0
        for name in version.files:
            path = version.path / name
            try:
                size += path.stat().st_size
            except OSError as error:
                problems.append(f"{path}: {error.strerror}")
        return problems or size_problems(str(version.path), size, version)

    def audit(self, version: StoredVersion) -> list[str]:
        """As `check_payload`: the payload here is the payload."""
        return self.check_payload(version)

    def _move_and_remove(self, home: Path, number: int) -> None:
        write_in_one_step(home / _LAST, f"{max([number, *self.versions(home.name), *_removed(home)])}\n")
        with aside_directory(self.root) as directory:
            (home / str(number)).rename(directory / str(number))

    def _may_have_versions(self, name: str) -> bool:
        try:
            return bool(self.versions(name))
        except UserError:
            return True

    def _rename_to_next(self, directory: Path, home: Path) -> int:
        """Give the finished `directory` the next free number under `home`; the rename fails where a number is taken."""
        make_folder(home)
        while True:
            number = max([*self.versions(home.name), *_removed(home)], default=0) + 1
            try:
                directory.rename(home / str(number))
            except OSError as error:
                if error.errno not in _OCCUPIED:
                    raise
                continue
            # The version stands, whatever the disk says about remembering the rename.
            with contextlib.suppress(OSError):
                fsync_directory(home)
                fsync_directory(self.root)
            return number


def unreadable(where: object, error: OSError) -> UserError:
    """What to say of a file or folder that is there and that the system does not let be read."""
    return UserError(f"{where}: cannot be read: {error.strerror or error}")


def _removed(home: Path) -> list[int]:
    """The highest number that an artifact had when a version of it was removed, if ever one was."""
    with contextlib.suppress(FileNotFoundError):
        return [int((home / _LAST).read_text(encoding="utf-8"))]
    return []


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  a third of the time of iterdir
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(folder, error) from None
