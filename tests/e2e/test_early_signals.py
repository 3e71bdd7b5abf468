"""A signal while a script still imports torch: one line and the exit code, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")]

SOURCE_ROOT = Path(__file__).resolve().parents[2] / "src"
NANO3 = SOURCE_ROOT / "nemotron" / "recipes" / "nano3"
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
    env = os.environ | {"PYTHONPATH": str(SOURCE_ROOT), "RUNSPEC_EXIT_CODE_FILE": str(left)}
    process = subprocess.Popen(
        [sys.executable, script, "--config", "tiny"], env=env, cwd=tmp_path, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert errors == f"{line}\nthe same command starts again\n"
    assert left.read_text() == f"{code}\n"  # for a launcher over torchrun, which reduces all codes to 1
