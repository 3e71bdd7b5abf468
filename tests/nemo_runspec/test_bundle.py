"""All that travels with a job, put together from a real project, profile and config."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from nemo_runspec.artifacts import Registry
from nemo_runspec.bundle import Bundle, create_bundle, published_dir
from nemo_runspec.display import where
from nemo_runspec.env import Env
from nemo_runspec.errors import UserError
from nemo_runspec.job import build_job_config, parse_config, parse_env, parse_recipe_config, parse_runspec

Write = Callable[[str, str], Path]
PROFILES = """
[wandb]
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


def bundle_of(project: Path, profile: str, *words: str) -> tuple[Bundle, Env]:
    cfg = parse_recipe_config(_context("-c", "tiny", "--run", profile, *words))
    loaded = parse_config(cfg, parse_runspec(project / "train.py"))
    spec = parse_runspec(project / loaded.run.script)
    env = parse_env(cfg.profile, batch=cfg.batch, spec=spec, loaded=loaded)
    job = build_job_config(loaded, spec, env, argv=("nemotron", "toy"))
    return create_bundle(job, spec, env), env


def _context(*words: str) -> Any:
    return SimpleNamespace(args=list(words), command=SimpleNamespace(params=[]))


@pytest.fixture(autouse=True)
def profiles(project: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("env.toml", PROFILES)
    monkeypatch.setenv("HF_TOKEN", "canary-1234")


def exported(bundle: Bundle) -> dict[str, str]:
    """The variables that launch.sh sets, according to bash."""
    lines = [line for line in bundle.launch_sh.splitlines() if line.startswith("export ")]
    script = "\n".join(["cd /", *lines, "env -0"])
    done = subprocess.run(["bash", "-c", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True)
    return dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if "=" in pair)


def test_the_four_files_say_the_same_job(project: Path) -> None:
    bundle, _ = bundle_of(project, "here")
    launch = json.loads(bundle.launch_json)
    assert (launch["executor"], launch["processes_per_node"]) == ("slurm", 1)
    assert launch["script"] == bundle.plan.script and "for name in HF_TOKEN; do" in bundle.launch_sh
    variables = exported(bundle)
    assert variables["GREETING"] == "it's here"
    assert variables["WANDB_PROJECT"] == "cookbook"
    assert variables["RUNSPEC_CODE_DIGEST"] == bundle.plan.digest
    assert Path(variables["RUNSPEC_ARTIFACTS_ROOT"]) == Path(variables["RUNSPEC_OUTPUT_ROOT"]) / "artifacts"
    assert "source /venv/bin/activate" in bundle.launch_sh.splitlines()
    job = yaml.safe_load(bundle.job_yaml)
    assert job["profile"] == "here" and job["code"]["digest"] == bundle.plan.digest
    assert yaml.safe_load(bundle.train_yaml)["run"]["config"] == "tiny"
    texts = bundle.launch_sh + bundle.launch_json + bundle.job_yaml + bundle.train_yaml + bundle.summary()
    assert "canary-1234" not in texts


def test_behind_ssh_the_roots_are_those_of_the_cluster(project: Path) -> None:
    bundle, env = bundle_of(project, "there")
    variables = exported(bundle)
    assert variables["RUNSPEC_OUTPUT_ROOT"] == "/lustre/me/output"
    assert variables["RUNSPEC_ARTIFACTS_ROOT"] == "/lustre/me/output/artifacts"
    assert published_dir(env).startswith("/lustre/me/published/")
    assert published_dir(env) != published_dir(env)


def test_inputs_are_pinned_where_the_registry_can_be_seen(project: Path, tmp_path: Path, write: Write) -> None:
    write("config/tiny.yaml", "run: {data: corpus}\npath: ${art:data,path}/x\n")
    (tmp_path / "payload").write_text("payload")
    published = Registry("memory://registry").publish("corpus", tmp_path / "payload", {"fields": {}})
    pinned = yaml.safe_load(bundle_of(project, "bucket")[0].train_yaml)
    assert pinned["run"]["data"] == f"corpus:{published.version}@{published.digest[:12]}"
    unseen = yaml.safe_load(bundle_of(project, "there")[0].train_yaml)
    assert unseen["run"]["data"] == "corpus:latest"
    assert pinned["path"] == unseen["path"] == "${art:data,path}/x"
    with pytest.raises(UserError, match="no artifact 'corpus'"):
        bundle_of(project, "here")


def test_where_a_job_runs_in_one_line(project: Path) -> None:
    spec = parse_runspec(project / "train.py")
    assert where(spec, parse_env("there", spec=spec)) == ("Slurm (me@login, partition batch): 2 nodes, 1 process each")


def test_what_is_written_is_what_was_planned_and_goes_away(project: Path) -> None:
    bundle, _ = bundle_of(project, "here")
    with bundle.written() as folder:
        assert (folder / "launch.sh").read_text() == bundle.launch_sh
        assert (folder / bundle.plan.script).is_file()
    assert not folder.exists()


def test_a_name_that_no_folder_may_have_becomes_one(project: Path) -> None:
    bundle, _ = bundle_of(project, "here", "run.name=../my run/1")
    assert bundle.launch.name == "my-run-1"


def test_a_secret_in_the_script_s_block_is_refused_where_it_would_travel(project: Path, write: Write) -> None:
    text = (
        (project / "train.py")
        .read_text()
        .replace("# [tool.runspec.run]", '# [tool.runspec.env]\n# A_TOKEN = "canary"\n# [tool.runspec.run]')
    )
    (project / "train.py").write_text(text)
    with pytest.raises(UserError, match=r"env\.A_TOKEN: looks like a secret") as caught:
        bundle_of(project, "here")
    assert "canary" not in str(caught.value)


def test_what_was_asked_of_the_executor_does_not_travel(project: Path) -> None:
    bundle, env = bundle_of(project, "here", "run.env.time=30", "run.env.nodes=3")
    assert env.slurm is not None and (env.slurm.time, env.slurm.nodes) == ("30", 3)
    assert yaml.safe_load(bundle.train_yaml)["run"]["env"] is None
