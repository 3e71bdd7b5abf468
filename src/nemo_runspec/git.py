"""The git repository that a script lies in, for records. Where there is no git, or no repository, that is no error.

A folder that the repository ignores is not in it: a package installed in somebody's `.venv` is not their code.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from nemo_runspec.errors import UserError

# Set by git for its hooks, whose repository need not be the script's.
_OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")


def git_commit(folder: Path) -> str | None:
    """The commit checked out in the repository that holds `folder`, with `-dirty` where tracked files differ from it.

    None outside a repository, in one without a commit, and without git.
    """
    if _is_ignored(folder):
        return None
    return _first_line(folder, "describe", "--always", "--dirty", "--abbrev=40", "--match=")


def git_root(folder: Path) -> Path | None:
    """The root of the repository that holds `folder`; None outside one, and without git."""
    root = None if _is_ignored(folder) else _first_line(folder, "rev-parse", "--show-toplevel")
    return Path(root) if root else None


def ask_git(folder: Path, *words: str) -> bytes | None:
    """What git says; None where there is no git, or `folder` is in no repository.

    Raises:
        UserError: git is there and refuses (a repository of another owner, say).
    """
    # About a folder, not about the repository whose hook we run in.
    environment = {key: value for key, value in os.environ.items() if key not in _OF_A_HOOK} | {"LC_ALL": "C"}
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        answer = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, env=environment, timeout=60, check=False
        )
    except FileNotFoundError:
        return None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"git cannot list {folder}: {error}") from None
    if answer.returncode:
        lines = answer.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {answer.returncode}"]
        why = lines[0].removeprefix("fatal: ")
        if why.startswith("not a git repository (or any"):
            return None
        raise UserError(f"git cannot list {folder}: {why}", lines[-1].strip() if len(lines) > 1 else None)
    return answer.stdout


def _is_ignored(folder: Path) -> bool:
    return _first_line(folder, "check-ignore", ".") is not None


def _first_line(folder: Path, *words: str) -> str | None:
    try:
        return os.fsdecode(ask_git(folder, *words) or b"").strip() or None
    except UserError:
        return None
