"""Where somebody works: a folder with env.toml and a small script, and the commands that are given there."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

from .slurm import wait_for

MODULES = {"nemotron": "nemotron.cli.main", "nemo-runspec": "nemo_runspec.cli"}
# Names the job that runs the small script.
TOY = "toy-job-default"
BLOCK = """\
# /// script
# [tool.runspec]
# schema = "1"
# name = "toy/job"
# [tool.runspec.run]
# launch = "{launch}"
# ///
"""


class Command:
    """A command that has been started. `text` is all that it has printed so far, on stdout and stderr."""

    def __init__(self, words: list[str], env: dict[str, str], folder: Path, log: Path) -> None:
        self.log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                words, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
            )

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    @property
    def job(self) -> str:
        """The id of the Slurm job that it follows."""
        line = re.search(r"^job (\d+) ", self.text, re.M)
        assert line, self.text
        return line[1]

    def until(self, text: str) -> None:
        """Wait until it has printed `text`; fails where it ends without."""

        def is_printed() -> bool:
            ended = self.process.poll() is not None
            assert text in self.text or not ended, self.text
            return text in self.text

        wait_for(text, is_printed, 180)

    def end(self, code: int = 0) -> str:
        """Wait for its end, which has to be this exit code; returns all that it printed."""
        self.process.wait(280)
        assert self.process.returncode == code, self.text
        return self.text


class Desk:
    """A folder in which `nemotron` and `nemo-runspec` are called; what they write is in `folder/output`.

    `env` is the environment of the commands. Nothing of the person who runs the tests is in it but PATH and Python.
    """

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        (folder / "toy" / "config").mkdir(parents=True)
        (folder / "toy" / "config" / "default.yaml").write_text("value: 1\n")
        self.folder = folder
        own = {"HOME": str(folder / "home"), "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.env = env | own
        self._logs = (folder / f"command-{number}.log" for number in itertools.count())

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def profile(self, name: str, **keys: object) -> None:
        """Add a profile to env.toml."""
        table = "".join(f"{key} = {_toml(value)}\n" for key, value in keys.items())
        with (self.folder / "env.toml").open("a", encoding="utf-8") as file:
            file.write(f"\n[{name}]\n{table}")

    def script(self, text: str, launch: str = "torchrun") -> str:
        """Write the small script; `text` follows its runspec block. Returns its path, for `nemo-runspec run`."""
        (self.folder / "toy" / "job.py").write_text(BLOCK.format(launch=launch) + text, encoding="utf-8")
        return "toy/job.py"

    def words(self, line: str, *words: str) -> list[str]:
        """`nemotron …` or `nemo-runspec …`, as the words that start the program of this checkout."""
        program, *rest = line.split()
        return [sys.executable, "-c", f"from {MODULES[program]} import main; main()", *rest, *words]

    def start(self, line: str, *words: str, **env: str) -> Command:
        """Start a command as a user types it; words that hold blanks follow one by one."""
        return Command(self.words(line, *words), self.env | env, self.folder, next(self._logs))

    def run(self, line: str, *words: str, code: int = 0, **env: str) -> str:
        """Run a command to its end, which has to be this exit code; returns all that it printed."""
        return self.start(line, *words, **env).end(code)


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {json.dumps(text)}" for key, text in value.items()) + " }"
    return json.dumps(value)
