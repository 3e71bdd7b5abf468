"""What a node does: its command, its exit code, and how nodes wait for each other. Real processes, no Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemo_runspec.execution.launch_script import Launch, launch_json
from nemo_runspec.execution.node import node_command, run_node
from nemo_runspec.execution.place import Place, first_node, place

LAUNCH = Launch("demo/train", "torchrun", "project/train.py", "train.yaml", processes_per_node=4)


def test_the_command_of_each_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [sys.executable, f"{tmp_path}/project/train.py", "--config", f"{tmp_path}/train.yaml"]
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "20001")
    second = node_command(LAUNCH, tmp_path, Place(1, 2))
    assert second[:3] == [sys.executable, "-m", "nemo_runspec.execution.torchrun"]
    assert second[-3:] == plain[1:]
    assert second[3:-3] == [
        "--nnodes=2",
        "--node-rank=1",
        "--master-addr=10.0.0.1",
        "--master-port=20001",
        "--nproc-per-node=4",
        "--signals-to-handle=SIGHUP,SIGQUIT",
    ]
    assert "--standalone" in node_command(LAUNCH, tmp_path, Place())
    watched = replace(LAUNCH, launcher="ft_launcher", launcher_options=["--max-restarts=3"])
    assert node_command(watched, tmp_path, Place(1, 2))[1:-3] == [
        "-m",
        "nvidia_resiliency_ext.fault_tolerance.launcher",
        "--nnodes=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=10.0.0.1:20001",
        "--nproc-per-node=4",
        "--max-restarts=3",
    ]
    assert "--max-restarts=1" in node_command(
        replace(LAUNCH, launcher_options=["--max-restarts=1"]), tmp_path, Place(1, 2)
    )
    assert node_command(replace(LAUNCH, processes_per_node=1), tmp_path, Place()) == plain
    for launch in ("direct", "ray"):
        assert node_command(replace(LAUNCH, launch=launch), tmp_path, Place(1, 2)) == plain
    own = replace(LAUNCH, launch="direct", cmd="bash -c 'echo {config}'")
    assert node_command(own, tmp_path, Place()) == ["bash", "-c", f"echo {tmp_path}/train.yaml"]


def test_several_nodes_need_an_address_and_agree_on_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="2 nodes, but MASTER_ADDR, the address of the first one, is not set"):
        node_command(LAUNCH, tmp_path, Place(0, 2))
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    first, second, later = (first_node(Place(*node)) for node in ((0, 2, "a"), (1, 2, "a"), (0, 2, "b")))
    assert first == second and first[0] == "10.0.0.1" and 20000 <= first[1] < 30000
    assert later[1] != first[1]
    monkeypatch.setenv("MASTER_PORT", "7")
    assert first_node(Place(0, 2)) == ("10.0.0.1", 7)


def test_where_this_node_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUNSPEC_NODE_RANK", "RUNSPEC_NUM_NODES", "RUNSPEC_ATTEMPT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NODEID", "1")  # of an allocation that somebody else made
    assert (place().node, place().nodes) == (0, 1)
    monkeypatch.setenv("RUNSPEC_NODE_RANK", "1")
    monkeypatch.setenv("RUNSPEC_NUM_NODES", "two")
    with pytest.raises(UserError, match="which node of how many is this\\? RUNSPEC_NUM_NODES=two"):
        place()
    monkeypatch.setenv("RUNSPEC_NUM_NODES", "2")
    with pytest.raises(UserError, match="RUNSPEC_ATTEMPT is not set"):
        place()
    monkeypatch.setenv("RUNSPEC_ATTEMPT", "7-0-1")
    assert place() == Place(1, 2, "7-0-1")


class Nodes:
    """Starts `node.py` as launch.sh does, on nodes that share one folder."""

    def __init__(self, folder: Path, script: str, launch: str = "direct") -> None:
        self.job = folder
        bundle = folder / "code"
        (bundle / "project").mkdir(parents=True)
        (bundle / "project" / "train.py").write_text(script, encoding="utf-8")
        self.file = bundle / "launch.json"
        self.file.write_text(launch_json(replace(LAUNCH, launch=launch, processes_per_node=1)), encoding="utf-8")

    def start(self, node: int | None = None, **env: str) -> subprocess.Popen[str]:
        environment = dict(os.environ)
        if node is not None:
            environment |= {"RUNSPEC_NODE_RANK": str(node), "RUNSPEC_NUM_NODES": "2", "RUNSPEC_ATTEMPT": "7-0-1"}
        return subprocess.Popen(
            [sys.executable, "-m", "nemo_runspec.execution.node", str(self.file)],
            env=environment | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def test_without_slurm_the_script_runs_here(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "import sys; print(sys.argv[1:]); sys.exit(2)")
    node = nodes.start()
    out, err = node.communicate(timeout=60)
    assert out == f"['--config', '{tmp_path}/code/train.yaml']\n"
    assert (node.returncode, err) == (2, "")


def test_a_direct_script_runs_on_the_first_node_only(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "print('here'); raise SystemExit(1)")
    both = [nodes.start(0), nodes.start(1)]
    assert [node.communicate(timeout=60)[0] for node in both] == ["here\n", ""]
    assert [node.returncode for node in both] == [1, 0]


# Fails at the first start of its workers; at the second a signal came, and it has saved.
RESTARTED = """
import os, sys
from pathlib import Path
from nemo_runspec.errors import Preempted, RunFailed, run_main

def main():
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    with Path(sys.argv[2]).with_name("starts").open("a") as file:
        file.write("x")
    raise RunFailed("a rank") if first else Preempted("iter_0000200")

sys.exit(run_main(main))
"""


@pytest.mark.slow
def test_workers_that_are_started_again_are_left_alone_once_they_have_saved(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, RESTARTED)
    launch = replace(LAUNCH, processes_per_node=2, launcher_options=["--max-restarts=3", "--monitor-interval=0.1"])
    nodes.file.write_text(launch_json(launch), encoding="utf-8")
    node = nodes.start()
    _, err = node.communicate(timeout=120)
    assert node.returncode == 143, err
    starts = (tmp_path / "code" / "starts").read_text()
    assert 3 <= len(starts) <= 4  # two workers, twice; the first failure may come before the other one has begun


SAVED = """
import sys
from nemo_runspec.errors import Preempted, run_main

def main():
    raise Preempted("iter_0000200")

sys.exit(run_main(main))
"""


@pytest.mark.parametrize("changes", [{"launch": "direct"}, {"processes_per_node": 1}])
def test_what_no_launcher_starts_says_itself_that_it_has_saved(changes: dict[str, Any], tmp_path: Path) -> None:
    """Options of the profile's launcher are none of its own: the job is requeued all the same."""
    nodes = Nodes(tmp_path, SAVED)
    launch = replace(LAUNCH, launcher_options=["--max-restarts=3"], **changes)
    nodes.file.write_text(launch_json(launch), encoding="utf-8")
    node = nodes.start()
    _, err = node.communicate(timeout=60)
    assert node.returncode == 143, err


# Stands for the part of a node; argv: folder, node, exit code.
PART = """
import sys
from pathlib import Path
from nemo_runspec.execution.node import Place, leave_together
print("waits", flush=True)
sys.exit(leave_together(int(sys.argv[3]), Path(sys.argv[1]), Place(int(sys.argv[2]), 2)))
"""


def part(folder: Path, node: int, code: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", PART, str(folder), str(node), str(code)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        (143, 143, 143),
        (2, 1, 2),  # torchrun says 1 where rank 0 knows better
        (1, 143, 1),  # told to leave because the first failed
        (0, 1, 1),
    ],
)
def test_a_node_waits_for_the_first_and_takes_its_exit_code(
    tmp_path: Path, first: int, second: int, together: int
) -> None:
    other = part(tmp_path, 1, second)
    time.sleep(0.5)
    assert other.poll() is None, "it left before the first node"
    for number in (signal.SIGTERM, signal.SIGUSR1):  # as Slurm does to the rest of a job that ends
        other.send_signal(number)
    assert part(tmp_path, 0, first).wait(30) == first
    assert other.wait(30) == together


def test_a_node_that_is_done_does_not_wait(tmp_path: Path) -> None:
    assert part(tmp_path, 1, 0).wait(30) == 0


@pytest.mark.parametrize("code", [1, 2])
def test_a_job_that_was_stopped_because_a_node_failed_has_failed(tmp_path: Path, code: int) -> None:
    other = part(tmp_path, 1, code)
    assert part(tmp_path, 0, 143).wait(30) == code
    assert other.wait(30) == code


def test_a_node_that_cannot_begin_tells_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(tmp_path, "", "torchrun")
    for name, value in {"NODE_RANK": "1", "NUM_NODES": "2", "ATTEMPT": "0"}.items():
        monkeypatch.setenv(f"RUNSPEC_{name}", value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="MASTER_ADDR"):
        run_node(nodes.file)
    assert part(tmp_path, 0, 143).wait(30) == 2


def test_a_full_disk_does_not_change_the_exit_code(tmp_path: Path) -> None:
    folder = tmp_path / "gone"  # nothing can be written to it
    assert part(folder, 0, 143).wait(30) == 143
    (tmp_path / ".node-0-1").touch()  # for whose text there was no space
    assert part(tmp_path, 0, 143).wait(30) == 143


# Leaves after 40 s at most; rank 0 takes a second to save.
SAVES = """
import os, pathlib, signal, sys, time
from nemo_runspec.errors import Preempted, run_main
here, rank, got = pathlib.Path(__file__).parent, os.environ["RANK"], []
def main():
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, frame: got.append(n))
    (here / f"started-{rank}").touch()
    end = time.monotonic() + 40
    while not got and time.monotonic() < end:
        time.sleep(0.02)
    if rank == "0":
        time.sleep(1)
        (here / "saved").touch()
    raise Preempted("x")
sys.exit(run_main(main))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_torchrun_lives_through_signals_to_every_process(tmp_path: Path, number: signal.Signals) -> None:
    pytest.importorskip("torch")
    nodes = Nodes(tmp_path, SAVES, "torchrun")
    with_port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    both = [nodes.start(node, **with_port) for node in (0, 1)]
    project = tmp_path / "code" / "project"
    deadline = time.monotonic() + 120
    while len(list(project.glob("started-*"))) < 2:
        assert time.monotonic() < deadline, [node.poll() for node in both]
        time.sleep(0.1)
    for pid in [pid for node in both for pid in _tree(node.pid)]:
        os.kill(pid, number)
    for node in both:
        node.communicate(timeout=60)
    assert [node.returncode for node in both] == [143, 143]
    assert (project / "saved").exists()


def _tree(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [pid, *(below for child in children for below in _tree(int(child)))]


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
