"""launch.sh under a real bash, and launch.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemo_runspec.execution.launch_script import Launch, launch_json, launch_script, read_launch

GOLDEN = Path(__file__).parent / "golden"
NASTY = {
    "PLAIN": "1",
    "QUOTES": 'it\'s "quoted" `date` $(date) $HOME \\n',
    "LINES": "one\ntwo\n",
    "EMPTY": "",
    "BLANK": "  a  b  ",
    "UNICODE": "größer → 1",
}
# What stands where `python` would be: prints what the node's process would see.
FAKE_PYTHON = f"""#!{sys.executable}
import json, os, signal, sys
seen = {{"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}
seen["usr1"] = signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
print(json.dumps(seen))
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "a job" / "code"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text(FAKE_PYTHON, encoding="utf-8")
    (folder / "bin" / "python").chmod(0o755)
    return folder


def run(bundle: Path, text: str, **env: str) -> subprocess.CompletedProcess[str]:
    (bundle / "launch.sh").write_text(text, encoding="utf-8")
    environment = {"PATH": f"{bundle}/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **env}
    return subprocess.run(["bash", str(bundle / "launch.sh")], env=environment, capture_output=True, text=True)


def test_the_golden_file() -> None:
    text = launch_script(
        {"RUNSPEC_OUTPUT_ROOT": "/shared/output", "NOTE": "it's $HOME"},
        python_path=["project/src", "runspec"],
        startup_commands=["module load cuda/12.8", 'source "$HOME/venv/bin/activate"'],
        secrets=["HF_TOKEN", "WANDB_API_KEY"],
    )
    assert text == (GOLDEN / "launch.sh").read_text(encoding="utf-8")


def test_every_value_arrives_as_it_is(bundle: Path) -> None:
    done = run(bundle, launch_script(NASTY, python_path=["project/a b", "runspec"]), PYTHONPATH="/before")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert {name: seen["env"][name] for name in NASTY} == NASTY
    assert seen["env"]["PYTHONPATH"] == f"{bundle}/project/a b:{bundle}/runspec:/before"
    assert seen["env"]["RUNSPEC_JOB_DIR"] == str(bundle.parent)
    assert seen["cwd"] == str(bundle)
    assert seen["argv"] == ["-m", "nemo_runspec.execution.node", "launch.json"]
    assert seen["usr1"], "a request to save must not kill what has not begun to listen"


def test_startup_commands_run_before_and_may_use_what_is_not_set(bundle: Path) -> None:
    commands = ["export MADE=$NOT_SET-here", "cd /"]
    seen = json.loads(run(bundle, launch_script({}, python_path=["runspec"], startup_commands=commands)).stdout)
    assert seen["env"]["MADE"] == "-here"
    assert seen["cwd"] == str(bundle)
    assert seen["env"]["PYTHONPATH"] == f"{bundle}/runspec"


def test_the_code_that_travelled_goes_before_what_an_environment_brings(bundle: Path) -> None:
    text = launch_script(
        {"PYTHONPATH": "/of/the/profile"}, python_path=["runspec"], startup_commands=["export PYTHONPATH=/of/a/module"]
    )
    assert json.loads(run(bundle, text).stdout)["env"]["PYTHONPATH"] == f"{bundle}/runspec:/of/a/module"
    text = launch_script({"PYTHONPATH": "/of/the/profile"}, python_path=["runspec"])
    assert json.loads(run(bundle, text).stdout)["env"]["PYTHONPATH"] == f"{bundle}/runspec:/of/the/profile"


def test_a_job_submitted_from_within_another_is_none_of_its_parts(bundle: Path) -> None:
    outer = {"RUNSPEC_JOB_DIR": "/outer", "RUNSPEC_PUBLISHED_DIR": "/outer", "RUNSPEC_FRESH": "1"}
    outer["RUNSPEC_ENV_FILE"] = "env.example.toml"
    seen = json.loads(run(bundle, launch_script({}, python_path=["runspec"]), **outer).stdout)["env"]
    assert seen["RUNSPEC_JOB_DIR"] == str(bundle.parent)
    assert not {"RUNSPEC_PUBLISHED_DIR", "RUNSPEC_FRESH", "RUNSPEC_ENV_FILE"} & seen.keys()
    text = launch_script({"RUNSPEC_PUBLISHED_DIR": "/own"}, python_path=["runspec"], executor="ray")
    seen = json.loads(run(bundle, text, **outer).stdout)["env"]
    assert (seen["RUNSPEC_JOB_DIR"], seen["RUNSPEC_PUBLISHED_DIR"]) == ("/outer", "/own")


NODE = {"NODE_RANK": "1", "NUM_NODES": "2", "ATTEMPT": "7-2-1", "CPUS_PER_NODE": "16"}
SRUN = {
    "STEP_ID": "1", "NODEID": "1", "STEP_NUM_NODES": "2", "JOB_ID": "7", "RESTART_COUNT": "2", "CPUS_ON_NODE": "16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("executor", "set_before", "expected"),
    [
        ("slurm", {f"SLURM_{name}": value for name, value in SRUN.items()}, NODE),
        # Inside an allocation, but not under srun; what the variables say is of an outer job.
        ("slurm", {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "RUNSPEC_NODE_RANK": "3"}, {}),
        # A Ray that srun started hands all this on to its jobs, which are somewhere else.
        ("ray", {f"SLURM_{name}": value for name, value in SRUN.items()} | {"RUNSPEC_NUM_NODES": "2"}, {}),
        # A launcher of the user's own sets them itself.
        ("another", {f"RUNSPEC_{name}": value for name, value in NODE.items()} | {"SLURM_STEP_ID": "9"}, NODE),
    ],
)
def test_which_node_this_is(bundle: Path, executor: str, set_before: dict[str, str], expected: dict[str, str]) -> None:
    done = run(bundle, launch_script({}, python_path=["runspec"], executor=executor), **set_before)
    env = json.loads(done.stdout)["env"]
    assert {name: env[f"RUNSPEC_{name}"] for name in NODE if f"RUNSPEC_{name}" in env} == expected


def test_a_startup_command_that_fails_is_named(bundle: Path) -> None:
    done = run(bundle, launch_script({}, python_path=["runspec"], startup_commands=["false $SECRET"]), SECRET="canary")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "a startup command failed on" in done.stderr
    assert done.stderr.endswith(": false $SECRET\n")


@pytest.mark.parametrize("env", [{}, {"HF_TOKEN": ""}])
def test_a_secret_that_is_not_set_is_refused_by_name(bundle: Path, env: dict[str, str]) -> None:
    text = launch_script({}, python_path=["runspec"], secrets=["OTHER", "HF_TOKEN"])
    done = run(bundle, text, OTHER="canary", **env)
    assert done.returncode == 2
    assert done.stderr.startswith("error: HF_TOKEN, a secret of this job, is not set on ")
    assert run(bundle, text, OTHER="canary", HF_TOKEN="canary").returncode == 0


@pytest.mark.parametrize(
    ("keys", "code", "left"),
    [
        ({"startup_commands": ["false"]}, 2, "2\n"),
        ({"secrets": ["HF_TOKEN"]}, 2, "2\n"),
        ({"startup_commands": ["(kill $BASHPID)"]}, 143, None),  # a job that is told to leave
    ],
)
def test_a_node_that_refuses_tells_the_others(bundle: Path, keys: dict[str, Any], code: int, left: str | None) -> None:
    names = {f"RUNSPEC_{name}": value for name, value in NODE.items()}
    text = launch_script({}, python_path=["runspec"], executor="another", **keys)
    assert run(bundle, text, **names).returncode == code
    file = bundle.parent / ".node-7-2-1-1"
    assert (file.read_text(encoding="utf-8") if file.exists() else None) == left


def test_a_name_that_is_none() -> None:
    with pytest.raises(UserError, match="'A B' is not the name"):
        launch_script({"A B": "1"}, python_path=["runspec"])


def test_launch_json_comes_back(tmp_path: Path) -> None:
    launch = Launch("demo/train", "torchrun", "project/train.py", "train.yaml", processes_per_node=3)
    (tmp_path / "launch.json").write_text(launch_json(launch), encoding="utf-8")
    assert read_launch(tmp_path / "launch.json") == launch
    assert json.loads(launch_json(launch))["schema"] == 1


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"schema": 2}', '{"schema": 1, "launch": "mpi"}', '{"schema": 1, "launch": "ray", "x": 1}'],
)
def test_what_is_no_launch_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "launch.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="not a launch file of this version"):
        read_launch(tmp_path / "launch.json")
