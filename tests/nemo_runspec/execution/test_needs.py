"""What a job needs on the cluster, and the environment there that is asked for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_runspec.config.loader import load_config
from nemo_runspec.display import job_text
from nemo_runspec.errors import UserError
from nemo_runspec.execution import needs
from nemo_runspec.execution.needs import needs_text
from nemo_runspec.job import Job, build_job_config, parse_env
from nemo_runspec.runspec import parse

# Without its site-packages, this Python has no torch, ray or s3fs.
BARE_PYTHON = f'#!/bin/sh\nexec {sys.executable} -S "$@"\n'


@pytest.fixture(autouse=True)
def script(project: Path, write: Callable[[str, str], Path], tmp_path: Path) -> None:
    text = (project / "train.py").read_text(encoding="utf-8").replace("import json\n", "import json\nimport torch\n", 1)
    text = text.replace('dependencies = ["pydantic"]', 'dependencies = ["nemotron-cookbook", "scikit-learn>=1"]')
    write("train.py", text.replace('launch = "torchrun"', 'launch = "ray"'))
    write("venv/bin/python", BARE_PYTHON).chmod(0o755)
    needs._answer.cache_clear()


def job_of(profile: str, *, dry_run: bool = False) -> Job:
    spec = parse("train.py")
    loaded = load_config(spec.config_dir, "tiny", ())
    env = parse_env(profile, spec=spec, loaded=loaded)
    return build_job_config(loaded, spec, env, dry_run=dry_run)


PROFILES = """
[plain]
executor = "slurm"
nodes = 2
[venv]
extends = "plain"
venv = "venv"
[image]
extends = "venv"
container_image = "nvcr.io/nvidia/nemo:25.11"
[one]
extends = "plain"
nodes = 1
artifacts = "gs://bucket/a"
[other-scheme]
extends = "one"
artifacts = "s3a://bucket/a"
[head]
executor = "ray"
address = "http://head:8265"
[gone]
extends = "plain"
venv = "/no/venv"
[far]
extends = "gone"
tunnel = "ssh"
host = "login.invalid"
user = "me"
job_dir = "/lustre/me"
"""


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("plain", "torch, scikit-learn, ray (not checked: the profile names no venv)"),
        ("image", "torch, scikit-learn, ray (in the image nvcr.io/nvidia/nemo:25.11; not checked)"),
        ("one", "torch, scikit-learn, gcsfs (not checked: the profile names no venv)"),
        ("other-scheme", "torch, scikit-learn, s3fs (not checked: the profile names no venv)"),
        ("head", "torch, scikit-learn (in the environment of the Ray cluster; not checked)"),
    ],
)
def test_what_is_not_checked_is_listed(write: Callable[[str, str], Path], profile: str, expected: str) -> None:
    write("env.toml", PROFILES)
    spec = parse("train.py")
    assert needs_text(spec, parse_env(profile, spec=spec)) == f"what nemotron-cookbook imports, {expected}"


def test_an_image_is_not_asked(write: Callable[[str, str], Path]) -> None:
    write("env.toml", PROFILES)
    job = job_of("image")
    assert job.env.venv is None and not job.env.startup_commands  # the container has a Python of its own
    assert "  needs     what nemotron-cookbook imports, torch, scikit-learn, ray (in the image" in job_text(
        job, job.resolved.spec, job.env
    )


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_environment_that_lacks_something_is_refused(
    write: Callable[[str, str], Path], tmp_path: Path, dry_run: bool
) -> None:
    write("env.toml", PROFILES)
    with pytest.raises(UserError) as caught:
        job_of("venv", dry_run=dry_run)
    venv = tmp_path / "venv"
    assert (
        caught.value.message
        == f"demo/train needs torch, scikit-learn, ray, and {venv} on this machine does not have it"
    )
    assert caught.value.hint == f"install it there: {venv}/bin/python -m pip install torch scikit-learn ray"
    for module in ("torch", "ray"):
        write(f"modules/{module}.py", "")
    write("modules/scikit_learn-1.7.dist-info/METADATA", "Metadata-Version: 2.1\nName: scikit-learn\nVersion: 1.7\n")
    needs._answer.cache_clear()
    write("venv/bin/python", f'#!/bin/sh\nPYTHONPATH={tmp_path}/modules exec {sys.executable} -S "$@"\n')
    job = job_of("venv", dry_run=dry_run)
    assert (
        f"  needs     what nemotron-cookbook imports, torch, scikit-learn, ray (in {venv})"
        in job_text(job, job.resolved.spec, job.env).splitlines()
    )
    assert job.env.startup_commands == (f"source {venv}/bin/activate",)


def test_an_environment_that_is_not_there(write: Callable[[str, str], Path]) -> None:
    write("env.toml", PROFILES)
    with pytest.raises(UserError, match="profile gone: venv = '/no/venv': no Python answers there, on this machine"):
        job_of("gone")


def test_a_dry_run_without_the_login_node_says_what_it_did_not_ask(
    write: Callable[[str, str], Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write("env.toml", PROFILES)
    write("bin/ssh", "#!/bin/sh\necho 'ssh: Could not resolve hostname' >&2\nexit 255\n").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert job_of("far", dry_run=True).env.venv == "/no/venv"
    said = capsys.readouterr().err
    assert said.startswith(
        "not asked, since the login node does not answer: whether /no/venv has torch, scikit-learn, ray (cannot"
    )
    with pytest.raises(UserError, match=r"cannot reach me@login\.invalid"):
        job_of("far")


def test_a_local_profile_has_no_environment_of_a_cluster(write: Callable[[str, str], Path]) -> None:
    write("env.toml", '[here]\nvenv = "venv"\n')
    with pytest.raises(UserError, match=r"env\.toml:2: \[here\] venv: is for jobs on a cluster"):
        parse_env("here")


def test_names_are_compared_as_pip_compares_them() -> None:
    names = ["pyyaml", "Huggingface_Hub", "yaml", "no.such.thing", "no-such-thing"]  # the first is PyYAML, installed
    answer = subprocess.run([sys.executable, "-c", needs._MISSING, *names], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["no.such.thing", "no-such-thing"]
