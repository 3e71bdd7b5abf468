"""A `nemotron` process for tests, with output and artifacts in a folder of the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from forked import OF_OWN_COMMANDS, run_forked
from quick_commands import make_command_line_once

from nemotron.cli.main import _run, main
from nemotron.recipes.tools.options import run_tool

Nemotron = Callable[..., subprocess.CompletedProcess[str]]
Tool = Callable[..., tuple[str, dict[str, Any], dict[str, str]]]
Refused = Callable[[str], str]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _the_command_line_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    make_command_line_once(monkeypatch)


@pytest.fixture
def nemotron(tmp_path: Path) -> Nemotron:
    """`nemotron("nano3 pretrain -c tiny")` as a user would type it; extra words that hold blanks follow one by one."""

    def run(line: str, *words: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("RUNSPEC_", "NEMOTRON_"))}
        environment |= {"PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1", "COLUMNS": "120", **env}
        return run_forked(OF_OWN_COMMANDS, ["-m", "nemotron", *line.split(), *words], tmp_path, environment, stdin)

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Nemotron:
    """As `nemotron`, but in this process, and so does the tool run that would take its place: what that imports takes a
    second in a new one."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("RUNSPEC_", "NEMOTRON_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")

    def take_the_place(_: str, words: list[str], __: dict[str, str]) -> None:
        monkeypatch.setattr("sys.argv", words[1:])
        tool = import_module(f"nemotron.recipes.tools.{Path(words[1]).stem}")
        sys.exit(run_tool(tool.main, tool.Options))

    monkeypatch.setattr(os, "execve", take_the_place)

    def run(line: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            patch.setattr("sys.argv", ["nemotron", *line.split(), *words])
            with pytest.raises(SystemExit) as left:
                main()
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess([line, *words], int(left.value.code or 0), out, err)

    return run


@pytest.fixture
def refused(here: Nemotron) -> Refused:
    """`refused("plan nano4 pretrain")`: what a command says that ends with 2."""

    def run(line: str) -> str:
        done = here(line)
        assert done.returncode == 2, done
        return done.stderr

    return run


class _Started(Exception):
    """Raised where a script would take the place of the process."""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Tool:
    """`tool("nano3", "chat")`: the script that would be started, its options, and its environment."""
    calls: list[tuple[str, dict[str, Any], dict[str, str]]] = []

    def replace_process(path: str, words: list[str], environment: dict[str, str]) -> None:
        interpreter, script, options = words
        assert interpreter == path and Path(script).is_file()
        calls.append((Path(script).name, json.loads(options), environment))
        raise _Started

    monkeypatch.setattr(os, "execve", replace_process)

    def run(*words: str) -> tuple[str, dict[str, Any], dict[str, str]]:
        monkeypatch.setattr("sys.argv", ["nemotron", *words])
        with pytest.raises(_Started):
            _run()
        return calls.pop()

    return run
