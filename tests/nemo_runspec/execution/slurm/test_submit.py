"""What NeMo-Run is asked to submit: golden files of the whole submission, and what is refused before it."""

from __future__ import annotations

import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemo_runspec.execution.slurm import submit as slurm
from nemo_runspec.execution.slurm.preview import preview_text
from nemo_runspec.execution.slurm.remote import LocalShell, SshShell
from nemo_runspec.execution.slurm.submit import (
    SlurmJob,
    create_executor,
    how_to_follow,
    open_experiment,
    submission_text,
)
from nemo_runspec.installation import install_line
from nemo_runspec.profile import Env, SlurmSettings, Ssh

GOLDEN = Path(__file__).parents[1] / "golden"
SETTINGS = SlurmSettings(
    account="acct", partition="batch", gpus_per_node=0, processes_per_node=1, job_dir="/shared/jobs"
)
SSH = Ssh("login.example.com", "me", 2222, "/home/me/.ssh/cluster")
ENV = Env(
    profile="dgx",
    executor="slurm",
    secrets=("HF_TOKEN",),
    slurm=SETTINGS,
    output="/shared/output",
    artifacts="s3://bucket/artifacts",
)


def env_with(**keys: Any) -> Env:
    return replace(ENV, slurm=replace(SETTINGS, **keys))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    (folder / "project" / "src").mkdir(parents=True)
    (folder / "project" / "src" / "train.py").write_text("print()\n", encoding="utf-8")
    (folder / "launch.sh").write_text("exec true\n", encoding="utf-8")
    return folder


def submission(env: Env, bundle: Path, *names: str) -> str:
    run = pytest.importorskip("nemo_run")
    with open_experiment("demo", env, dry_run=True) as experiment:
        before: list[str] = []
        for name in names or ("train",):
            script = run.Script(path="launch.sh", entrypoint="bash")
            experiment.add(script, executor=create_executor(env, bundle, name), name=name, dependencies=before)
            before = [name]
        return submission_text(experiment, env) + "\n"


CASES = {
    "plain": env_with(),
    "gpus": env_with(
        nodes=4,
        gpus_per_node=8,
        processes_per_node=8,
        cpus_per_task=96,
        mem="512G",
        exclusive=True,
        time="04:00:00",
        qos="long",
        constraint="h100",
        signal="USR1@300",
        max_restarts=10,
    ),
    "container": env_with(container_image="nvcr.io/nvidia/nemo:25.04", mounts=("/data:/data",), gpus_per_node=8),
    "ssh": env_with(ssh=SSH, job_dir="/lustre/me/jobs", max_restarts=0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_submission_is_the_golden_one(name: str, bundle: Path) -> None:
    assert submission(CASES[name], bundle) == (GOLDEN / f"slurm_{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_without_nemo_run_a_dry_run_shows_what_it_would_be_told(name: str, bundle: Path) -> None:
    """Every line is one of the golden file, which NeMo-Run wrote, and of its own lines none is missing."""
    note, *lines = preview_text("demo", {"train": bundle}, CASES[name]).splitlines()
    assert note.startswith("# NeMo-Run is not installed here. Submitting needs it: pip install ")
    golden = (GOLDEN / f"slurm_{name}.txt").read_text(encoding="utf-8").splitlines()
    left_out = "# train_sbatch.sh, but for what NeMo-Run adds"
    assert [line for line in lines if line not in golden] == [left_out]
    ours = (
        "#SBATCH",
        "srun --output",
        "sbatch ",
        "exec ",
        "export MASTER",
        "scontrol",
        "project/",
        "launch.sh",
        "mkdir",
    )
    assert [line for line in golden if line.startswith(ours)] == [line for line in lines if line.startswith(ours)]


def test_without_nemo_run_the_jobs_of_a_pipeline_wait_for_each_other(bundle: Path) -> None:
    text = preview_text("demo", {"prep": bundle, "train": bundle}, ENV)
    assert "sbatch --requeue --parsable /shared/jobs/experiments/demo/demo_<id>/prep_sbatch.sh\n" in text
    assert "sbatch --requeue --parsable --dependency=afterok:<id of prep> /shared" in text


def test_a_cluster_without_accounts(bundle: Path) -> None:
    text = submission(env_with(account=None), bundle)
    assert "--account" not in text and "#SBATCH --job-name=train\n" in text


def test_the_jobs_of_a_pipeline_wait_for_each_other(bundle: Path) -> None:
    text = submission(ENV, bundle, "prep", "train")
    assert "sbatch --requeue --parsable /shared/jobs/experiments/demo/demo_<id>/prep_sbatch.sh\n" in text
    assert "sbatch --requeue --parsable --dependency=afterok:<id of prep> " in text
    assert text.count("#SBATCH --kill-on-invalid-dep=yes") == 2


def test_the_batch_script_is_bash(bundle: Path, tmp_path: Path) -> None:
    for env in CASES.values():
        text = submission(env, bundle)
        script = text[text.index("#!/bin/bash") : text.index("# launch.sh, run on each node")]
        (tmp_path / "script").write_text(script, encoding="utf-8")
        subprocess.run(["bash", "-n", str(tmp_path / "script")], check=True)


@pytest.mark.parametrize(
    ("code", "count", "state", "requeued"),
    [
        (143, "", "RUNNING", True),
        (143, "1", "RUNNING", True),
        (143, "2", "RUNNING", False),
        (143, "", "CANCELLED", False),
        (143, "", "COMPLETING", False),
        (1, "", "RUNNING", False),
        (0, "", "RUNNING", False),
    ],
)
def test_only_a_saved_checkpoint_is_requeued(tmp_path: Path, code: int, count: str, state: str, requeued: bool) -> None:
    """The lines themselves, in bash, with a pretended scontrol."""
    answer = f'[ "$1" = show ] && echo "JobId=7 JobState={state} Reason=None" || echo "$@" >> {tmp_path}/said'
    (tmp_path / "scontrol").write_text(f"#!/bin/bash\n{answer}\n", encoding="utf-8")
    (tmp_path / "scontrol").chmod(0o755)
    before = f"head_node=n1 head_node_ip='10.0.0.1 10.0.1.1'\n{slurm.setup_lines(2)}\n"
    script = f"{before}\necho $MASTER_ADDR $MASTER_PORT\nexit {code}"
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"} | ({"SLURM_RESTART_COUNT": count} if count else {})
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == code
    address, port = done.stdout.split()
    assert address == "10.0.0.1"
    assert 20007 <= int(port) < 20100
    said = (tmp_path / "said").read_text(encoding="utf-8").splitlines()
    assert said == ["update JobId=7 Requeue=0", *(["update JobId=7 Requeue=1", "requeue 7"] if requeued else [])]


@pytest.mark.parametrize(
    ("left", "code"),
    [
        ({"7-1-1-1": "143"}, 143),  # the first node was told to leave before it had begun
        ({"7-1-1-0": "143", "7-1-1-1": "1"}, 143),  # failed once the first one had left
        ({"7-0-1-1": "2", "70-1-1-1": "2"}, 143),  # of an earlier start, and of another job
        ({"7-1-1-1": "2", "7-1-1-2": "1"}, 2),
        ({"7-1-1-0": "1", "7-1-1-1": "143"}, 1),
        ({"7-1-1-3": "2\n", "7-1-1-10": "143"}, 2),
    ],
)
def test_nodes_that_are_stopped_because_another_one_failed_are_not_started_again(
    tmp_path: Path, left: dict[str, str], code: int
) -> None:
    """srun says 143 of them, its highest; what each of the nodes left says more."""
    for name, text in left.items():
        (tmp_path / f".node-{name}").write_text(text, encoding="utf-8")
    job = f"JobId=7 JobState=RUNNING StdErr=/else/where/err StdOut={tmp_path}/sbatch_train_%j.out Power="
    scontrol = f"scontrol() {{ [ $1 = show ] && echo '{job}' || echo $* >> {tmp_path}/said; }}"
    script = f"{scontrol}\nhead_node=n1 head_node_ip=10.0.0.1\nset -e\n{slurm.setup_lines(2)}\nexit 143"
    env = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    assert subprocess.run(["bash", "-c", script], env=env, capture_output=True).returncode == code
    assert ("requeue 7" in (tmp_path / "said").read_text(encoding="utf-8")) == (code == 143)


def test_the_port_is_one_that_nobody_listens_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lines = slurm.setup_lines(0).replace("20000 + SLURM_JOB_ID % 10000", str(port))
        script = f"scontrol() {{ :; }}\nhead_node=n1 head_node_ip=10.0.0.1\n{lines}\necho $MASTER_PORT"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
        assert int(done.stdout) > port


def test_what_is_printed_after_a_submission() -> None:
    job = SlurmJob("17", "train", "/shared/jobs/x/train", 3, LocalShell())
    assert how_to_follow([job]) == (
        "train: job 17\n"
        "  log      /shared/jobs/x/train/log-train_17_0.out\n"
        "  follow   tail -F /shared/jobs/x/train/log-train_17_0.out\n"
        "  inspect  sacct -j 17 --format=JobID,State,ExitCode,Elapsed,NodeList\n"
        "  cancel   scancel 17"
    )
    far = replace(job, shell=SshShell(SSH))
    assert "  cancel   ssh -p 2222 -i /home/me/.ssh/cluster me@login.example.com scancel 17" in how_to_follow([far])


def test_without_nemo_run_one_line_says_how_to_get_it(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "NEMO_RUN", "nemo_run_that_is_not_there")
    with pytest.raises(UserError) as error:
        create_executor(ENV, bundle, "train")
    assert error.value.message == "profile dgx: executor slurm needs NeMo-Run, which is not installed"
    assert error.value.hint == install_line("launch")


@pytest.mark.parametrize(
    ("env", "programs", "said"), [(ENV, [], True), (ENV, ["sbatch"], False), (CASES["ssh"], [], False)]
)
def test_a_dry_run_says_that_nothing_can_be_submitted_from_here(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    env: Env,
    programs: list[str],
    said: bool,
) -> None:
    for name in programs:
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    preview_text("demo", {"train": bundle}, env)
    assert ("no program sbatch here: submit on a login node" in capsys.readouterr().err) is said


def test_the_preview_refuses_what_nemo_run_would(bundle: Path) -> None:
    with pytest.raises(UserError, match="NeMo-Run cannot work with"):
        preview_text("demo", {"train": bundle}, env_with(job_dir="/a b/jobs"))
    with pytest.raises(UserError, match="NeMo-Run has a use of its own for /nemo_run"):
        preview_text("demo", {"train": bundle}, env_with(job_dir="/lustre/nemo_run"))
    in_container = env_with(job_dir="/lustre/nemo_run", container_image="nvcr.io/nvidia/nemo:25.04")
    assert "/lustre/nemo_run/experiments/demo" in preview_text("demo", {"train": bundle}, in_container)


@pytest.mark.parametrize("path", ["/a b/jobs", "/it's/jobs", "/$HOME/jobs"])
def test_a_job_folder_that_nemo_run_cannot_quote(bundle: Path, path: str) -> None:
    pytest.importorskip("nemo_run")
    with pytest.raises(UserError, match="NeMo-Run cannot work with"):
        create_executor(env_with(job_dir=path, ssh=SSH), bundle, "train")
