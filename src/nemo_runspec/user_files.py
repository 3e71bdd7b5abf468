"""The user's own files: what a location in a config stands for on this machine.

Everything that lists such files follows these rules. A folder stands for all files in it, however deep. Hidden files
and folders (`.git`) are left out unless the location itself names them. A name that exists is that name, even where it
has the brackets or stars of a glob. `~` is the home folder.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_runspec.errors import UserError, nearest

# How a value ends that an artifact is going to give which is not made yet (`nemo_runspec.config.interpolate.to_come`).
TO_COME = "(resolved at start)>"


@dataclass(frozen=True)
class UserFiles:
    """Marks a field of a schema that names files: `paths: list[Annotated[str, UserFiles()]]`.

    Its values are files, folders, globs and addresses. `hint`: given one that does not exist, advice about it, or None.
    `names`: values that are no files. `check`: given the path of one that exists, says what is wrong with it, or None.
    """

    hint: Callable[[str], str | None] = lambda location: None
    names: tuple[str, ...] = ()
    check: Callable[[Path], str | None] | None = None


def is_elsewhere(location: str) -> bool:
    """Whether nothing is known about a location here: an address, or a value of an artifact that is not made yet."""
    return ("://" in location and not location.startswith("file://")) or TO_COME in location


def expanded(location: str | Path, named: str = "") -> Path:
    """A location as a path, with the home folder in place of `~` or `~name`.

    Args:
        named: what an error begins with: the variable or the file that names the location.

    Raises:
        UserError: there is no such user, or nothing says where the home folder is.
    """
    try:
        return Path(location).expanduser()
    except RuntimeError:
        user = Path(location).parts[0].removeprefix("~")
        if user:
            raise UserError(f"{named}{location}: there is no user {user!r}", "~/ is your own home folder") from None
        raise UserError(f"{named}{location}: no home folder is known", "set HOME, or write the whole path") from None


def local_path(location: str) -> Path:
    """A location as an absolute path; links in it stay."""
    return Path(os.path.abspath(expanded(location.removeprefix("file://"))))  # noqa: PTH100


def files_of(location: str) -> list[str]:
    """Absolute names of the files behind a path, folder or glob, sorted; links that lead nowhere are among them.

    Raises:
        UserError: there is no such file or folder, or nothing matches.
    """
    if not location.strip():
        raise UserError("a path that is empty", "the current folder is .")
    path = local_path(location)
    if path.is_dir():
        return sorted(files_below(path))
    if path.exists():
        return [str(path)]
    if not glob.has_magic(location):
        raise no_such_file(location)
    names = names_matching(location)
    files = sorted(name for name in names if not os.path.isdir(name))  # noqa: PTH112
    if not files:
        hint = "it matches folders: name them without the glob" if names else None
        raise UserError(f"no file matches {location}", hint)
    return files


def names_matching(location: str) -> list[str]:
    """Absolute names of the files and folders that a glob matches, in no order.

    Of the current folder and the home folder, which the glob does not spell out, brackets and stars are no pattern.
    """
    text, base = location.removeprefix("file://"), Path.cwd()
    if text.startswith("~"):
        home, _, text = text.partition("/")
        base = expanded(home)
    pattern = os.path.abspath(os.path.join(glob.escape(str(base)), text))  # noqa: PTH100, PTH118
    return glob.glob(pattern, recursive=True)  # noqa: PTH207  Path.glob takes no absolute pattern


def no_such_file(location: str) -> UserError:
    """The error about a path that does not exist; it names the sibling that may have been meant."""
    path = local_path(location)
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    guess = nearest(path.name, siblings)
    return UserError(f"no such file: {location}", f"did you mean {path.parent / guess}?" if guess else None)


def files_below(
    folder: Path, passed_over: Counter[str] | None = None, on_error: Callable[[OSError], None] | None = None
) -> Iterator[str]:
    """Names of the files below a folder, folder by folder, each folder's in the order of their names.

    Links are followed; those that lead round in a circle end where they began.

    Args:
        passed_over: counts what is left out, by kind: hidden files and folders, and what is neither file nor folder.
        on_error: called about a folder below that cannot be listed; it is left out.
    """
    counts: Counter[str] = Counter() if passed_over is None else passed_over
    entered: set[tuple[int, int]] = set()
    for directory, folders, names in os.walk(folder, onerror=on_error, followlinks=True):
        status = os.stat(directory)  # noqa: PTH116
        if (status.st_dev, status.st_ino) in entered:  # through a link
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        for kind, entries in (("hidden folder", folders), ("hidden file", names)):
            if hidden := sum(name.startswith(".") for name in entries):
                counts[kind] += hidden
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            path = os.path.join(directory, name)  # noqa: PTH118
            if os.path.isfile(path) or not os.path.exists(path):  # noqa: PTH110, PTH113  a link may lead nowhere
                yield path
            else:
                counts["pipe, socket or device"] += 1


def in_artifact(location: str) -> bool:
    """Whether a location of this machine lies in the payload of a published artifact, or is such an artifact.

    What else has a file called `artifact.json` above it is no artifact: its files may change.
    """
    path = local_path(location)
    return any(
        path.relative_to(folder).parts[:1] in ((), ("payload",))
        and all((folder / name).is_file() for name in ("artifact.json", "manifest.sha256"))
        for folder in (path, *path.parents)
    )


def digest(files: Iterable[str]) -> str | None:
    """16 hex digits over names, sizes and times of change of files; None where there are none."""
    names = sorted(set(files))
    state = hashlib.sha256()
    for name in names:
        try:
            status = os.stat(name)  # noqa: PTH116
        except OSError:  # a link that leads nowhere, say: who reads it says what is wrong
            continue
        state.update(os.fsencode(name) + f"\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return state.hexdigest()[:16] if names else None
