"""Who made an artifact: script, config fingerprint, git commit, command line. Part of every record."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from nemo_runspec.git import git_commit, git_root
from nemo_runspec.variables import CODE_DIGEST, GIT_COMMIT


class Producer(BaseModel):
    """What made an artifact.

    `script` is relative to its git repository, or to the code that was sent along with it (else the bare file name),
    `name` the script's runspec name, `argv` the command line that the user typed, program first.
    `git_commit` ends in `-dirty` when tracked files were changed, and is None outside a repository. `code_digest`
    covers the code that was sent to a cluster, uncommitted changes included; None if the script ran where it lies.
    `run` is the id of the run, the same in all its attempts; None outside a run.
    """

    model_config = ConfigDict(frozen=True)

    script: str
    name: str | None = None
    fingerprint: str | None = None
    run: str | None = None
    git_commit: str | None = None
    code_digest: str | None = None
    argv: list[str] = []


def producer_of(
    script: Path, *, name: str | None = None, fingerprint: str | None = None, argv: list[str] | None = None
) -> Producer:
    """The producer for `script` as it stands on disk; `argv` defaults to this process's own.

    Code that was sent to a cluster is no longer in its repository: RUNSPEC_GIT_COMMIT names the commit. A repository
    around the folder where it arrived (`output/jobs` in a checkout) is not that of the code.
    """
    script = script.absolute()
    bundle = _bundle_root(script)
    root = bundle or git_root(script.parent)
    relative = script.relative_to(root).as_posix() if root and script.is_relative_to(root) else script.name
    return Producer(
        script=relative,
        name=name,
        fingerprint=fingerprint,
        git_commit=os.environ.get(GIT_COMMIT) or (None if bundle else git_commit(script.parent)),
        code_digest=os.environ.get(CODE_DIGEST) or None,
        argv=[Path(sys.argv[0]).name, *sys.argv[1:]] if argv is None else argv,
    )


def _bundle_root(script: Path) -> Path | None:
    """The folder of the code in what was sent to a cluster, `project/` beside `launch.json`."""
    if CODE_DIGEST not in os.environ:
        return None
    folders = (folder for folder in script.parents if folder.name == "project")
    return next((folder for folder in folders if (folder.parent / "launch.json").is_file()), None)
