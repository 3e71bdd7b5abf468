"""examples/forks/skypilot: the command file works in its place, with a stand-in for `sky` that logs its calls."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_runspec.errors import Interrupted, UserError
from nemo_runspec.execution.place import Place, place
from nemo_runspec.profile import Env, parse_env

ROOT = Path(__file__).resolve().parents[2]
FORK = ROOT / "examples/forks/skypilot"
ENV_TOML = """
[sky]
executor = "skypilot"
infra = "aws"
artifacts = "/shared/artifacts"
remote_folders = ["/shared"]
gpu = "H100"
gpus_per_node = 8
nodes = 2
cpus = "16+"
secrets = ["HF_TOKEN"]
"""
Nemotron = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def fork() -> Any:
    """The command file as a module."""
    spec = importlib.util.spec_from_file_location("fork_of_pretrain", FORK / "pretrain.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic looks for the module of a class
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources after the command of the page."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("src", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (command,) = re.findall(r"^cp .*$", (FORK / "README.md").read_text(), re.MULTILINE)
    subprocess.run(command, shell=True, cwd=folder, check=True)
    return folder


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `sky` that ends with the exit code in `COMMAND.code`, and sleeps where that says so. Returns its log."""
    program = tmp_path / "bin" / "sky"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/bash\necho "$*" >> {tmp_path}/calls\n'
        f"[ -e {tmp_path}/$1.sleeps ] && sleep 60\nexit $(cat {tmp_path}/$1.code 2>/dev/null || echo 0)\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return tmp_path / "calls"


@pytest.fixture
def nemotron(project: Path, tmp_path: Path, calls: Path) -> Nemotron:
    """`nemotron nano3 pretrain -c tiny …` of the project, or another step, in a folder with env.toml."""

    def run(
        *words: str, step: str = "pretrain", profiles: str = ENV_TOML, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "env.toml").write_text(profiles)
        code = "from nemotron.cli.main import main; main()"
        command = [sys.executable, "-c", code, "nano3", *step.split(), "-c", "tiny", *words]
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RUNSPEC_", "NEMOTRON_"))}
        env = kept | {"PYTHONPATH": str(project / "src"), "HF_TOKEN": "canary-1"} | variables
        done = subprocess.run(
            command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
        assert "canary-1" not in done.stdout + done.stderr
        return done

    return run


def test_a_dry_run_shows_the_task_and_starts_nothing(nemotron: Nemotron, calls: Path, fork: Any) -> None:
    done = nemotron("--run", "sky", "--dry-run")
    assert done.returncode == 0, done.stderr
    shown = "cpus = 16+, gpu = H100, gpus_per_node = 8, infra = aws, nodes = 2, processes_per_node = 8"
    assert f"runs on   skypilot, {shown}\n" in done.stdout
    command, task, launch = re.split(r"\n# (?:task\.yaml|launch\.sh, run on each node)\n", done.stdout)[-3:]
    words = "--yes --detach-run --cluster nano3-pretrain-tiny-[0-9a-f]{6} --idle-minutes-to-autostop 10 --down"
    assert re.search(rf"^sky launch {words} --secret HF_TOKEN /.*/task\.yaml$", command, re.M)
    told = yaml.safe_load(task)
    assert told.pop("run") == fork.RUN
    assert told.pop("workdir").endswith("/code")
    assert told == {
        "name": "nano3-pretrain-tiny",
        "num_nodes": 2,
        "resources": {"infra": "aws", "accelerators": "H100:8", "cpus": "16+"},
    }
    assert 'RUNSPEC_OUTPUT_ROOT="~/nemotron-output"' in launch.replace("'", '"')
    assert not calls.exists()


def test_a_job_is_submitted_followed_and_its_machines_are_given_back(nemotron: Nemotron, calls: Path) -> None:
    assert nemotron("--run", "sky").returncode == 0
    launch, logs, down = calls.read_text().splitlines()
    (cluster,) = re.findall(r"--cluster (\S+)", launch)
    assert (logs, down) == (f"logs --tail 0 {cluster} 1", f"down --yes {cluster}")
    done = nemotron("--batch", "sky")
    assert done.returncode == 0 and "follow   sky logs nano3-pretrain-tiny-" in done.stdout
    assert [line.split()[0] for line in calls.read_text().splitlines()] == ["launch", "logs", "down", "launch"]


def test_no_machines(nemotron: Nemotron, tmp_path: Path) -> None:
    (tmp_path / "launch.code").write_text("1")
    done = nemotron("--run", "sky")
    assert done.returncode == 1 and "error: sky launch ended with exit code 1" in done.stderr
    assert "give it back: sky down nano3-pretrain-tiny-" in done.stderr


def test_without_a_profile_it_runs_here(nemotron: Nemotron) -> None:
    done = nemotron("--dry-run")
    assert done.returncode == 2 and "make it: nemotron nano3 data prep pretrain -c tiny" in done.stderr


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        ('artifacts = "s3://b/a"\ngpus_per_node = 8', "8 GPUs a node, and nothing says of which type"),
        ("gpus_per_node = 0", "go away with what is published on them"),
        ('artifacts = "~/a"\ngpus_per_node = 0', "must be an absolute path"),
        ('artifacts = "s3://b/a"\npartition = "x"', "partition = 'x': Extra inputs are not permitted"),
        ('artifacts = "s3://b/a"\ninfra = "a b"', "infra = 'a b': String should match pattern"),
    ],
)
def test_mistakes_in_a_profile(
    fork: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.toml").write_text(f'[sky]\nexecutor = "skypilot"\n{profile}\n')
    with pytest.raises(UserError, match=re.escape(says)):
        env = parse_env("sky", executors=("local", "skypilot"))
        fork.read_settings(env)
        fork.with_roots(env)


def test_other_executors_are_refused(nemotron: Nemotron) -> None:
    done = nemotron("--run", "dgx", "--dry-run", profiles='[dgx]\nexecutor = "slurm"\n')
    assert done.returncode == 2 and "executor = 'slurm': must be one of local, skypilot" in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_a_folder_is_the_registry_only_where_all_machines_mount_it(fork: Any) -> None:
    """The hint of the refusal, followed."""
    env = Env("sky", "skypilot", artifacts="/a/b")
    with pytest.raises(UserError, match="go away with what is published on them, in /a/b") as refusal:
        fork.with_roots(env)
    line = re.findall(r"remote_folders = .*$", refusal.value.hint or "")[0]
    marked = replace(env, remote_folders=tuple(tomllib.loads(line)["remote_folders"]))
    assert fork.with_roots(marked).artifacts == "/a/b"
    with pytest.raises(UserError):
        fork.with_roots(replace(marked, artifacts="/a/bc"))


def test_sky_is_not_installed(nemotron: Nemotron) -> None:
    done = nemotron("--run", "sky", PATH="/usr/bin:/bin")
    assert done.returncode == 2
    assert "error: profile sky: executor skypilot needs the program sky, which is not installed" in done.stderr


def test_the_profile_of_the_page(nemotron: Nemotron) -> None:
    """Its commands reach launch.sh, and what they name is in the bundle; without `sky`, the dry run says so."""
    page = (FORK / "README.md").read_text()
    (text,) = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (url,) = re.findall(r'"(s3://.*?)"', text)
    profiles = text.replace(url, "/shared").replace("[sky]\n", '[sky]\nremote_folders = ["/shared"]\n')
    done = nemotron("--run", "sky", "--dry-run", profiles=profiles, PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert "# the program sky is not installed here. Submitting needs it: pipx install" in done.stdout
    commands = tomllib.loads(text)["sky"]["startup_commands"]
    assert "\n".join(commands) in done.stdout
    constraints, folder, extras = re.findall(r"-c project/(\S+) '\./(\w+)\[(.*)\]'", "\n".join(commands))[0]
    assert (ROOT / constraints).is_file() and folder == "project"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    # The data that the job reads.
    assert re.findall(r"^nemotron .*", page, re.MULTILINE) == ["nemotron nano3 data prep pretrain -c tiny --run bucket"]
    done = nemotron("--run", "bucket", "--dry-run", step="data prep pretrain", profiles=profiles)
    assert done.returncode == 0, done.stderr


def test_another_key(fork: Any) -> None:
    """The two changes that the page names bring `use_spot` into the task."""
    page = (FORK / "README.md").read_text()
    (field,) = re.findall(r"`(use_spot: bool = .*?)`", page)
    (entry,) = re.findall(r'`("use_spot": .*?)`', page)
    source = (FORK / "pretrain.py").read_text()
    source = source.replace("    idle_minutes: int", f"    {field}\n    idle_minutes: int")
    source = source.replace('        "cpus": sky.cpus,', f'        "cpus": sky.cpus,\n        {entry},')
    module = types.ModuleType(fork.__name__)
    exec(compile(source, "pretrain.py", "exec"), module.__dict__)
    for table, expected in (({"use_spot": True}, {"use_spot": True}), ({}, {})):
        settings = module.read_settings(Env("sky", "skypilot", table=table))
        assert yaml.safe_load(module.task_yaml(settings, "demo", Path("/b")))["resources"] == expected


def test_what_a_node_runs(fork: Any, tmp_path: Path) -> None:
    """All nodes have one address, that of the first node, and each knows which it is."""
    (tmp_path / "launch.sh").write_text(
        'echo "$MASTER_ADDR:$RUNSPEC_NODE_RANK:$RUNSPEC_NUM_NODES:$RUNSPEC_ATTEMPT"; exit 3'
    )
    sky = {"NODE_IPS": "10.0.0.1\n10.0.0.2", "TASK_ID": "sky-2026_demo_1", "NODE_RANK": "1", "NUM_NODES": "2"}
    environment = os.environ | {f"SKYPILOT_{name}": value for name, value in sky.items()}
    done = subprocess.run(["bash", "-c", fork.RUN], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip().split(":") == ["10.0.0.1", "1", "2", "sky-2026_demo_1"]
    assert done.returncode == 3


def test_where_this_node_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NODE_RANK": "1", "NUM_NODES": "2", "ATTEMPT": "sky-2026_demo_1"}.items():
        monkeypatch.setenv(f"RUNSPEC_{name}", value)
    assert place() == Place(1, 2, "sky-2026_demo_1")


@pytest.mark.parametrize(
    ("code", "ours", "says", "gives_back"),
    [
        (0, 0, "", True),
        (100, 1, "the job of demo-1 failed", True),
        (103, 1, "cancelled by somebody else", True),
        (1, 1, "sky logs ended with exit code 1, not the job", False),
    ],
)
def test_following_ends_with_the_job(
    fork: Any,
    calls: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    code: int,
    ours: int,
    says: str,
    gives_back: bool,
) -> None:
    (tmp_path / "logs.code").write_text(str(code))
    assert fork.follow("demo-1") == ours
    assert says in capsys.readouterr().err
    assert calls.read_text().splitlines() == ["logs --tail 0 demo-1 1", *["down --yes demo-1"] * gives_back]


@pytest.mark.parametrize(
    ("number", "times", "code", "calls_down"), [(signal.SIGTERM, 1, 143, False), (signal.SIGINT, 2, 130, True)]
)
def test_signals(calls: Path, tmp_path: Path, number: int, times: int, code: int, calls_down: bool) -> None:
    """SIGTERM leaves the job alone; without a terminal the second Ctrl-C cancels it."""
    (tmp_path / "logs.sleeps").touch()
    program = "import sys; from pretrain import follow; sys.exit(follow('demo-1'))"
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{FORK}"}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdin=subprocess.DEVNULL)
    while not calls.exists():
        time.sleep(0.05)
    for _ in range(times):
        time.sleep(0.5)
        process.send_signal(number)
    assert process.wait(20) == code
    assert ("down --yes demo-1" in calls.read_text().splitlines()) is calls_down


def test_ctrl_c_while_machines_are_looked_for(fork: Any, monkeypatch: pytest.MonkeyPatch, calls: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(Interrupted, match="demo-1 may be on its way up"):
        fork.launch(["sky", "launch"], "demo-1", Env("sky", "skypilot"))
