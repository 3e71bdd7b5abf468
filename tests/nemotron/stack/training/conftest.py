"""Training runs of the scripts' own loops, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

SOURCE_ROOT = Path(__file__).resolve().parents[4] / "src"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def launch(worker: Path, folder: Path, runs: Sequence[dict[str, Any]], processes: int) -> str:
    """Do `runs` with `worker` in one process, or in two under torchrun; what they wrote to stderr."""
    todo = folder / "runs.json"
    todo.write_text(json.dumps(runs))
    env = os.environ | {"PYTHONPATH": str(SOURCE_ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, *(TORCHRUN if processes == 2 else []), str(worker), str(todo)]
    # Ten times what it takes. A worker that hangs shows its stacks before, and ends.
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="session")
def launch_worker() -> Callable[[Path, Path, Sequence[dict[str, Any]], int], str]:
    """`launch`."""
    return launch
