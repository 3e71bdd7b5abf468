"""The git repository that a script lies in, for records. Where there is no git, or no repository, that is no error."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

# Set by git for its hooks, whose repository need not be the script's.
_OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")


def git_commit(folder: Path) -> str | None:
    """The commit checked out in the repository that holds `folder`, with `-dirty` where tracked files differ from it.

    None outside a repository, in one without a commit, and without git.
    """
    return _ask(folder, "describe", "--always", "--dirty", "--abbrev=40", "--match=")


def git_root(folder: Path) -> Path | None:
    """The root of the repository that holds `folder`; None outside one, and without git."""
    root = _ask(folder, "rev-parse", "--show-toplevel")
    return Path(root) if root else None


def git_environment() -> dict[str, str]:
    """The environment for a git that is asked about a folder, not about the repository whose hook we run in."""
    return {key: value for key, value in os.environ.items() if key not in _OF_A_HOOK} | {"LC_ALL": "C"}


def _ask(folder: Path, *words: str) -> str | None:
    command = ["git", "-C", str(folder), *words]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=git_environment(),
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
