"""All that travels with a job, put together from a real project, profile and config."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_runspec.artifacts import Registry
from nemo_runspec.bundle import Bundle, create_bundle, published_dir
from nemo_runspec.display import where
from nemo_runspec.errors import UserError
from nemo_runspec.job import RecipeConfig, build_job_config, parse_config, parse_env, parse_runspec
from nemo_runspec.profile import Env

Write = Callable[[str, str], Path]
PROFILES = """
[tool.wandb]
project = "cookbook"

[here]
executor = "slurm"
account = "research"
partition = "batch"
nodes = 2
gpus_per_node = 0
env = { GREETING = "it's here" }
secrets = ["HF_TOKEN"]
startup_commands = ["source /venv/bin/activate"]

[there]
extends = "here"
tunnel = "ssh"
host = "login"
user = "me"
job_dir = "/lustre/me"

[bucket]
extends = "there"
artifacts = "memory://registry"
"""


@dataclass(frozen=True)
class Written:
    """A bundle and the texts of the four files that were made for it, beside the environment that it is for."""

    bundle: Bundle
    env: Env
    launch_sh: str
    launch: dict[str, Any]
    job_yaml: str
    train_yaml: str


def bundle_of(project: Path, profile: str, *words: str) -> Written:
    cfg = RecipeConfig("tiny", words, profile)
    loaded = parse_config(cfg, parse_runspec(project / "train.py"))
    spec = parse_runspec(project / loaded.run.script)
    env = parse_env(cfg.profile, batch=cfg.batch, spec=spec, loaded=loaded)
    job = build_job_config(loaded, spec, env, dry_run=False, argv=("nemotron", "toy"))
    with create_bundle(job, spec, env) as bundle:
        texts = {path.name: path.read_text() for path in bundle.folder.iterdir() if path.is_file()}
        assert (bundle.folder / bundle.plan.script).is_file()
        assert sorted(texts) == ["job.yaml", "launch.json", "launch.sh", "train.yaml"]
        assert [name for name in texts if (bundle.folder / name).stat().st_mode & 0o777 == 0o755] == ["launch.sh"]
    assert not bundle.folder.exists()
    launch = json.loads(texts["launch.json"])
    return Written(bundle, env, texts["launch.sh"], launch, texts["job.yaml"], texts["train.yaml"])


@pytest.fixture(autouse=True)
def profiles(project: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("env.toml", PROFILES)
    monkeypatch.setenv("HF_TOKEN", "canary-1234")


def exported(bundle: Written) -> dict[str, str]:
    """The variables that launch.sh sets, according to bash."""
    lines = [line for line in bundle.launch_sh.splitlines() if line.startswith("export ")]
    script = "\n".join(["cd /", *lines, "env -0"])
    done = subprocess.run(["bash", "-c", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True)
    return dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if "=" in pair)


def test_the_four_files_say_the_same_job(project: Path) -> None:
    written = bundle_of(project, "here")
    assert written.launch["processes_per_node"] == 1
    assert written.launch["script"] == written.bundle.plan.script and "for name in HF_TOKEN; do" in written.launch_sh
    variables, digest = exported(written), written.bundle.code.digest
    assert variables["GREETING"] == "it's here"
    assert variables["WANDB_PROJECT"] == "cookbook"
    assert variables["RUNSPEC_CODE_DIGEST"] == digest
    assert Path(variables["RUNSPEC_ARTIFACTS_ROOT"]) == Path(variables["RUNSPEC_OUTPUT_ROOT"]) / "artifacts"
    assert "source /venv/bin/activate" in written.launch_sh.splitlines()
    job = yaml.safe_load(written.job_yaml)
    assert job["profile"] == "here" and job["code"]["digest"] == digest
    assert yaml.safe_load(written.train_yaml)["run"]["config"] == "tiny"
    texts = written.launch_sh + str(written.launch) + written.job_yaml + written.train_yaml + written.bundle.summary()
    assert "canary-1234" not in texts


@pytest.mark.parametrize("variable", ["RUNSPEC_FRESH", "RUNSPEC_DEBUG"])
def test_what_the_environment_says_for_an_option_travels(
    project: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    assert variable not in exported(bundle_of(project, "here"))
    monkeypatch.setenv(variable, "1")
    assert exported(bundle_of(project, "here"))[variable] == "1"


def test_behind_ssh_the_roots_are_those_of_the_cluster(project: Path) -> None:
    written = bundle_of(project, "there")
    variables, env = exported(written), written.env
    assert variables["RUNSPEC_OUTPUT_ROOT"] == "/lustre/me/output"
    assert variables["RUNSPEC_ARTIFACTS_ROOT"] == "/lustre/me/output/artifacts"
    assert published_dir(env).startswith("/lustre/me/published/")
    assert published_dir(env) != published_dir(env)


def test_inputs_are_pinned_where_the_registry_can_be_seen(project: Path, tmp_path: Path, write: Write) -> None:
    write("config/tiny.yaml", "run: {data: corpus}\npath: ${art:data,path}/x\n")
    (tmp_path / "payload").write_text("payload")
    published = Registry("memory://registry").publish("corpus", tmp_path / "payload", {"fields": {}})
    pinned = yaml.safe_load(bundle_of(project, "bucket").train_yaml)
    assert pinned["run"]["data"] == f"corpus:{published.version}@{published.digest[:12]}"
    unseen = yaml.safe_load(bundle_of(project, "there").train_yaml)
    assert unseen["run"]["data"] == "corpus:latest"
    assert pinned["path"] == unseen["path"] == "${art:data,path}/x"
    with pytest.raises(UserError, match="no artifact 'corpus'"):
        bundle_of(project, "here")


def test_where_a_job_runs_in_one_line(project: Path) -> None:
    spec = parse_runspec(project / "train.py")
    assert where(spec, parse_env("there", spec=spec)) == ("Slurm (me@login, partition batch): 2 nodes, 1 process each")
    assert where(spec, Env(executor="ray", ray="http://me:canary@head:8265")) == "Ray at http://***@head:8265"


def test_a_name_that_no_folder_may_have_becomes_one(project: Path) -> None:
    assert bundle_of(project, "here", "run.name=../my run/1").launch["name"] == "my-run-1"


def test_what_was_asked_of_the_executor_does_not_travel(project: Path) -> None:
    written = bundle_of(project, "here", "run.env.time=30", "run.env.nodes=3")
    env = written.env
    assert env.slurm is not None and (env.slurm.time, env.slurm.nodes) == ("30", 3)
    assert yaml.safe_load(written.train_yaml)["run"]["env"] is None
