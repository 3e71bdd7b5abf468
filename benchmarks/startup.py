#!/usr/bin/env python
"""How long the command line takes to answer: help, and a dry run, which validates all that a run does.

    python benchmarks/startup.py

Processor time and wall time of fresh processes, the smallest of ten; the ratio is to an interpreter that does nothing.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time

ROUNDS = 10
COMMAND = "from nemotron.cli.main import main; main()"
LINES = ("--help", "nano3 pretrain --help", "nano3 data prep pretrain -c tiny --dry-run")


def seconds(arguments: list[str], cwd: str) -> tuple[float, float]:
    """(wall, processor) seconds of `python ARGUMENTS`, the smallest of several each."""
    walls, cpus = [], []
    for _ in range(ROUNDS):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, *arguments], cwd=cwd, check=True, capture_output=True)
        walls.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(walls), min(cpus)


def main() -> None:
    """Print a line a command."""
    with tempfile.TemporaryDirectory() as cwd:
        nothing, _ = seconds(["-c", "pass"], cwd)
        print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}; python -c pass: {nothing:.3f} s")
        for line in LINES:
            wall, cpu = seconds(["-c", COMMAND, *line.split()], cwd)
            print(f"nemotron {line:46s} {wall:.3f} s wall, {cpu:.3f} s processor, {wall / nothing:.1f}x python -c pass")


if __name__ == "__main__":
    main()
