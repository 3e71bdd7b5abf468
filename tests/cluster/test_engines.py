"""What the other tests of this folder take for granted of the engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .slurm import Slurm, missing, wait_for
from .sshd import LoginNode


def test_two_nodes_with_names_and_addresses_of_their_own_and_gpus(slurm: Slurm) -> None:
    step = "srun -N2 --gpus-per-node=3 bash -c 'echo $SLURM_PROCID $(hostname) $(hostname -i) $CUDA_VISIBLE_DEVICES'"
    assert sorted(slurm.run(step).stdout.splitlines()) == ["0 node1 127.0.1.1 0,1,2", "1 node2 127.0.1.2 0,1,2"]


def test_a_session_on_the_login_node_sees_the_cluster_and_nothing_of_ours(
    login_node: LoginNode, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that a secret arrives would prove nothing."""
    monkeypatch.setenv("OURS", "must not travel")
    assert login_node.ssh("sinfo -h -o '%P %D'") == "batch* 2\n"
    assert "OURS" not in login_node.ssh("env; srun env")
    assert login_node.ssh("echo $HOME") == f"{login_node.home}\n"


OWNER = """
import sys, time
from pathlib import Path
from cluster import slurm, sshd
class Cluster(slurm.Slurm):
    def _start_node(self, node):
        super()._start_node(node)
        if sys.argv[2] == "broken" and node == "node2":
            raise RuntimeError("node2 does not start")
with Cluster(Path(sys.argv[1])) as cluster:
    login = sshd.start(cluster.root / "login", {"SLURM_CONF": str(cluster.conf)})
    cluster.run("sbatch -N2 --wrap 'srun sleep 1000'")
    slurm.wait_for("the job runs", lambda: cluster.scontrol("1").get("JobState") == "RUNNING")
    print("ready", flush=True)
    time.sleep(100)
"""


def processes_of(root: Path) -> list[str]:
    """Command lines of living processes that name `root`, as an argument or in their environment."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            if str(root).encode() in command + (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                lines.append(command.replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has just ended
            continue
    return lines


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
    wait_for("their end", lambda: processes_of(root) == [], 10)
