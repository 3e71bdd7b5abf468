"""For tests: scripts of recipes as a user runs them, in a folder of their own, and what they have published."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from forked import OF_DATA, run_forked

import nemotron.recipes
from nemo_runspec.artifacts import Registry, Version

RECIPES = Path(nemotron.recipes.__file__).parent


def start(cwd: Path, script: Path | str, *words: str, cpus: int | None = None, **env: str) -> subprocess.Popen[str]:
    """`python SCRIPT --config WORDS` in a session of its own. `script`: a path below recipes/, or a whole one."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
        if cpus is not None:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus])

    return subprocess.Popen(
        [sys.executable, str(RECIPES / script), "--config", *words], cwd=cwd, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(RECIPES.parents[1]), **env}, preexec_fn=prepare,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(
    cwd: Path, script: Path | str, *words: str, cpus: int | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """The same, to its end; begun with its imports done where nothing is asked of the process itself."""
    if cpus is None and not any(name.startswith("PYTHON") for name in env):
        environment = os.environ | {"PYTHONPATH": str(RECIPES.parents[1]), **env}
        return run_forked(OF_DATA, [str(RECIPES / script), "--config", *words], cwd, environment)
    process = start(cwd, script, *words, cpus=cpus, **env)
    stdout, stderr = process.communicate(timeout=280)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def published(cwd: Path, result: subprocess.CompletedProcess[str]) -> Version:
    """The version of `data` that a script has published, which has to have succeeded."""
    assert result.returncode == 0, result.stderr
    return Registry(cwd / "output" / "artifacts").resolve(json.loads(result.stdout.splitlines()[-1])["data"])
