"""Ray on this machine: data on two nodes of a Slurm job, and jobs for a cluster that exists."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_runspec.artifacts import Registry
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer

from .desk import Desk
from .ray_cluster import RayCluster
from .slurm import Slurm

# Some ten tasks for the engine: no standard library, a small vocabulary.
QUICK = ("stdlib.enabled=false", "tasks.num_tasks=60000", "tokenizer.vocab_size=400", "curation.evaluation_tasks=20")
BEGINS = "import time\nprint('begun', flush=True)\ntime.sleep(300)\n"


def digest(output: Path, name: str) -> str:
    return Registry(output / "artifacts").resolve(name).digest


# --- In a Slurm job ---------------------------------------------------------------------------------------------------


@pytest.fixture
def scratch(desk: Desk) -> Iterator[Path]:
    """The TMPDIR of commands and their jobs, with a short path, as a socket's must be; nothing may be left in it."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        desk.env["TMPDIR"] = folder
        yield Path(folder)
        processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert [line for line in processes.splitlines() if f"{folder}/" in line] == []
        assert list(Path(folder).iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("step", ["tokenize", "pack"])
@pytest.mark.usefixtures("scratch")
def test_shards_written_on_two_nodes_are_those_of_one_process(desk: Desk, tmp_path: Path, step: str) -> None:
    (tmp_path / "mine").mkdir()
    for name in "abc":
        with (tmp_path / "mine" / f"{name}.jsonl").open("w") as file:
            for i in range(1000):
                turns = [
                    {"role": "user", "content": f"What is {i} and {name}?"},
                    {"role": "assistant", "content": f"It is {name}{i}. " * (i % 20 + 1)},
                ]
                file.write(json.dumps({"text": turns[1]["content"], "messages": turns}) + "\n")
    tokenizer = train_tokenizer(["It is what it is."], 280)
    save_tokenizer(tokenizer, tmp_path / "tokenizer", model_max_length=1024, template="nano3")
    words = [f"sources=[{tmp_path}/mine]", f"tokenizer={tmp_path}/tokenizer", "shard_bytes=65536"]
    desk.run(f"nemotron data {step} -c own", *words, RUNSPEC_OUTPUT_ROOT=str(tmp_path / "here"))
    printed = desk.run(f"nemotron data {step} -c own --run slurm run.env.cpus_per_task=2", *words)
    assert "4 CPUs on 2 nodes" in printed
    assert digest(desk.output, f"{step}-data-own") == digest(tmp_path / "here", f"{step}-data-own")


@pytest.mark.slow
@pytest.mark.usefixtures("scratch")
def test_the_exit_code_of_the_script_is_that_of_the_step(desk: Desk) -> None:
    script = desk.script("import os, sys; print('at', os.environ['RAY_ADDRESS'], flush=True); sys.exit(2)", "ray")
    assert re.search(r"^at \S+:\d+$", desk.run(f"nemo-runspec run {script} --run slurm", code=2), re.M)


@pytest.mark.slow
@pytest.mark.parametrize("number", ["USR1", "TERM"])
@pytest.mark.usefixtures("scratch")
def test_a_signal_reaches_the_script_and_nothing_survives(desk: Desk, slurm: Slurm, number: str) -> None:
    attached = desk.start("nemotron nano3 data prep pretrain -c tiny --run slurm run.env.max_restarts=0")
    attached.until("data/prep/pretrain: curate")
    time.sleep(1)
    slurm.run(f"scancel --signal={number} {attached.job}")
    printed = attached.end(143)
    errors = [line for line in printed.splitlines() if line.startswith("error: stopped")]
    # SIGTERM ends Ray too, which may end the script before it can say anything; then the node says it.
    expected = [f"error: stopped by SIG{number}", "error: stopped by SIGTERM, and Ray with it"]
    assert errors and errors == [line for line in expected[: 1 + (number == "TERM")] if line in errors]
    assert "Traceback" not in printed
    assert not list((desk.output / "artifacts").glob("nano3-*/*"))


# --- On a cluster that exists -----------------------------------------------------------------------------------------


@pytest.fixture
def ray_desk(ray_cluster: RayCluster, tmp_path: Path) -> Desk:
    """A desk whose profile `cluster` is the Ray cluster; the address in its environment is of some other one."""
    desk = Desk(tmp_path / "desk", ray_cluster.env | {"RAY_ADDRESS": "http://127.0.0.1:1"})
    del desk.env["RAY_API_SERVER_ADDRESS"]
    desk.profile("cluster", executor="ray", address=ray_cluster.address, env={"PLAIN": "it's"})
    return desk


BEGINS = "import time\nprint('begun', flush=True)\ntime.sleep(300)\n"
TASKS = """
import os
import ray
from there import double

ray.init(log_to_driver=False)
remote = ray.remote(double)
print("results", sum(ray.get([remote.remote(i) for i in range(20)])), flush=True)
print("cluster has", ray.get(ray.remote(lambda: os.environ.get("CLUSTER_TEST_SECRET", "nothing")[:0] + "it").remote()))
print("folder", os.environ["RUNSPEC_JOB_DIR"])
"""


def test_a_job_runs_with_the_code_that_travelled_and_its_log_is_shown(ray_cluster: RayCluster, ray_desk: Desk) -> None:
    module = "import os\n\ndef double(i):\n    assert os.environ['PLAIN'] == \"it's\"\n    return 2 * i\n"
    (ray_desk.folder / "toy" / "there.py").write_text(module)
    name, value = ray_cluster.secret
    ray_desk.profile("secret", extends="cluster", secrets=[name])
    printed = ray_desk.run(f"nemo-runspec run {ray_desk.script(TASKS, 'ray')} --run secret", HF_TOKEN="canary-of-mine")
    assert "results 380\n" in printed and "cluster has it\n" in printed
    last = re.fullmatch(r"job (toy-job-\S+) succeeded", printed.splitlines()[-1])
    assert last and f"folder {ray_desk.output}/jobs/{last[1]}\n" in printed
    # What everybody sees who can see the dashboard: no secret of ours, none of the cluster's.
    shown = json.dumps(ray_cluster.get("/api/jobs/")) + json.dumps(ray_cluster.get(f"/api/jobs/{last[1]}"))
    assert last[1] in shown
    for secret in ("canary-of-mine", value):
        assert secret not in shown + printed


@pytest.mark.parametrize(("how", "code"), [("sys.exit(2)", 2), ("sys.exit(143)", 143), ("1 / 0", 1)])
def test_the_exit_code_is_the_script_s_own(ray_desk: Desk, how: str, code: int) -> None:
    script = ray_desk.script(f"import sys\nprint('begun', flush=True)\n{how}\n", "direct")
    printed = ray_desk.run(f"nemo-runspec run {script} --run cluster", code=code)
    assert "begun\n" in printed and re.search(r"^error: job \S+ failed with exit code", printed, re.M)


def test_a_secret_that_the_cluster_lacks_is_refused_by_name(ray_desk: Desk) -> None:
    ray_desk.profile("secret", extends="cluster", secrets=["ANOTHER_TOKEN"])
    printed = ray_desk.run(f"nemo-runspec run {ray_desk.script('print(0, chr(33))', 'direct')} --run secret", code=2)
    assert "error: ANOTHER_TOKEN, a secret of this job, is not set on" in printed and "0 !" not in printed


@pytest.mark.slow
def test_the_command_runs_on_the_cluster_and_the_digest_is_that_of_one_process(ray_desk: Desk, tmp_path: Path) -> None:
    printed = ray_desk.run("nemotron nano3 data prep pretrain -c tiny --run cluster", *QUICK)
    assert "4 CPUs on 1 node\n" in printed
    here = {"RUNSPEC_OUTPUT_ROOT": str(tmp_path / "here"), "RAY_ADDRESS": ""}
    ray_desk.run("nemotron nano3 data prep pretrain -c tiny", *QUICK, **here)
    assert digest(ray_desk.output, "nano3-pretrain-data-tiny") == digest(tmp_path / "here", "nano3-pretrain-data-tiny")


@pytest.mark.slow
def test_ctrl_c_twice_cancels_and_sigterm_only_leaves(ray_cluster: RayCluster, ray_desk: Desk) -> None:
    line = f"nemo-runspec run {ray_desk.script(BEGINS, 'direct')} --run cluster"
    left = ray_desk.start(line)
    left.until("begun")
    left.process.send_signal(signal.SIGTERM)
    printed = left.end(143)
    assert re.search(r"job \S+ not cancelled", printed) and "Traceback" not in printed
    # The commands that it prints work in another shell.
    commands = dict(re.findall(r"^  (inspect|cancel) +ray (.*)$", printed, re.M))
    for command, state in (("inspect", "RUNNING"), ("cancel", "STOPPED"), ("inspect", "STOPPED")):
        words = [sys.executable, "-m", "ray.scripts.scripts", *commands[command].split()]
        shown = subprocess.run(words, env=ray_cluster.env, capture_output=True, text=True)
        assert state in (shown.stdout + shown.stderr).upper()

    attached = ray_desk.start(line)
    attached.until("begun")
    attached.process.send_signal(signal.SIGINT)
    attached.until("not cancelled; once more cancels")
    attached.process.send_signal(signal.SIGINT)
    printed = attached.end(130)
    assert re.search(r"^error: job \S+ cancelled$", printed, re.M) and "Traceback" not in printed


def test_nothing_at_the_address_is_one_line(ray_desk: Desk) -> None:
    line = f"nemo-runspec run {ray_desk.script(BEGINS, 'direct')} --run cluster run.env.address=http://127.0.0.1:1"
    error = "error: profile cluster: executor ray: nothing answers at http://127.0.0.1:1: Conn"
    assert ray_desk.run(line, code=2).splitlines()[-1].startswith(error)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no Ray cluster answers there: Connection refused"),
        ("http://127.0.0.1:8265", "jobs are submitted there, a script cannot join there"),
    ],
)
def test_a_ray_address_that_cannot_be_joined_is_refused_by_the_script(
    ray_desk: Desk, address: str, message: str
) -> None:
    printed = ray_desk.run("nemotron nano3 data prep pretrain -c tiny", *QUICK, code=2, RAY_ADDRESS=address)
    assert printed.splitlines()[-2] == f"error: RAY_ADDRESS={address}: {message}"
