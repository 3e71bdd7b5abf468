"""The user's files of a job behind an ssh login, with a pretended `ssh` program; tests/cluster has a real one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nemo_runspec.config.loader import load_config
from nemo_runspec.display import job_text
from nemo_runspec.env.keys import EXECUTORS
from nemo_runspec.errors import UserError
from nemo_runspec.execution.slurm.remote import SshShell
from nemo_runspec.job import Job, build_job_config, parse_env
from nemo_runspec.runspec import parse

SCHEMA = """
from typing import Annotated

from pydantic import BaseModel
from nemo_runspec.config.inputs import ArtifactInput
from nemo_runspec.user_files import UserFiles


class Run(BaseModel):
    model_config = {"extra": "allow"}
    data: str | None = None
    model: Annotated[str | None, ArtifactInput("Checkpoint", adopt=lambda place, registry, publish: None)] = None


class Cfg(BaseModel):
    run: Run
    paths: list[Annotated[str, UserFiles()]] = []
"""
# The cluster is the folder `there`: an absolute path begins in it.
SSH = """#!/bin/bash
root=$(dirname "$0")
if [ -e "$root/down" ]; then echo "ssh: connect to host login port 22: Connection refused" >&2; exit 255; fi
if [[ "$*" == *"-G -- "* ]]; then echo "controlpath /home/me/.ssh/control"; exit; fi
command=${@: -1}
command=${command//$root\\/here/\\/nowhere}
HOME="$root/there/home/me" exec bash -c "${command//\\/lustre/$root/there/lustre}"
"""
LOGIN = '[far]\nexecutor = "slurm"\ntunnel = "ssh"\nhost = "login"\nuser = "me"\njob_dir = "/lustre/me"\n'


@pytest.fixture(autouse=True)
def two_machines(
    project: Path, write: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("schema.py", SCHEMA)
    write("config/tiny.yaml", "run: {output: demo-model}\n")
    write("env.toml", LOGIN)
    for name in ("there/lustre/docs/a.txt", "there/lustre/a b's.txt", "there/home/me/notes.txt", "here/mine.txt"):
        write(name, "x")
    write("ssh", SSH).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    SshShell.of.cache_clear()


def job_of(
    *paths: str, dry_run: bool = False, profile: str = "far", executors: Sequence[str] = EXECUTORS, **run: str
) -> Job:
    spec = parse("train.py")
    inputs = [f"run.{key}={value}" for key, value in run.items()]
    loaded = load_config(spec.config_dir, "tiny", [f"paths={list(paths)}", *inputs])
    env = parse_env(profile, spec=spec, loaded=loaded, executors=executors)
    return build_job_config(loaded, spec, env, dry_run=dry_run)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_path_that_lies_there_is_accepted(dry_run: bool) -> None:
    paths = ("/lustre/docs", "/lustre/docs/*.txt", "/lustre/**/a.txt", "/lustre/a b's.txt", "~/notes.txt", "s3://b/x")
    job = job_of(*paths, dry_run=dry_run)
    assert job.resolved.remote_files == paths[:-1]
    assert "  reads     /lustre/docs (where the job runs)" in job_text(job, job.resolved.spec, job.env).splitlines()
    # What the files are counts into the fingerprint, and only the job sees them.
    assert job.run.fingerprint is None and job.resolved.run["files"] is None


def test_one_that_lies_here_only_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "here" / "mine.txt"
    with pytest.raises(UserError) as caught:
        job_of("/lustre/docs", str(mine))
    assert caught.value.message == f"command line: paths.1: {mine} is on this machine only, and the job runs on login"
    assert f"rsync -a {mine} me@login:FOLDER/" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/lustre/dcos", "command line: paths.0: no such file on login: /lustre/dcos"),
        ("/lustre/docs/*.csv", r"command line: paths.0: no such file on login: /lustre/docs/\*.csv"),
        ("here/mine.txt", "command line: paths.0: here/mine.txt: a relative path, and the job runs on login"),
    ],
)
def test_one_that_lies_nowhere_is_refused(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        job_of(path)


def test_a_model_that_the_job_is_to_adopt_lies_there_like_any_file(tmp_path: Path) -> None:
    """The registry is a folder of the cluster, so that nothing is adopted here."""
    for dry_run in (False, True):
        for model in ("/lustre/docs", "hf://org/name", "model:3"):
            job = job_of(model=model, dry_run=dry_run)
            assert job.resolved.run["model"] == model and job.resolved.remote_files == ()
        with pytest.raises(
            UserError, match=r"command line: run.model: ./here: a relative path, and the job runs on login"
        ):
            job_of(model="./here", dry_run=dry_run)
        with pytest.raises(UserError, match=r"run.model: .* is on this machine only, and the job runs on login"):
            job_of("/lustre/docs", model=str(tmp_path / "here"), dry_run=dry_run)
        for place in ("./here", "/lustre/docs", "hf://org/name"):
            with pytest.raises(
                UserError, match=f"run.data = {place}: the name of an artifact expected, not a directory"
            ):
                job_of(data=place, dry_run=dry_run)


def test_a_folder_that_the_profile_names_is_not_looked_into(write: Callable[[str, str], Path], tmp_path: Path) -> None:
    write("down", "")
    write(
        "env.toml",
        f'{LOGIN}remote_folders = ["/scratch/"]\n[near]\nexecutor = "slurm"\nremote_folders = ["/scratch"]\n',
    )
    for profile in ("far", "near"):
        assert job_of("/scratch/x", "/scratch", profile=profile).resolved.remote_files == ("/scratch/x", "/scratch")
    with pytest.raises(UserError, match="cannot reach me@login"):
        job_of("/scratch/x", "/scratches/x")
    with pytest.raises(UserError, match="no such file: /scratches/x"):
        job_of("/scratches/x", profile="near")


def test_a_dry_run_without_the_login_node_says_what_it_did_not_look_for(
    write: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write("down", "")
    assert job_of("/lustre/docs", dry_run=True).resolved.remote_files == ("/lustre/docs",)
    said = capsys.readouterr().err
    assert said.startswith("not looked for, since the login node does not answer: /lustre/docs (cannot reach me@login")


def test_where_the_file_system_is_shared_a_path_is_one_of_this_machine(
    write: Callable[[str, str], Path], tmp_path: Path
) -> None:
    write("env.toml", '[near]\nexecutor = "slurm"\n')
    job = job_of("here/mine.txt", profile="near")
    assert job.resolved.remote_files == () and job.run.fingerprint is not None
    with pytest.raises(UserError, match="no such file: /lustre/docs"):
        job_of("/lustre/docs", profile="near")


def test_machines_of_another_launcher_have_what_the_profile_says(
    write: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """They cannot be asked, and what exists here says nothing about them."""
    write("env.toml", '[mine]\nexecutor = "other"\nremote_folders = ["/lustre"]\n')
    taken = job_of("/lustre/docs", "s3://b/x", profile="mine", executors=("local", "other"))
    assert taken.resolved.remote_files == ("/lustre/docs",)
    path = tmp_path / "here" / "mine.txt"
    with pytest.raises(UserError, match=f"{path}: the machines of executor other may not have it"):
        job_of(str(path), profile="mine", executors=("local", "other"))
