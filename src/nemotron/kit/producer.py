"""Who made an artifact: script, config fingerprint, git commit, command line. Part of every record."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Producer(BaseModel):
    """What made an artifact.

    `script` is relative to its git repository (else the bare file name), `name` the script's runspec name, `argv` the
    command line that the user typed, program first,
    `git_commit` ends in `-dirty` when tracked files were changed, and is None outside a repository.
    """

    model_config = ConfigDict(frozen=True)

    script: str
    name: str | None = None
    fingerprint: str | None = None
    git_commit: str | None = None
    argv: list[str] = []


def producer_of(
    script: Path, *, name: str | None = None, fingerprint: str | None = None, argv: list[str] | None = None
) -> Producer:
    """The producer for `script` as it stands on disk; `argv` defaults to this process's own."""
    script = script.absolute()
    root, commit = _git(script.parent)
    relative = script.relative_to(root).as_posix() if root and script.is_relative_to(root) else script.name
    arguments = [Path(sys.argv[0]).name, *sys.argv[1:]] if argv is None else argv
    return Producer(script=relative, name=name, fingerprint=fingerprint, git_commit=commit, argv=arguments)


def _git(folder: Path) -> tuple[Path | None, str | None]:
    """The root and the commit of the repository that holds `folder`; None where there is no repository or no git."""

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=10, check=True)
        return done.stdout.strip()

    try:
        root = Path(ask("rev-parse", "--show-toplevel"))
    except (OSError, subprocess.SubprocessError):
        return None, None
    try:
        dirty = "-dirty" if ask("status", "--porcelain", "--untracked-files=no") else ""
        return root, ask("rev-parse", "HEAD") + dirty
    except (OSError, subprocess.SubprocessError):  # a repository without a commit
        return root, None
