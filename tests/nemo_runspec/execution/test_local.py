"""Local execution: the command, the environment, signals and exit codes, with real child processes."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_runspec.execution.local import (
    cpu_settings,
    execute_local,
    exit_code,
    local_command,
    run_command,
    under_ft_launcher,
    under_torchrun,
)
from nemo_runspec.gpus import visible_gpus
from nemo_runspec.runspec import Runspec, parse
from nemo_runspec.variables import EXIT_CODE_FILE

HEADER = '# /// script\n# [tool.runspec]\n# schema = "1"\n# name = "demo"\n# ///\n'


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Runspec]:
    (tmp_path / "train.yaml").write_text("a: 1\n", encoding="utf-8")

    def make(body: str) -> Runspec:
        path = tmp_path / "s.py"
        path.write_text(HEADER + textwrap.dedent(body), encoding="utf-8")
        return parse(path)

    return make


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("nemo_runspec.execution.local.visible_gpus", lambda: count)


def test_the_command_of_each_launcher(
    script: Callable[[str], Runspec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = script("")
    config = tmp_path / "train.yaml"
    plain = [sys.executable, str(tmp_path / "s.py"), "--config", str(config)]
    gpus(monkeypatch, 4)
    assert local_command(direct, config) == plain
    torchrun = dataclasses.replace(direct, run=dataclasses.replace(direct.run, launch="torchrun"))
    words = local_command(torchrun, config)
    assert words[:3] == [sys.executable, "-m", "nemo_runspec.execution.torchrun"]
    assert {"--nproc-per-node=4", "--local-addr=127.0.0.1"} <= set(words)
    assert words[-3:] == plain[1:]
    for count in (0, 1):  # one process needs no torchrun
        gpus(monkeypatch, count)
        assert local_command(torchrun, config) == plain
    gpus(monkeypatch, 0)
    assert "--nproc-per-node=2" in local_command(torchrun, config, processes=2)
    assert local_command(direct, config, processes=2) == plain
    gpus(monkeypatch, 1)  # which all of them would share
    assert local_command(torchrun, config, processes=2) == plain
    own = dataclasses.replace(direct, run=dataclasses.replace(direct.run, cmd="bash -c 'echo {config}' x"))
    assert local_command(own, config) == ["bash", "-c", f"echo {config}", "x"]
    ray = dataclasses.replace(direct, run=dataclasses.replace(direct.run, launch="ray"))
    assert local_command(ray, config) == plain


def test_several_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)), raising=False)
    threads = [cpu_settings(processes).get("OMP_NUM_THREADS") for processes in (1, 2, 4, 8)]
    assert threads == [None, "3", "1", "1"]


def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == 0


def test_the_child_s_surroundings(
    script: Callable[[str], Runspec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("INHERITED", "yes")
    spec = script(
        """
        import os, pathlib, sys
        out = [os.environ[k] for k in ("OMP_WAIT_POLICY", "INHERITED", "GIVEN")] + [sys.stdin.read(), sys.argv[1]]
        pathlib.Path(sys.argv[2]).with_name("seen").write_text("|".join(out))
        """
    )
    assert execute_local(spec, tmp_path, {"GIVEN": "1"}) == 0
    assert (tmp_path / "seen").read_text(encoding="utf-8") == "PASSIVE|yes|1||--config"
    assert execute_local(spec, tmp_path, {"GIVEN": "1", "OMP_WAIT_POLICY": "ACTIVE"}) == 0
    assert (tmp_path / "seen").read_text(encoding="utf-8").startswith("ACTIVE|")


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1), (2, 2), (130, 130), (143, 143), (7, 1)])
def test_exit_codes_come_back(script: Callable[[str], Runspec], tmp_path: Path, code: int, expected: int) -> None:
    assert execute_local(script(f"raise SystemExit({code})"), tmp_path, {}) == expected


def test_a_killed_child_counts_as_failed_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(-signal.SIGKILL) == 1
    assert capsys.readouterr().err.startswith("error: the job was killed by SIGKILL\n")
    assert exit_code(-signal.SIGTERM) == 1
    assert exit_code(-signal.SIGINT) == 130


TERM = [signal.SIGTERM]


@pytest.mark.parametrize(
    ("received", "code", "left", "expected"),
    [
        ([], 2, "2", 2),
        ([], 1, "2", 2),  # rank 0 has refused, and another rank met the same error in other words
        (TERM, 143, "143", 143),
        (TERM, 1, "143", 143),  # another rank failed because rank 0 was about to leave
        (TERM, -signal.SIGTERM, "143", 143),  # another one did not listen yet
        (TERM, -signal.SIGABRT, "143", 143),  # a library's watchdog, which has lost rank 0
        ([], 143, "143", 143),  # rank 0 alone was asked to leave, or a limit of the script's own was reached
        ([], 1, "143", 1),  # another rank failed, and torchrun stopped rank 0
        ([], -signal.SIGKILL, "143", 1),
        ([], -signal.SIGKILL, "2", 1),
        ([], 1, "0", 1),  # another rank failed after rank 0 was done
        (TERM, 143, "0", 0),
        ([], 0, "143", 143),  # workers are started again where they end with another code
        ([], 143, "", 143),  # rank 0 had no space for its exit code
        ([], 1, None, 1),
    ],
)
def test_the_exit_code_of_several_ranks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    received: list[int],
    code: int,
    left: str | None,
    expected: int,
) -> None:
    """`code`: of the process that ended first; `left`: what rank 0 wrote."""

    def wait(*arguments: object) -> int:
        if left is not None:
            (tmp_path / "left").write_text(left, encoding="utf-8")
        return code

    monkeypatch.setattr("nemo_runspec.execution.local._wait", wait)
    command = under_torchrun([sys.executable, "train.py"])
    assert run_command(command, {}, None, tmp_path / "left", list(received)) == expected


@pytest.mark.parametrize(
    ("launcher", "node", "code"),
    [(under_torchrun, "1", 1), (under_torchrun, "1", -signal.SIGABRT), (under_ft_launcher, "0", 1)],
)
def test_what_fails_once_rank_0_has_saved_elsewhere_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Callable[..., list[str]], node: str, code: int
) -> None:
    """Rank 0 is on another node, or its launcher says 1 of whatever happened."""
    (tmp_path / "left").write_text("143", encoding="utf-8")
    monkeypatch.setattr("nemo_runspec.execution.local._wait", lambda *arguments: code)
    command = launcher([sys.executable, "train.py"])
    assert run_command(command, {"RUNSPEC_NODE_RANK": node}, None, tmp_path / "left") == 143


LAUNCHER = """
import sys
from pathlib import Path
from nemo_runspec.runspec import parse
from nemo_runspec.execution.local import execute_local
sys.exit(execute_local(parse(sys.argv[1]), Path(sys.argv[2]), {}))
"""

LISTENER = """
import os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[2]).parent
got = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, lambda n, frame: got.append(n))
(here / "pid").write_text(str(os.getpid()))
while not got:
    time.sleep(0.01)
(here / "got").write_text(str(got[0]))
sys.exit(130 if got[0] == signal.SIGINT else 143)
"""


def wait_for(path: Path, seconds: float = 20.0) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.is_file() and (text := path.read_text(encoding="utf-8")):
            return text
        time.sleep(0.01)
    raise AssertionError(f"{path} did not appear")


def launch(spec: Runspec, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LAUNCHER, str(spec.script_path), str(folder)])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)])
def test_signals_reach_the_child_and_its_answer_comes_back(
    script: Callable[[str], Runspec], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    parent = launch(script(LISTENER), tmp_path)
    wait_for(tmp_path / "pid")
    parent.send_signal(number)
    assert parent.wait(timeout=20) == code
    assert int(wait_for(tmp_path / "got")) == number


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_killed_parent_leaves_no_child_behind(script: Callable[[str], Runspec], tmp_path: Path) -> None:
    parent = launch(script(LISTENER), tmp_path)
    child = int(wait_for(tmp_path / "pid"))
    parent.kill()
    parent.wait(timeout=20)
    end = time.monotonic() + 10
    while _runs(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not _runs(child)


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_worker_of_torchrun_ends_with_it(script: Callable[[str], Runspec], tmp_path: Path) -> None:
    spec = script("from nemo_runspec.script import begin_script\nbegin_script()\n" + LISTENER)
    stands_for_torchrun = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
    command = [sys.executable, "-c", stands_for_torchrun, spec.script_path, "--config", tmp_path / "train.yaml"]
    parent = subprocess.Popen(command, env={**os.environ, EXIT_CODE_FILE: str(tmp_path / "code")})
    child = int(wait_for(tmp_path / "pid"))
    parent.kill()
    parent.wait(timeout=20)
    end = time.monotonic() + 10
    while _runs(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False


def test_a_child_that_ignores_ctrl_c_is_ended_by_the_third(script: Callable[[str], Runspec], tmp_path: Path) -> None:
    spec = script(
        """
        import pathlib, signal, sys, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pathlib.Path(sys.argv[2]).with_name("pid").write_text("up")
        time.sleep(60)
        """
    )
    parent = launch(spec, tmp_path)
    wait_for(tmp_path / "pid")
    for _ in range(3):
        parent.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert parent.wait(timeout=20) == 1


@pytest.mark.slow
def test_torchrun_starts_the_processes_and_gives_back_rank_0_s_exit_code(
    script: Callable[[str], Runspec],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    spec = script(
        """
        import os, pathlib, sys, time
        from nemo_runspec.errors import Preempted, run_main
        def main():
            here = pathlib.Path(sys.argv[2]).parent
            (here / f"rank{os.environ['RANK']}").write_text(os.environ["WORLD_SIZE"])
            while os.environ["RANK"] == "1" or not (here / "rank1").exists():
                time.sleep(0.05)  # torchrun ends the other ranks when the first one has left
            raise Preempted("ckpt")
        sys.exit(run_main(main))
        """
    )
    spec = dataclasses.replace(spec, run=dataclasses.replace(spec.run, launch="torchrun"))
    gpus(monkeypatch, 2)
    assert execute_local(spec, tmp_path, {}) == 143
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0", "rank1"]
    assert (tmp_path / "rank1").read_text(encoding="utf-8") == "2"
    stopped = "error: stopped on a signal; checkpoint saved: ckpt\nthe same command resumes from it\n"
    assert capfd.readouterr().err == stopped  # rank 0 has said it, and torchrun adds nothing
    killed = script("import os, time\ntime.sleep(60) if os.environ['RANK'] == '0' else os.kill(os.getpid(), 9)")
    spec = dataclasses.replace(spec, script_path=killed.script_path)
    assert execute_local(spec, tmp_path, {}) == 1
    assert capfd.readouterr().err.startswith("error: the job was killed by SIGKILL\nout of memory, perhaps;")
    failed = script(
        """
        from nemo_runspec.script import begin_script
        begin_script()
        import os, pathlib, sys, time
        from nemo_runspec.errors import RunFailed, run_main
        def main():
            reads = pathlib.Path(sys.argv[2]).with_name("reads")
            if os.environ["RANK"] == "0":
                reads.touch()
                time.sleep(60)  # torchrun ends it with SIGTERM
            while not reads.exists():
                time.sleep(0.05)
            raise RunFailed("a bad record")
        sys.exit(run_main(main))
        """
    )
    spec = dataclasses.replace(spec, script_path=failed.script_path)
    assert execute_local(spec, tmp_path, {}) == 1
    assert "error: a bad record\n" in capfd.readouterr().err
