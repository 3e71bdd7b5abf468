#!/usr/bin/env python3
"""`docker run` as NeMo Evaluator's launcher calls it, without a daemon: volumes at their places, by bubblewrap.

As the program `docker` on the PATH. The image is not looked at: its programs are those on the PATH.
"""

import os
import sys
from argparse import ArgumentParser
from pathlib import Path


def run(words: list[str]) -> None:
    parser = ArgumentParser()
    for flag in ("--shm-size", "--network", "--name"):
        parser.add_argument(flag)
    parser.add_argument("--volume", "-v", action="append", default=[])
    parser.add_argument("-e", action="append", default=[])
    parser.add_argument("image")
    parser.add_argument("command", nargs="...")
    given = parser.parse_args(words)
    places = []
    for entry in Path("/").iterdir():
        places += (
            ["--symlink", str(entry.readlink()), str(entry)]
            if entry.is_symlink()
            else ["--dev-bind", str(entry), str(entry)]
        )
    for volume in given.volume:
        places += ["--bind", *volume.split(":")[:2]]
    os.execvp("bwrap", ["bwrap", *places, "--chdir", "/", *given.command])


if sys.argv[1] == "run":
    run(sys.argv[2:])
sys.exit(0 if sys.argv[1] in ("cp", "rm") else 1)  # results lie where the volume is already
