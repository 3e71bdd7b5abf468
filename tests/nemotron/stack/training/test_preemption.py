"""Signals set a flag; the process lives on until the loop asks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from nemo_runspec.errors import Interrupted, Preempted
from nemotron.stack.training.preemption import StopRequested, StopSignal


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)])
def test_signal_is_remembered_and_mapped_to_its_exit_code(number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.requested and stop.exit_code is None
        os.kill(os.getpid(), number)
        assert stop.requested and stop.received == number and stop.exit_code == code
        error = stop.error(Path("somewhere/step-00000003"))
        assert error.exit_code == code and "step-00000003" in error.message
        assert isinstance(error, Interrupted if code == 130 else Preempted)
    assert signal.getsignal(number) is before


def test_second_ctrl_c_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same Ctrl-C once more, forwarded by a launcher
        assert stop.requested
        later = time.monotonic() + 2
        monkeypatch.setattr(time, "monotonic", lambda: later)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)


def test_first_signal_decides() -> None:
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.exit_code == 143


def test_work_below_a_loop_polls() -> None:
    with StopSignal() as stop:
        stop.poll()
        stop.check(Path("somewhere/step-00000003"))
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(StopRequested):
            stop.poll()
        with pytest.raises(Preempted, match="step-00000003"):
            stop.check(Path("somewhere/step-00000003"))
