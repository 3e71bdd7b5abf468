"""Scripts submitted to a real Slurm with two nodes, as a command file submits them, with real signals and failures."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .slurm import Slurm, wait_for
from .sshd import LoginNode

SRC = Path(__file__).parents[2] / "src"
SECRET = "canary-4711 'quoted' $HOME\nsecond line"
NASTY = "a b$HOME 'q' \"d\" `x` \\n"

HELLO = """
import os, sys
rank, size = os.environ.get("RANK", "-"), os.environ.get("WORLD_SIZE", "-")
secret = "".join(reversed(os.environ["MY_SECRET"]))
line = f"rank {rank}/{size} on {os.uname().nodename} {os.environ['NASTY']} {secret!r}"
# In one write each: print() makes two of it, and the lines of several ranks run into each other.
os.write(1, (line + os.linesep).encode())
os.write(1, f"gpus {os.environ.get('CUDA_VISIBLE_DEVICES')}{os.linesep}".encode())
"""

# Ends with CODE, as a script of ours does.
ENDS = """
import os, sys
from nemo_runspec.errors import run_main
sys.exit(run_main(lambda: int(os.environ["CODE"])))
"""

# The other ranks leave at once when a signal comes; rank 0 takes its time to save. Started again, it finds that.
SAVES = """
import os, signal, sys, time
from pathlib import Path
from nemo_runspec.errors import Preempted, end_on_signals, run_main
end_on_signals()
rank, saved, got = os.environ.get("RANK", "0"), Path(os.environ["RUNSPEC_JOB_DIR"]) / "saved", []
def main():
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, frame: got.append(n))
    if saved.exists():
        print(f"rank {rank} goes on from {saved.read_text()}", flush=True)
        return 0
    print(f"rank {rank} started", flush=True)
    while not got:
        time.sleep(0.05)
    if rank == "0":
        time.sleep(5)
        saved.write_text("step 7")
    raise Preempted(saved)
sys.exit(run_main(main))
"""

SLEEPS = "import time; print('started', flush=True); time.sleep(300)"


class Submitter:
    """Runs submit.py as a user's command, with a home of its own below `folder`."""

    def __init__(self, folder: Path, slurm: Slurm, startup_command: str) -> None:
        self.folder, self.slurm = folder, slurm
        self.env = slurm.env | {
            "PYTHONPATH": str(SRC),
            "RUNSPEC_ENV_FILE": str(folder / "env.toml"),
            "RUNSPEC_OUTPUT_ROOT": str(folder / "out"),
            "HOME": str(folder / "home"),
            "MY_SECRET": SECRET,
        }
        self.profile("slurm", startup_command=startup_command)

    def profile(self, name: str, startup_command: str | None = None, **keys: object) -> None:
        """Add a profile to env.toml; every other one extends `slurm`."""
        if startup_command is not None:
            keys = {
                "executor": "slurm", "account": "test", "partition": "batch", "nodes": 2, "gpus_per_node": 0,
                "time": "10", "startup_commands": [startup_command], "env": {"NASTY": NASTY}, "secrets": ["MY_SECRET"],
            }  # fmt: skip
        else:
            keys["extends"] = "slurm"
        with (self.folder / "env.toml").open("a", encoding="utf-8") as file:
            file.write(f"\n[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in keys.items()))

    def command(self, **options: object) -> list[str]:
        return [sys.executable, str(Path(__file__).parent / "submit.py"), json.dumps({"profile": "slurm", **options})]

    def run(self, env: dict[str, str] | None = None, **options: object) -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        return subprocess.run(
            self.command(**options), env=self.env | (env or {}), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=240, cwd=self.folder,
        )  # fmt: skip

    def start(self, env: dict[str, str] | None = None, **options: object) -> Attached:
        return Attached(self.command(**options), self.env | (env or {}), self.folder)


class Attached:
    """A command that follows its job, with all that it prints in `text`."""

    def __init__(self, command: list[str], env: dict[str, str], folder: Path) -> None:
        self.log = folder / "attached.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder
            )

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    @property
    def job(self) -> str:
        found = re.search(r"^job (\d+) ", self.text, re.M)
        assert found, self.text
        return found[1]

    def until(self, said: str) -> None:
        def seen() -> bool:
            assert self.process.poll() is None or said in self.text, self.text
            return said in self.text

        wait_for(said, seen, 60)

    def end(self) -> int:
        return self.process.wait(120)


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {json.dumps(text)}" for key, text in value.items()) + " }"
    return json.dumps(value)


@pytest.fixture
def submit(slurm: Slurm, tmp_path: Path, startup_command: str) -> Submitter:
    return Submitter(tmp_path, slurm, startup_command)


def lines(text: str) -> list[str]:
    return [re.sub(r"\bjob \d+", "job N", line) for line in text.splitlines()]


def files_with(text: str, *folders: Path) -> list[Path]:
    needle = text.splitlines()[0].encode()
    found = [file for folder in folders for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    return [file for file in found if needle in file.read_bytes()]


# -- to the end


@pytest.mark.slow
def test_torchrun_over_two_nodes(submit: Submitter, tmp_path: Path) -> None:
    """Ranks over nodes, variables with any text, secrets that arrive but are written nowhere, GPUs, states."""
    submit.profile("gpus", gpus_per_node=2, cpus_per_task=3)
    done = submit.run(profile="gpus", script=HELLO)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    secret = repr("".join(reversed(SECRET)))
    assert printed == [f"rank {rank}/4 on node{rank // 2 + 1} {NASTY} {secret}" for rank in range(4)]
    assert done.stdout.count("gpus 0,1") == 4
    said = lines(done.stderr)
    assert [line for line in said if "pending" not in line] == [
        "job N (toy) running on node[1-2]",
        "job N (toy) completed",
    ]
    assert files_with(SECRET, tmp_path) == []
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("launch", "code", "expected"),
    [
        ("torchrun", 2, 2),
        pytest.param("torchrun", 130, 130, marks=pytest.mark.slow),
        ("direct", 1, 1),
        pytest.param("direct", 7, 1, marks=pytest.mark.slow),
    ],
)
def test_the_script_s_exit_code_is_the_command_s(submit: Submitter, launch: str, code: int, expected: int) -> None:
    done = submit.run(script=ENDS, launch=launch, env={"CODE": str(code)})
    assert done.returncode == expected, done.stdout + done.stderr
    assert f"error: job N (toy) failed with exit code {expected}" in lines(done.stderr)
    log = re.search(r"^log: (.*)$", done.stderr, re.M)
    assert log and Path(log[1]).is_file()


@pytest.mark.slow
def test_the_jobs_of_a_pipeline_run_in_order_and_end_at_the_first_failure(submit: Submitter, slurm: Slurm) -> None:
    done = submit.run(script=HELLO, launch="direct", jobs=("a", "b"))
    assert done.returncode == 0, done.stderr
    ends = [line for line in lines(done.stderr) if "completed" in line]
    assert ends == ["job N (a) completed", "job N (b) completed"]
    done = submit.run(script=ENDS, launch="direct", jobs=("a", "b", "c"), env={"CODE": "2"})
    assert done.returncode == 2
    assert "cancelled behind it: b, c; log: " in done.stderr
    first = int(re.findall(r"job (\d+) \(a\)", done.stderr)[0])
    for behind in (first + 1, first + 2):
        assert slurm.wait_state(str(behind), ("CANCELLED", "COMPLETED", "FAILED")) == "CANCELLED"


# -- not to the end


@pytest.mark.slow
def test_a_request_to_save_requeues_and_the_job_goes_on(submit: Submitter, slurm: Slurm) -> None:
    """`scancel --signal` reaches every process, and node2 is done seconds before rank 0 has saved."""
    attached = submit.start(script=SAVES)
    attached.until("rank 1 started")
    attached.until("rank 0 started")
    slurm.run(f"scancel --signal=USR1 {attached.job}")
    assert attached.end() == 0, attached.text
    said = lines(attached.text)
    assert "job N (toy) requeued: restart 1 of 3" in said
    assert {"rank 0 goes on from step 7", "rank 1 goes on from step 7"} <= set(said)
    assert slurm.scontrol(attached.job)["Restarts"] == "1"


@pytest.mark.slow
def test_the_time_limit_requeues_too(submit: Submitter) -> None:
    submit.profile("short", time="1", signal="USR1@50")
    done = submit.run(profile="short", script=SAVES)
    assert done.returncode == 0, done.stderr
    assert "job N (toy) requeued: restart 1 of 3" in lines(done.stderr)
    assert "rank 0 goes on from step 7" in done.stdout


@pytest.mark.slow
def test_no_restarts_means_143(submit: Submitter, slurm: Slurm) -> None:
    submit.profile("once", max_restarts=0)
    attached = submit.start(profile="once", script=SAVES, launch="direct")
    attached.until("rank 0 started")
    slurm.run(f"scancel --signal=TERM {attached.job}")
    assert attached.end() == 143, attached.text
    assert "error: job N (toy) saved its checkpoint and left, after 0 of 0 restarts" in lines(attached.text)


@pytest.mark.slow
def test_a_node_that_dies(submit: Submitter, slurm: Slurm) -> None:
    attached = submit.start(script=SAVES)
    attached.until("rank 1 started")
    slurm.kill_node("node2")
    assert attached.end() == 1, attached.text
    assert "error: job N (toy) ended NODE_FAIL: a node failed" in lines(attached.text)


@pytest.mark.slow
def test_a_job_that_is_cancelled_by_others(submit: Submitter, slurm: Slurm) -> None:
    attached = submit.start(script=SAVES, launch="direct")
    attached.until("rank 0 started")
    slurm.run(f"scancel {attached.job}")
    assert attached.end() == 1, attached.text
    assert "error: job N (toy) ended CANCELLED" in lines(attached.text)
    assert slurm.scontrol(attached.job)["Restarts"] == "0"


@pytest.mark.slow
def test_without_a_terminal_the_second_ctrl_c_cancels(submit: Submitter, slurm: Slurm) -> None:
    attached = submit.start(script=SAVES, jobs=("a", "b"))
    attached.until("rank 0 started")
    attached.process.send_signal(signal.SIGINT)
    attached.until("once more cancels")
    job = int(attached.job)
    assert slurm.scontrol(str(job))["JobState"] == "RUNNING"
    attached.process.send_signal(signal.SIGINT)
    assert attached.end() == 130, attached.text
    for cancelled in (job, job + 1):
        assert slurm.wait_state(str(cancelled), ("CANCELLED", "COMPLETED", "FAILED")) == "CANCELLED"


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "expected"), [("y\n", "CANCELLED"), ("n\n", "RUNNING")])
def test_on_a_terminal_ctrl_c_asks(submit: Submitter, slurm: Slurm, answer: str, expected: str) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(submit.folder)
        os.execve(sys.executable, submit.command(script=SLEEPS, launch="direct"), submit.env)
    text = ""

    def until(said: str) -> None:
        nonlocal text
        deadline = time.monotonic() + 60
        while said not in text:
            assert time.monotonic() < deadline, text
            text += os.read(terminal, 4096).decode()

    until("started")
    os.write(terminal, b"\x03")
    until("[y/N]")
    job = re.findall(r"job (\d+)", text)[0]
    os.write(terminal, answer.encode())
    if expected == "CANCELLED":
        until("cancelled")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
        assert slurm.wait_state(job, ("CANCELLED", "COMPLETED", "FAILED")) == "CANCELLED"
    else:
        time.sleep(3)
        assert slurm.scontrol(job)["JobState"] == "RUNNING"
        os.kill(pid, signal.SIGTERM)
        until("not cancelled")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 143
    os.close(terminal)


@pytest.mark.slow
def test_sigterm_leaves_the_job_and_what_is_printed_works_in_another_shell(submit: Submitter, slurm: Slurm) -> None:
    attached = submit.start(script=SLEEPS, launch="direct")
    attached.until("started")
    attached.process.terminate()
    assert attached.end() == 143
    assert slurm.scontrol(attached.job)["JobState"] == "RUNNING"
    commands = dict(re.findall(r"^  (log|follow|inspect|cancel) +(.*)$", attached.text, re.M))
    assert "started" in Path(commands["log"]).read_text(encoding="utf-8")
    assert slurm.run(f"timeout 2 {commands['follow']}", check=False).stdout == "started\n"
    assert "RUNNING" in slurm.run(commands["inspect"]).stdout
    slurm.run(commands["cancel"])
    assert slurm.wait_state(attached.job, ("CANCELLED", "COMPLETED", "FAILED")) == "CANCELLED"


@pytest.mark.slow
def test_a_submitted_job_needs_nobody(submit: Submitter, slurm: Slurm) -> None:
    done = submit.run(script=HELLO, launch="direct", how="batch")
    assert done.returncode == 0, done.stderr
    job = re.match(r"toy: job (\d+)\n", done.stdout)
    assert job, done.stdout
    assert slurm.wait_state(job[1], ("CANCELLED", "COMPLETED", "FAILED")) == "COMPLETED"


# -- not at all


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"partition": "nope"}, "invalid partition specified: nope"),
        pytest.param({"account": "nope"}, "Invalid account", marks=pytest.mark.slow),
        pytest.param({"nodes": 3}, "Node count specification invalid", marks=pytest.mark.slow),
        ({"gpus_per_node": 9}, "Requested node configuration is not available"),
    ],
)
def test_what_sbatch_refuses_leaves_nothing_behind(
    submit: Submitter, slurm: Slurm, tmp_path: Path, keys: dict[str, object], said: str
) -> None:
    submit.profile("bad", **keys)
    done = submit.run(profile="bad", script=HELLO, jobs=("a", "b"))
    assert done.returncode == 2
    assert re.fullmatch(r"error: sbatch refused the job: .*\nnothing was submitted\n", done.stderr)
    assert said in done.stderr
    left = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert left == []
    assert slurm.run("squeue -h").stdout == ""


def test_a_dry_run_shows_what_a_run_submits_and_writes_nothing(submit: Submitter, tmp_path: Path) -> None:
    dry = submit.run(script=HELLO, how="dry")
    assert dry.returncode == 0, dry.stderr
    assert not (tmp_path / "out").exists()
    real = submit.run(script=HELLO, how="batch")
    log = re.search(r"^  log +(.*)/toy/log-toy_\d+_0.out$", real.stdout, re.M)
    assert log
    folder = Path(log[1])

    def without_id(text: str) -> str:
        return text.replace(folder.name, "test_<id>").strip()

    for file in (folder / "toy_sbatch.sh", folder / "toy" / "code" / "launch.sh"):
        assert without_id(file.read_text(encoding="utf-8")) in dry.stdout
    assert f"sbatch --requeue --parsable {without_id(str(folder))}/toy_sbatch.sh\n" in dry.stdout
    assert SECRET.splitlines()[0] not in dry.stdout


# -- over SSH


@pytest.fixture
def ssh_keys(login_node: LoginNode, tmp_path: Path) -> dict[str, object]:
    return {
        "tunnel": "ssh", "host": login_node.host, "port": login_node.port, "user": login_node.user,
        "identity": str(login_node.identity), "job_dir": str(tmp_path / "cluster"),
    }  # fmt: skip


@pytest.fixture
def away(submit: Submitter, login_node: LoginNode) -> dict[str, str]:
    """The environment of a machine that knows the cluster only by its login node."""
    return {**login_node.env, "SLURM_CONF": "/nonexistent"}


def test_over_ssh(
    submit: Submitter, ssh_keys: dict[str, object], away: dict[str, str], tmp_path: Path, login_node: LoginNode
) -> None:
    submit.profile("ssh", **ssh_keys)
    done = submit.run(profile="ssh", script=HELLO, env=away)
    assert done.returncode == 0, done.stdout + done.stderr
    secret = repr("".join(reversed(SECRET)))
    assert f"rank 1/2 on node2 {NASTY} {secret}" in done.stdout
    assert (tmp_path / "cluster" / "experiments" / "test").is_dir()
    assert not (tmp_path / "out").exists()
    assert files_with(SECRET, tmp_path, login_node.root) == []
    batch = submit.run(profile="ssh", script=SLEEPS, launch="direct", how="batch", env=away)
    cancel = re.search(r"^  cancel +(.*)$", batch.stdout, re.M)
    assert cancel
    subprocess.run(["bash", "-c", cancel[1]], env=submit.env | away, check=True)


@pytest.mark.slow
def test_a_connection_that_drops_comes_back(
    submit: Submitter, ssh_keys: dict[str, object], away: dict[str, str], slurm: Slurm
) -> None:
    submit.profile("ssh", **ssh_keys)
    attached = submit.start(profile="ssh", script=SAVES, launch="direct", env=away)
    attached.until("rank 0 started")
    masters = subprocess.run(["pgrep", "-f", "ControlMaster=yes"], capture_output=True, text=True).stdout.split()
    ours = [pid for pid in masters if str(attached.process.pid) in Path(f"/proc/{pid}/stat").read_text().split()[3]]
    assert len(ours) == 1
    os.kill(int(ours[0]), signal.SIGKILL)
    slurm.run(f"scancel --signal=USR1 {attached.job}")
    assert attached.end() == 0, attached.text
    assert "rank 0 goes on from step 7" in attached.text


@pytest.mark.parametrize(
    "fault", ["host key", "key", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("port", "sbatch"))]
)
def test_what_is_wrong_with_an_ssh_login_is_one_error(
    submit: Submitter,
    ssh_keys: dict[str, object],
    away: dict[str, str],
    login_node: LoginNode,
    tmp_path: Path,
    fault: str,
) -> None:
    said = {
        "host key": "its host key is not in known_hosts",
        "key": "the login was refused",
        "port": "Connection refused",
        "sbatch": "has no program",
    }[fault]
    if fault == "host key":
        away["PATH"] = submit.env["PATH"]  # ssh without the options that name the known hosts
    elif fault == "key":
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
        ssh_keys["identity"] = str(tmp_path / "other")
        config = login_node.client_config.read_text(encoding="utf-8")
        (tmp_path / "config").write_text(re.sub(r"(?m)^\s*IdentityFile.*$", "", config), encoding="utf-8")
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {tmp_path}/config "$@"\n')
        (tmp_path / "bin" / "ssh").chmod(0o755)
        away["PATH"] = f"{tmp_path}/bin:{submit.env['PATH']}"
    elif fault == "port":
        ssh_keys["port"] = 1
    else:
        ssh_keys["host"] = login_node.host
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "ssh").write_text('#!/bin/sh\ncase "$*" in *"command -v sbatch"*) exit 1;; esac\n'
                                              f'exec {login_node.bin}/ssh "$@"\n')  # fmt: skip
        (tmp_path / "bin" / "ssh").chmod(0o755)
        away["PATH"] = f"{tmp_path}/bin:{away['PATH']}"
    submit.profile("ssh", **ssh_keys)
    done = submit.run(profile="ssh", script=HELLO, env=away)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.fullmatch(r"error: .*\n.*\n", done.stderr), done.stderr
    assert said in done.stderr
    assert not (tmp_path / "cluster").exists()
