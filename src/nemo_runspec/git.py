"""The git repository that a script lies in, for records. Where there is no git, or no repository, that is no error."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git_commit(folder: Path) -> str | None:
    """The commit checked out in the repository that holds `folder`, with `-dirty` where tracked files differ from it.

    None outside a repository, in one without a commit, and without git.
    """
    return _ask(folder, "describe", "--always", "--dirty", "--abbrev=40", "--match=")


def git_root(folder: Path) -> Path | None:
    """The root of the repository that holds `folder`; None outside one, and without git."""
    root = _ask(folder, "rev-parse", "--show-toplevel")
    return Path(root) if root else None


def _ask(folder: Path, *words: str) -> str | None:
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
