"""A signal sets a flag; the work goes on until it polls, and leaves with the exit code that belongs to the signal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_runspec.errors import Interrupted, RunspecError
from nemotron.kit.stop import StopFlag, StopRequested, stop_at_once

CHECKPOINT = Path("somewhere/step-00000003")


@pytest.mark.parametrize(
    ("number", "code", "before_a_checkpoint", "after_one"),
    [
        (signal.SIGTERM, 143, "stopped by SIGTERM; nothing was published", "checkpoint saved: somewhere/step-00000003"),
        (signal.SIGUSR1, 143, "stopped by SIGUSR1; nothing was published", "checkpoint saved: somewhere/step-00000003"),
        (
            signal.SIGINT,
            130,
            "interrupted; nothing was published",
            "interrupted; checkpoint saved: somewhere/step-0000",
        ),
    ],
)
@pytest.mark.parametrize("checkpoint", [None, CHECKPOINT])
def test_a_signal_ends_the_work_where_it_polls(
    number: signal.Signals, code: int, before_a_checkpoint: str, after_one: str, checkpoint: Path | None
) -> None:
    handler = signal.getsignal(number)
    with pytest.raises(RunspecError) as failure, StopFlag() as stop:
        stop.checkpoint = checkpoint
        stop.poll()
        os.kill(os.getpid(), number)
        try:
            stop.poll()
        except Exception as error:  # what a verifier or a parser catches
            pytest.fail(f"{error!r} passes for a failure of the work")
    assert failure.value.exit_code == code
    assert (after_one if checkpoint else before_a_checkpoint) in failure.value.message
    assert signal.getsignal(number) is handler


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_after_the_first_signal_a_later_ctrl_c_ends_the_work_at_once(
    monkeypatch: pytest.MonkeyPatch, first: signal.Signals
) -> None:
    with StopFlag() as stop:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGINT)  # the same Ctrl-C once more, forwarded by a launcher
        assert stop.received == first
        later = time.monotonic() + 2
        monkeypatch.setattr(time, "monotonic", lambda: later)
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler at the limit of the job: what is being saved goes on
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("fresh", "hint"),
    [
        ("", "the same command resumes from it"),
        ("1", "the command of this step, without --force, resumes from it"),  # the same one would start afresh
    ],
)
def test_what_resumes_from_the_checkpoint_is_the_command_without_force(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, fresh: str, hint: str
) -> None:
    monkeypatch.setenv("RUNSPEC_FRESH", fresh)
    with pytest.raises(RunspecError) as failure, StopFlag() as stop:
        stop.checkpoint = CHECKPOINT
        os.kill(os.getpid(), number)
        stop.poll()
    assert failure.value.hint == hint


def test_work_that_finishes_in_spite_of_a_signal_is_no_failure() -> None:
    with StopFlag():
        os.kill(os.getpid(), signal.SIGTERM)


def test_data_work_leaves_at_once_and_only_one_signal_counts(capfd: pytest.CaptureFixture[str]) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}
    try:
        stop_at_once()
        with pytest.raises(StopRequested) as request:
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)  # while the script cleans up
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert request.value.code == 143 and not isinstance(request.value, Interrupted)
    assert capfd.readouterr().err == "error: stopped by SIGTERM\nthe same command starts again\n"


LONG_WORK = """
# /// script
# [tool.runspec]
# name = "toy/work"
# [tool.runspec.run]
# launch = "direct"
# ///
import sys, time
from pathlib import Path
from nemo_runspec.errors import run_main
from nemotron.kit.stop import StopFlag, StopRequested
here = Path(__file__).parent

def main():
    with StopFlag() as stop:
        (here / "ready").touch()
        stop.checkpoint = here / "saved"
        try:
            while True:
                time.sleep(0.01)
                stop.poll()
        except StopRequested:
            print("saving", file=sys.stderr, flush=True)  # to a terminal that is no longer there
            print("saving", flush=True)
            stop.checkpoint.touch()
            raise

sys.exit(run_main(main))
"""
LAUNCH = """
import sys
from pathlib import Path
from nemo_runspec.runspec import parse
from nemo_runspec.execution.local import execute_local
sys.exit(execute_local(parse(sys.argv[1]), Path(sys.argv[2]), {}))
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.01)


def test_work_saves_when_its_terminal_is_closed(tmp_path: Path) -> None:
    """A command in a terminal and the script that it started: the terminal goes away, as a lost SSH connection."""
    (tmp_path / "work.py").write_text(LONG_WORK)
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-c", LAUNCH, str(tmp_path / "work.py"), str(tmp_path)])
    wait_for(tmp_path / "ready")
    os.close(terminal)
    wait_for(tmp_path / "saved")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 143


def test_work_under_nohup_goes_on_when_the_terminal_is_closed(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(LONG_WORK)
    work = subprocess.Popen(["nohup", sys.executable, tmp_path / "work.py"], stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "ready")
    work.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        work.wait(0.3)
    work.send_signal(signal.SIGTERM)
    assert "SIGTERM: stopping" in work.communicate(timeout=60)[1] and work.returncode == 143
