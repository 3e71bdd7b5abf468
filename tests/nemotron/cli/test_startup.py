"""The command line answers at once: the limits of CPU time for help and dry run, and what neither of them loads."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HEAVY = (
    "torch",
    "numpy",
    "pyarrow",
    "transformers",
    "tokenizers",
    "nemotron.recipes",
    "nemotron.stack",
    "nemotron.data_prep",
)


def cpu_seconds(arguments: list[str], cwd: Path) -> float:
    """CPU time of one `nemotron` process; wall time would measure the neighbours on this machine too."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", "from nemotron.cli.main import main; main()", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(command, cwd=cwd, env=env, check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    ("line", "limit"),
    [("--help", 0.25), ("nano3 pretrain --help", 0.25), ("nano3 data prep pretrain -c tiny --dry-run", 0.5)],
)
def test_it_starts_fast(line: str, limit: float, tmp_path: Path) -> None:
    assert min(cpu_seconds(line.split(), tmp_path) for _ in range(4)) < limit


def test_a_dry_run_loads_nothing_heavy_and_writes_nothing(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom nemotron.cli.main import _run\n"
        "sys.argv = ['nemotron', 'nano3', 'data', 'prep', 'pretrain', '-c', 'tiny', '--dry-run']\n"
        f"assert _run() == 0\nprint('loaded:', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("loaded: []\n")
    assert "nano3-pretrain-data-tiny" in done.stdout
    assert list(tmp_path.iterdir()) == []
