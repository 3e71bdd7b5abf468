"""Processes that publish versions of the artifact `shared` in any registry, each with a payload of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nemo_runspec.artifacts import Registry

# Prints a line for each version that it has published.
PUBLISHER = """
import sys
from pathlib import Path
from nemo_runspec.artifacts import Registry
root, worker, count, work = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]) / sys.argv[2]
work.mkdir()
registry = Registry(root)
print("ready", flush=True)
sys.stdin.readline()
for number in range(count):
    (work / "who").write_text(f"{worker} {number}")
    print(registry.publish("shared", work, {"type": "T", "who": worker}).version, flush=True)
"""


def start_publisher(root: object, worker: str, count: int, folder: Path, **env: str) -> subprocess.Popen[str]:
    """One that waits for `go` before it publishes `count` versions; it works in `folder`."""
    command = [sys.executable, "-c", PUBLISHER, str(root), worker, str(count), str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | env)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def published(registry: Registry) -> list[tuple[str, int]]:
    """(worker, number) of every version, in version order, each checked byte by byte."""
    versions = []
    for number in registry.versions("shared"):
        assert registry.verify(f"shared:{number}") == []
        version = registry.resolve_verified(f"shared:{number}")
        worker, index = (version.path / "who").read_text().split()
        assert worker == version.record["who"]
        versions.append((worker, int(index)))
    return versions
