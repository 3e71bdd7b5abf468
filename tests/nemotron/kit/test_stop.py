"""A signal sets a flag; the work goes on until it polls, and leaves with the exit code that belongs to the signal."""

from __future__ import annotations

import os
import signal
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


def test_work_that_finishes_in_spite_of_a_signal_is_no_failure() -> None:
    with StopFlag():
        os.kill(os.getpid(), signal.SIGTERM)


def test_data_work_leaves_at_once_and_only_one_signal_counts(capfd: pytest.CaptureFixture[str]) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
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
