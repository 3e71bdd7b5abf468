"""The engines behave as the real things they are, so that what runs on them says something about a cluster."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .ray_cluster import RayCluster
from .slurm import Slurm, free_ports, missing, wait_for
from .sshd import LoginNode

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


# -- Slurm


def test_a_job_step_runs_on_two_nodes_with_names_and_addresses_of_their_own(slurm: Slurm) -> None:
    seen = slurm.run("srun -N2 bash -c 'echo $SLURM_PROCID $(hostname) $(hostname --ip-address)'").stdout.splitlines()
    assert sorted(seen) == ["0 node1 127.0.1.1", "1 node2 127.0.1.2"]


def test_the_nodes_reach_each_other_by_name(slurm: Slurm) -> None:
    """As `MASTER_ADDR` of a torchrun job is used: node2 connects to a port that node1 has opened on its own address."""
    port = free_ports(1)[0]
    listen = (
        "import socket\n"
        f"connection, address = socket.create_server(('node1', {port})).accept()\n"
        "print(address[0], connection.recv(9).decode())\n"
    )
    connect = (
        "import socket, time\n"
        "for _ in range(100):\n"
        f"    try: c = socket.create_connection(('node1', {port}), source_address=('node2', 0)); break\n"
        "    except OSError: time.sleep(0.1)\n"
        "c.send(b'hello')\n"
    )
    env = {"LISTEN": listen, "CONNECT": connect, "PYTHON": sys.executable}
    step = """srun -N2 bash -c 'if [ $SLURM_PROCID = 0 ]; then $PYTHON -c "$LISTEN"; else $PYTHON -c "$CONNECT"; fi'"""
    assert slurm.run(step, env).stdout == "127.0.1.2 hello\n"


def test_gpus_are_handed_out_as_cuda_visible_devices(slurm: Slurm) -> None:
    assert slurm.run("srun -N2 --gpus-per-node=3 bash -c 'echo $CUDA_VISIBLE_DEVICES'").stdout == "0,1,2\n0,1,2\n"
    assert slurm.run("srun --gpus-per-node=8 bash -c 'echo $CUDA_VISIBLE_DEVICES'").stdout == "0,1,2,3,4,5,6,7\n"
    assert slurm.run("srun -N1 bash -c 'echo [$CUDA_VISIBLE_DEVICES]'").stdout == "[]\n"


@pytest.mark.parametrize(
    ("code", "state", "accounted"), [(0, "COMPLETED", "0:0"), (2, "FAILED", "2:0"), (143, "FAILED", "15:0")]
)
def test_exit_codes(slurm: Slurm, code: int, state: str, accounted: str) -> None:
    """The controller has a job's own code; the accounting takes 128 from what is above that."""
    job = slurm.sbatch(f"echo to the log; exit {code}", "-N2", "--gpus-per-node=1")
    assert slurm.wait_state(job, ENDED) == state
    record = slurm.sacct(job)
    assert (record["ExitCode"], record["Account"], record["NNodes"]) == (accounted, "test", "2")
    assert slurm.scontrol(job)["ExitCode"] == f"{code}:0"
    assert slurm.output(job) == "to the log\n"


@pytest.mark.slow
def test_a_cancelled_job(slurm: Slurm) -> None:
    job = slurm.sbatch("sleep 60")
    slurm.wait_state(job, "RUNNING")
    slurm.run(f"scancel {job}")
    assert slurm.wait_state(job, ENDED) == "CANCELLED"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--partition=gpu", "invalid partition specified: gpu"),
        ("--account=nobody", "Invalid account"),
        ("--nodes=3", "Node count specification invalid"),
        ("--gpus-per-node=9", "Requested node configuration is not available"),
        ("--partition=interactive --time=2:00:00", "Requested time limit is invalid"),
    ],
)
def test_what_cannot_run_is_refused_at_once(slurm: Slurm, option: str, message: str) -> None:
    done = slurm.run(f"sbatch {option} --wrap true", check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert message in done.stderr


@pytest.mark.slow
def test_a_job_that_requeues_itself_starts_again_with_a_count(slurm: Slurm) -> None:
    again = "trap 'if [ $? = 143 ]; then scontrol requeue $SLURM_JOB_ID; fi' EXIT\n"
    job = slurm.sbatch(
        f"{again}echo attempt ${{SLURM_RESTART_COUNT:-0}}; [ ${{SLURM_RESTART_COUNT:-0}} = 1 ] || exit 143",
        "--requeue", "--open-mode=append",
    )  # fmt: skip
    assert slurm.wait_state(job, ENDED) == "COMPLETED"
    assert (slurm.scontrol(job)["Restarts"], slurm.sacct(job)["ExitCode"]) == ("1", "0:0")
    assert [line for line in slurm.output(job).splitlines() if "attempt" in line] == ["attempt 0", "attempt 1"]


@pytest.mark.slow
def test_the_signal_before_the_end_arrives(slurm: Slurm) -> None:
    """Slurm looks at time limits every 30 s, so `--signal` comes early rather than late."""
    job = slurm.sbatch("trap 'echo got USR1; exit 143' USR1; sleep 50 & wait", "--time=1", "--signal=B:USR1@55")
    assert slurm.wait_state(job, ENDED) == "FAILED"
    assert (slurm.output(job), slurm.scontrol(job)["ExitCode"]) == ("got USR1\n", "143:0")


@pytest.mark.slow
def test_a_job_survives_the_death_of_its_node(slurm: Slurm) -> None:
    step = 'echo $(hostname) ${SLURM_RESTART_COUNT:-0}; [ -n "$SLURM_RESTART_COUNT" ] || sleep 100'
    job = slurm.sbatch(f"srun bash -c '{step}'", "-N2", "--requeue", "--open-mode=append")
    wait_for("both nodes at work", lambda: sorted(slurm.output(job).splitlines()) == ["node1 0", "node2 0"])
    slurm.kill_node("node2")
    wait_for("requeued", lambda: slurm.scontrol(job).get("Restarts") == "1")
    assert slurm.node_states()["node2"].startswith("down")
    slurm.restore_node("node2")
    wait_for("the second attempt's end", lambda: slurm.scontrol(job)["JobState"] == "COMPLETED", 60)
    assert {"node1 1", "node2 1"} <= set(slurm.output(job).splitlines())


# -- the login node


def test_a_session_on_the_login_node_sees_the_cluster_and_nothing_of_ours(
    login_node: LoginNode, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS", "must not travel")
    assert login_node.ssh("sinfo -h -o '%P %D'").stdout == "batch* 2\ninteractive 2\n"
    job = login_node.ssh(f"sbatch --parsable -o {slurm.root}/slurm-%j.out --wrap 'env; exit 5'").stdout.strip()
    assert slurm.wait_state(job, ENDED) == "FAILED"
    assert slurm.sacct(job)["ExitCode"] == "5:0"
    assert "OURS" not in slurm.output(job) + login_node.ssh("env").stdout
    assert login_node.ssh("echo $HOME").stdout == f"{login_node.home}\n"


def test_rsync_and_ssh_know_the_login_node_and_refuse_another_key(login_node: LoginNode, tmp_path: Path) -> None:
    env = os.environ | login_node.env
    (tmp_path / "a").write_text("a")
    target = f"{login_node.user}@{login_node.host}:{tmp_path}/b"
    rsync = ["rsync", f"--rsh=ssh -p {login_node.port} -i {login_node.identity}", f"{tmp_path}/a", target]
    subprocess.run(rsync, env=env, check=True, stdin=subprocess.DEVNULL)
    assert (tmp_path / "b").read_text() == "a"
    known = login_node.known_hosts.read_text()
    login_node.known_hosts.write_text(f"{known.split()[0]} {login_node.identity.with_suffix('.pub').read_text()}")
    try:
        refused = login_node.ssh("true", check=False)
    finally:
        login_node.known_hosts.write_text(known)
    assert refused.returncode == 255 and "Host key verification failed" in refused.stderr


# -- Ray


def test_a_ray_job_returns_its_exit_code_and_log(ray_cluster: RayCluster) -> None:
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(ray_cluster.address)
    name, value = ray_cluster.secret
    assert name not in os.environ and name not in ray_cluster.env
    # The command is shown to everybody: it has the hash of the value.
    digest = hashlib.sha256(value.encode()).hexdigest()
    has_it = f'[ "$(printf %s "${name}" | sha256sum)" = "{digest}  -" ]'
    command = f'echo GPU $CUDA_VISIBLE_DEVICES; {has_it} && python -c "import ray, sys; sys.exit(3)"'
    job = client.submit_job(entrypoint=command, entrypoint_num_gpus=1)
    wait_for("the job's end", lambda: client.get_job_status(job).is_terminal(), 60)
    assert (client.get_job_info(job).status, client.get_job_info(job).driver_exit_code) == ("FAILED", 3)
    assert "GPU 0\n" in client.get_job_logs(job)


# -- nothing stays behind

OWNER = """
import sys
from pathlib import Path
from cluster import slurm, sshd
class Cluster(slurm.Slurm):
    def _start_node(self, node):
        super()._start_node(node)
        if sys.argv[2] == "broken" and node == "node2":
            raise RuntimeError("node2 does not start")
with Cluster(Path(sys.argv[1])) as cluster:
    login = sshd.start(cluster.root / "login", {"SLURM_CONF": str(cluster.conf)})
    cluster.sbatch("srun sleep 1000", "-N2")
    slurm.wait_for("the job runs", lambda: cluster.scontrol("1").get("JobState") == "RUNNING")
    print("ready", flush=True)
    import time
    time.sleep(100)
"""


def processes_of(root: Path) -> list[str]:
    """Command lines of living processes that name `root`, as an argument or in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            if str(root).encode() in command + (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                found.append(command.replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has just ended
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("end", ["SIGINT", "SIGKILL", "broken"])
def test_no_process_stays_behind(tmp_path: Path, end: str) -> None:
    if reason := missing():
        pytest.skip(reason)
    root = tmp_path / "cluster"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, root, end], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    ready = owner.stdout.readline()
    if end == "broken":
        assert (ready, owner.wait(30)) == ("", 1)
    else:
        assert ready == "ready\n", owner.communicate()
        wait_for("the job's processes", lambda: sum("sleep 1000" in line for line in processes_of(root)) >= 2)
        owner.send_signal(signal.Signals[end])
        owner.wait(30)
    deadline = time.monotonic() + 10
    while (left := processes_of(root)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
