"""Who made an artifact: script, config fingerprint, git commit, command line. Part of every record."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from nemo_runspec.git import git_commit, git_root


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
    root = git_root(script.parent)
    relative = script.relative_to(root).as_posix() if root and script.is_relative_to(root) else script.name
    arguments = [Path(sys.argv[0]).name, *sys.argv[1:]] if argv is None else argv
    return Producer(
        script=relative, name=name, fingerprint=fingerprint, git_commit=git_commit(script.parent), argv=arguments
    )
