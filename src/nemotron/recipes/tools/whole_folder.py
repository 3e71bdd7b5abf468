"""A folder that another command gets whole or not at all: filled out of sight, then put in its place."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_runspec.errors import UserError

_FILLED, _REPLACED = ".partial-", ".old-"  # beginnings of the names of working folders


def entries(folder: Path) -> list[str]:
    """The names in a folder, sorted, without what is being filled or put aside there."""
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith((_FILLED, _REPLACED)))


@contextlib.contextmanager
def in_one_step(target: Path, replaced: Sequence[str], kind: str) -> Iterator[Path]:
    """A folder to fill, which becomes `target` on the way out; after an error, or Ctrl-C, `target` is as it was before.

    Where `target` is a folder, it stays, and its entries are exchanged: it may be a mount point, or where a shell is.

    Args:
        target: links in it have been followed.
        replaced: the names in `target`, all of which give way.
        kind: of what is written, for messages (`export`).

    Raises:
        UserError: `target` cannot be written, or has changed meanwhile.
    """
    stays = target.is_dir()
    area = target if stays else target.parent
    filled = area / f"{_FILLED}{os.getpid()}-{target.name}"
    try:
        area.mkdir(parents=True, exist_ok=True)
        filled.mkdir()
    except OSError as error:
        raise UserError(f"cannot write to {target}: {error.strerror}: {error.filename}") from error
    try:
        yield filled
        try:
            if stays:
                _exchange(target, filled, replaced)
            else:
                filled.rename(target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                other = f"{target} was written by another {kind} meanwhile"
                raise UserError(other, "give another directory") from error
            raise UserError(f"cannot write to {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(filled, ignore_errors=True)


def _exchange(target: Path, filled: Path, replaced: Sequence[str]) -> None:
    """Put what is in `filled` in the place of the entries `replaced` of `target`, or leave all as it is."""
    if entries(target) != list(replaced):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(target))
    aside = target / f"{_REPLACED}{os.getpid()}"
    new = entries(filled)
    try:
        aside.mkdir()
        for name in replaced:
            (target / name).rename(aside / name)
        for name in new:
            (filled / name).rename(target / name)
    except BaseException:  # what has moved is seen from where it is: Ctrl-C may come between a move and a note of it
        for name in new:
            if not os.path.lexists(filled / name):
                (target / name).rename(filled / name)
        for name in replaced:
            if os.path.lexists(aside / name):
                (aside / name).rename(target / name)
        with contextlib.suppress(OSError):
            aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)
