"""Submits a script as a command file does, for the tests: `submit.py OPTIONS`, options as JSON (see `Options`).

It follows the jobs (`how = "run"`), leaves them (`batch`), or prints what it would submit (`dry`).
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nemo_runspec
from nemo_runspec.errors import run_main
from nemo_runspec.execution.launch_script import Launch, launch_json, launch_script
from nemo_runspec.execution.slurm import (
    create_executor,
    follow_or_leave,
    load_nemo_run,
    open_experiment,
    submission_text,
)
from nemo_runspec.profile import parse_env


@dataclass
class Options:
    """`jobs` run one after another, each the same `script`."""

    profile: str
    script: str
    how: str = "run"
    launch: str = "torchrun"
    jobs: tuple[str, ...] = ("toy",)


def write_bundle(folder: Path, options: Options, name: str) -> Path:
    """A bundle with the script as train.py and this nemo_runspec."""
    env = parse_env(options.profile)
    assert env.slurm is not None
    package = Path(nemo_runspec.__file__).parent
    shutil.copytree(package, folder / "runspec" / "nemo_runspec", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "project").mkdir()
    (folder / "project" / "train.py").write_text(options.script, encoding="utf-8")
    (folder / "train.yaml").write_text(f"name: {name}\n", encoding="utf-8")
    launch = Launch(
        name,
        options.launch,
        "project/train.py",
        "train.yaml",
        processes_per_node=env.slurm.processes_per_node,
    )
    text = launch_script(
        env.variables, python_path=["runspec"], startup_commands=env.startup_commands, secrets=env.secrets
    )
    (folder / "launch.json").write_text(launch_json(launch), encoding="utf-8")
    (folder / "launch.sh").write_text(text, encoding="utf-8")
    return folder


def main(options: Options) -> int:
    """Submit, and then as `options.how` says."""
    env = parse_env(options.profile)
    run = load_nemo_run(env)
    with (
        tempfile.TemporaryDirectory() as folder,
        open_experiment("test", env, dry_run=options.how == "dry") as experiment,
    ):
        before: list[str] = []
        for name in options.jobs:
            bundle = write_bundle(Path(folder) / name, options, name)
            script, executor = run.Script(path="launch.sh", entrypoint="bash"), create_executor(env, bundle, name)
            experiment.add(script, executor=executor, name=name, dependencies=before)
            before = [name]
        if options.how == "dry":
            print(submission_text(experiment, env))
            return 0
        experiment.run(detach=True)
    return follow_or_leave(experiment, env, attached=options.how == "run")


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(Options(**json.loads(sys.argv[1])))))
