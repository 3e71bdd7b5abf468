"""A signal while a script still imports torch: one line and the exit code, no traceback."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from .house import NANO3, start

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")]

SCRIPTS = [NANO3 / stage for stage in ("stage0_pretrain/train.py", "stage1_sft/train.py", "stage2_rl/rlvr.py")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.parent.name)
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "error: interrupted"),
        (signal.SIGTERM, 143, "error: stopped by SIGTERM"),
        (signal.SIGUSR1, 143, "error: stopped by SIGUSR1"),
    ],
)
def test_a_signal_while_torch_is_imported(
    tmp_path: Path, script: Path, number: signal.Signals, code: int, line: str
) -> None:
    left = tmp_path / "exit_code"
    process = start(tmp_path, [script, "--config", "tiny"], RUNSPEC_EXIT_CODE_FILE=str(left))
    deadline = time.monotonic() + 60
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert errors == f"{line}\nthe same command starts again\n"
    assert left.read_text() == f"{code}\n"  # for a launcher over torchrun, which reduces all codes to 1
