"""Scripts submitted with `nemo-runspec run` to a real Slurm with two nodes, with real signals and failures."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .desk import TOY, Desk
from .slurm import Slurm
from .sshd import LoginNode

SECRET = "canary-4711 'quoted' $HOME\nsecond line"
NASTY = "a b$HOME 'q' \"d\" `x` \\n"
ERROR = f"error: job N ({TOY})"

# Shows the secret backwards, so that its text is found only where it must not be.
HELLO = """
import os
from pathlib import Path
def command_line(process):
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""
secret = os.environ["MY_SECRET"]
assert os.environ["HF_TOKEN"] == secret
assert not [process for process in Path("/proc").glob("[0-9]*") if secret.encode() in command_line(process)]
rank, size = os.environ.get("RANK", "-"), os.environ.get("WORLD_SIZE", "-")
line = f"rank {rank}/{size} on {os.uname().nodename} {os.environ['NASTY']} {''.join(reversed(secret))!r}"
# In one write each: print() makes two of it, and the lines of several ranks run into each other.
os.write(1, (line + os.linesep).encode())
os.write(1, f"gpus {os.environ.get('CUDA_VISIBLE_DEVICES')}{os.linesep}".encode())
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

# Rank 1 ends with an error of its own, which torchrun tells rank 0 by SIGTERM.
FAILS = """
import os, sys, time
from nemo_runspec.errors import RunFailed, end_on_signals, run_main
end_on_signals()
def main():
    if os.environ["RANK"] == "1":
        raise RunFailed("rank 1 met a bad record")
    time.sleep(200)
sys.exit(run_main(main))
"""

SLEEPS = "import time; print('started', flush=True); time.sleep(300)"


@pytest.fixture
def desk(desk: Desk) -> Desk:
    """With the profile `toy`: variables of any text, and two secrets of the same value."""
    desk.profile("toy", extends="slurm", env={"NASTY": NASTY}, secrets=["MY_SECRET", "HF_TOKEN"])
    desk.env |= {"MY_SECRET": SECRET, "HF_TOKEN": SECRET}
    return desk


def lines(text: str) -> list[str]:
    return [re.sub(r"\bjob \d+", "job N", line) for line in text.splitlines()]


def files_with(text: str, *folders: Path) -> list[Path]:
    needle = text.splitlines()[0].encode()
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    assert len(files) > 10
    return [file for file in files if needle in file.read_bytes()]


# -- to the end


@pytest.mark.slow
def test_torchrun_over_two_nodes(desk: Desk, tmp_path: Path) -> None:
    """Ranks over nodes, variables with any text, secrets that arrive but are written nowhere, GPUs, states."""
    gpus = ("run.env.gpus_per_node=2", "run.env.cpus_per_task=3")
    printed = lines(desk.run(f"nemo-runspec run {desk.script(HELLO)} --run toy", *gpus))
    secret = repr("".join(reversed(SECRET)))
    ranks = sorted(line for line in printed if line.startswith("rank"))
    assert ranks == [f"rank {rank}/4 on node{rank // 2 + 1} {NASTY} {secret}" for rank in range(4)]
    assert printed.count("gpus 0,1") == 4
    states = [line for line in printed if line.startswith("job N") and "pending" not in line]
    assert states == [f"job N ({TOY}) running on node[1-2]", f"job N ({TOY}) completed"]
    assert files_with(SECRET, tmp_path) == []
    assert not (desk.folder / "home").exists()


@pytest.mark.parametrize(("launch", "code", "expected"), [("torchrun", 2, 2), ("direct", 7, 1)])
def test_the_script_s_exit_code_is_the_command_s(desk: Desk, launch: str, code: int, expected: int) -> None:
    """Whatever is none of ours is 1."""
    script = desk.script(
        f"import sys\nfrom nemo_runspec.errors import run_main\nsys.exit(run_main(lambda: {code}))", launch
    )
    printed = desk.run(f"nemo-runspec run {script} --run toy", code=expected)
    assert f"{ERROR} failed with exit code {expected}" in lines(printed)
    log = re.search(r"^log: (.*)$", printed, re.M)
    assert log and Path(log[1]).is_file()


# -- not to the end


@pytest.mark.slow
def test_a_request_to_save_requeues_and_the_job_goes_on(desk: Desk, slurm: Slurm) -> None:
    """`scancel --signal` reaches every process, and node2 is done seconds before rank 0 has saved."""
    attached = desk.start(f"nemo-runspec run {desk.script(SAVES)} --run toy")
    attached.until("rank 1 started")
    attached.until("rank 0 started")
    slurm.run(f"scancel --signal=USR1 {attached.job}")
    printed = lines(attached.end())
    assert f"job N ({TOY}) requeued: restart 1 of 3" in printed
    assert {"rank 0 goes on from step 7", "rank 1 goes on from step 7"} <= set(printed)
    assert slurm.scontrol(attached.job)["Restarts"] == "1"


@pytest.mark.slow
def test_the_time_limit_requeues_too(desk: Desk) -> None:
    limit = ("run.env.time=1", "run.env.signal=USR1@50")
    printed = lines(desk.run(f"nemo-runspec run {desk.script(SAVES)} --run toy", *limit))
    assert f"job N ({TOY}) requeued: restart 1 of 3" in printed
    assert "rank 0 goes on from step 7" in printed


@pytest.mark.slow
def test_no_restarts_means_143(desk: Desk, slurm: Slurm) -> None:
    attached = desk.start(f"nemo-runspec run {desk.script(SAVES, 'direct')} --run toy run.env.max_restarts=0")
    attached.until("rank 0 started")
    slurm.run(f"scancel --signal=TERM {attached.job}")
    assert f"{ERROR} saved its checkpoint and left, after 0 of 0 restarts" in lines(attached.end(143))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["NODE_FAIL: a node failed", "CANCELLED"])
def test_a_job_that_others_end_is_not_started_again(desk: Desk, slurm: Slurm, end: str) -> None:
    attached = desk.start(f"nemo-runspec run {desk.script(SAVES)} --run toy")
    attached.until("rank 1 started")
    if end == "CANCELLED":
        slurm.run(f"scancel {attached.job}")
    else:
        slurm.kill_node("node2")
    assert f"{ERROR} ended {end}" in lines(attached.end(1))
    assert slurm.scontrol(attached.job)["Restarts"] == "0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({}, 1),
        ({"nodes": 1, "gpus_per_node": 2}, 1),  # a rank beside rank 0
        ({"startup_commands": ['test "$RUNSPEC_NODE_RANK" = 0']}, 2),  # the second node refuses
    ],
)
def test_a_job_of_which_one_rank_or_node_fails_is_not_started_again(
    desk: Desk, slurm: Slurm, keys: dict[str, object], code: int
) -> None:
    desk.profile("fails", extends="toy", **keys)
    attached = desk.start(f"nemo-runspec run {desk.script(FAILS)} --run fails")
    assert f"{ERROR} failed with exit code {code}" in lines(attached.end(code))
    assert slurm.scontrol(attached.job)["Restarts"] == "0"


@pytest.mark.slow
def test_without_a_terminal_the_second_ctrl_c_cancels(desk: Desk, slurm: Slurm) -> None:
    attached = desk.start(f"nemo-runspec run {desk.script(SAVES)} --run toy")
    attached.until("rank 0 started")
    attached.process.send_signal(signal.SIGINT)
    attached.until("once more cancels")
    assert slurm.scontrol(attached.job)["JobState"] == "RUNNING"
    attached.process.send_signal(signal.SIGINT)
    attached.end(130)
    assert slurm.end_state(attached.job) == "CANCELLED"


@pytest.mark.slow
def test_on_a_terminal_ctrl_c_asks(desk: Desk, slurm: Slurm) -> None:
    words = desk.words(f"nemo-runspec run {desk.script(SLEEPS, 'direct')} --run toy")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(desk.folder)
        os.execve(sys.executable, words, desk.env)

    def until(text: str) -> str:
        """Read on until the terminal has shown `text`."""
        shown, deadline = "", time.monotonic() + 60
        while text not in shown:
            assert time.monotonic() < deadline, shown
            shown += os.read(terminal, 4096).decode()
        return shown

    (job,) = set(re.findall(r"job (\d+)", until("started")))
    os.write(terminal, b"\x03")
    until("[y/N]")
    os.write(terminal, b"n\n")
    time.sleep(3)
    assert slurm.scontrol(job)["JobState"] == "RUNNING"
    os.write(terminal, b"\x03")
    until("[y/N]")
    os.write(terminal, b"y\n")
    until("cancelled")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert slurm.end_state(job) == "CANCELLED"
    os.close(terminal)


@pytest.mark.slow
def test_sigterm_leaves_the_job_and_what_is_printed_works_in_another_shell(desk: Desk, slurm: Slurm) -> None:
    attached = desk.start(f"nemo-runspec run {desk.script(SLEEPS, 'direct')} --run toy")
    attached.until("started")
    attached.process.terminate()
    printed = attached.end(143)
    assert slurm.scontrol(attached.job)["JobState"] == "RUNNING"
    commands = dict(re.findall(r"^  (log|follow|inspect|cancel) +(.*)$", printed, re.M))
    assert "started" in Path(commands["log"]).read_text(encoding="utf-8")
    # slurmstepd may add lines of its own to a job's log.
    assert "started" in slurm.run(f"timeout 2 {commands['follow']}", check=False).stdout.splitlines()
    assert "RUNNING" in slurm.run(commands["inspect"]).stdout
    slurm.run(commands["cancel"])
    assert slurm.end_state(attached.job) == "CANCELLED"


# -- not at all


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("partition=nope", "invalid partition specified: nope"),
        pytest.param("account=nope", "Invalid account", marks=pytest.mark.slow),
        pytest.param("nodes=3", "Node count specification invalid", marks=pytest.mark.slow),
        ("gpus_per_node=9", "Requested node configuration is not available"),
    ],
)
def test_what_sbatch_refuses_leaves_nothing_behind(desk: Desk, slurm: Slurm, key: str, message: str) -> None:
    printed = desk.run(f"nemo-runspec run {desk.script(HELLO)} --run toy run.env.{key}", code=2)
    refusal = re.search(r"^error: sbatch refused the job: (.*)\nnothing was submitted\n\Z", printed, re.M)
    assert refusal and message in refusal[1], printed
    assert [file for file in desk.output.rglob("*") if file.is_file()] == []
    assert slurm.run("squeue -h").stdout == ""


def test_a_dry_run_shows_what_a_batch_submits_and_writes_nothing(desk: Desk, slurm: Slurm) -> None:
    script = desk.script(HELLO)
    dry = desk.run(f"nemo-runspec run {script} --run toy --dry-run")
    assert not desk.output.exists()
    real = desk.run(f"nemo-runspec run {script} --batch toy")
    log = re.search(rf"^  log +(.*)/{TOY}/log-{TOY}_(\d+)_0.out$", real, re.M)
    assert log
    folder = Path(log[1])

    def without_id(text: str) -> str:
        return text.replace(folder.name, f"{TOY}_<id>").strip()

    for file in (folder / f"{TOY}_sbatch.sh", folder / TOY / "code" / "launch.sh"):
        assert without_id(file.read_text(encoding="utf-8")) in dry
    assert f"sbatch --requeue --parsable {without_id(str(folder))}/{TOY}_sbatch.sh\n" in dry
    assert SECRET.splitlines()[0] not in dry
    assert slurm.end_state(log[2]) == "COMPLETED"  # a submitted job needs nobody


# -- over SSH


@pytest.fixture
def away(desk: Desk, login_node: LoginNode, tmp_path: Path) -> Desk:
    """A desk that knows the cluster only by its login node, as the profile `login`."""
    desk.profile("login", extends="toy", job_dir=str(tmp_path / "there"), **login_node.profile)
    desk.env |= login_node.env | {"SLURM_CONF": "/nonexistent"}
    return desk


def test_over_ssh(away: Desk, login_node: LoginNode, tmp_path: Path) -> None:
    printed = away.run(f"nemo-runspec run {away.script(HELLO)} --run login")
    assert f"rank 1/2 on node2 {NASTY} {''.join(reversed(SECRET))!r}" in printed
    assert (tmp_path / "there" / "experiments" / TOY).is_dir()
    assert not away.output.exists()
    assert files_with(SECRET, tmp_path, login_node.root) == []
    printed = away.run(f"nemo-runspec run {away.script(SLEEPS, 'direct')} --batch login")
    cancel = re.search(r"^  cancel +(.*)$", printed, re.M)
    assert cancel
    subprocess.run(["bash", "-c", cancel[1]], env=away.env, check=True)


@pytest.mark.slow
def test_a_connection_that_drops_comes_back(away: Desk, slurm: Slurm) -> None:
    attached = away.start(f"nemo-runspec run {away.script(SAVES, 'direct')} --run login")
    attached.until("rank 0 started")
    masters = subprocess.run(["pgrep", "-f", "ControlMaster=yes"], capture_output=True, text=True).stdout.split()
    ours = [pid for pid in masters if str(attached.process.pid) in Path(f"/proc/{pid}/stat").read_text().split()[3]]
    assert len(ours) == 1
    os.kill(int(ours[0]), signal.SIGKILL)
    slurm.run(f"scancel --signal=USR1 {attached.job}")
    assert "rank 0 goes on from step 7" in attached.end()


@pytest.mark.parametrize(
    ("option", "message"),
    [("UserKnownHostsFile", "its host key is not in known_hosts"), ("IdentityFile", "the login was refused")],
)
def test_what_is_wrong_with_an_ssh_login_is_one_error(
    away: Desk, login_node: LoginNode, tmp_path: Path, option: str, message: str
) -> None:
    """A file of known hosts that lacks this one; a private key that is none of the authorized ones."""
    other = login_node.root / "host_key"
    config = re.sub(rf"(?m)^ *{option} .*$", f"{option} {other}", login_node.client_config.read_text())
    (tmp_path / "config").write_text(config)
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {tmp_path}/config "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    identity = [f"run.env.identity={other}"] if option == "IdentityFile" else []
    line = f"nemo-runspec run {away.script(HELLO)} --run login"
    printed = away.run(line, *identity, code=2, PATH=f"{tmp_path}:{away.env['PATH']}")
    assert re.search(r"^error: .*\n.*\n\Z", printed, re.M) and message in printed, printed
    assert not (tmp_path / "there").exists()
