"""Scripts and commands as a user would start them, in subprocesses, and a registry that several of them share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nemotron.recipes
from nemo_runspec.artifacts import Registry

RECIPES = Path(nemotron.recipes.__file__).parent
NANO3 = RECIPES / "nano3"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def start(root: Path, command: Sequence[object], stderr: int = subprocess.PIPE, **env: str) -> subprocess.Popen[str]:
    """`python COMMAND` in `root`, in a session of its own, so that it can be killed with all its children."""
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **env}
    return subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=root, env=os.environ | env, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
    )  # fmt: skip


class House:
    """Commands are words after `python`; `output` is the folder of their run directories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.registry = Registry(root / "artifacts")

    def start(self, command: list[object], output: str = "output") -> subprocess.Popen[str]:
        """Start a script."""
        folders = {"RUNSPEC_ARTIFACTS_ROOT": self.root / "artifacts", "RUNSPEC_OUTPUT_ROOT": self.root / output}
        return start(self.root, command, **{name: str(folder) for name, folder in folders.items()})

    def run(self, command: list[object], output: str = "output") -> str:
        """Run a script to its end and return what it wrote to stderr."""
        process = self.start(command, output)
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
        return errors

    def run_and_stop(self, command: list[object], output: str, steps: int, number: signal.Signals) -> int:
        """Start a training script, send it `number` once `steps` steps are logged; the exit code."""
        process = self.start(command, output)
        deadline = time.monotonic() + 120
        while len(self.steps(output)) < steps:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(number)
        process.communicate(timeout=60)
        return process.returncode

    def records(self, output: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """The complete records of a log of the one run under `output`, wall times left out."""
        lines = [
            line
            for path in (self.root / output).glob(f"*/*/*/{name}")
            for line in path.read_text().splitlines(keepends=True)
        ]
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [{k: v for k, v in record.items() if "time" not in k and "seconds" not in k} for record in records]

    def steps(self, output: str) -> list[dict[str, Any]]:
        """The record of each training step; none is logged twice."""
        steps = [record for record in self.records(output) if "loss" in record or "reward" in record]
        assert len({record["step"] for record in steps}) == len(steps)
        return steps

    def digest(self, name: str) -> str:
        """Payload digest of the newest version, or of `name:version`."""
        return self.registry.resolve(name).digest
