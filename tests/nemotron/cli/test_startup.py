"""What help and dry run load: next to nothing, so they answer at once (benchmarks/startup.py has the times)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from nemo_runspec.errors import run_main
from nemotron.cli.tool import become_tool

ROOT = Path(__file__).resolve().parents[3]
HEAVY = (
    "torch",
    "numpy",
    "pyarrow",
    "transformers",
    "tokenizers",
    "jinja2",
    "rich",
    "nemotron.recipes",
    "nemotron.stack",
    "nemotron.data_prep",
)
CONFIG = ("omegaconf", "pydantic", "asyncio")


def run(arguments: list[str], modules: tuple[str, ...], cwd: Path) -> tuple[str, str]:
    """Standard output of one `nemotron` process, and which of `modules` it had loaded at its end."""
    code = (
        "import sys\nfrom nemotron.cli.main import _run\n"
        f"sys.argv = ['nemotron', *{arguments!r}]\n"
        "try:\n    code = _run()\nexcept SystemExit as leave:\n    code = leave.code\n"
        f"assert not code, code\nprint('loaded:', *[m for m in {modules!r} if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out, _, loaded = done.stdout.rpartition("loaded:")
    return out, loaded.strip()


def test_help_loads_neither_libraries_nor_configs(tmp_path: Path) -> None:
    out, loaded = run(["--help"], (*HEAVY, *CONFIG, "yaml"), tmp_path)
    assert "nano3" in out
    assert loaded == ""


@pytest.mark.parametrize(
    ("line", "modules"),
    [("nano3 pretrain --help", HEAVY + CONFIG), ("nano3 data prep pretrain -c tiny --dry-run", HEAVY)],
)
def test_what_reads_configs_loads_nothing_heavy_and_writes_nothing(
    line: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    out, loaded = run(line.split(), modules, tmp_path)
    assert "nano3-pretrain-data-tiny" in out
    assert loaded == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["nemotron", "nano3", "pipe", "-c", "tiny"], ["nemo_runspec", "show", "train.py"]])
def test_ctrl_c_while_the_command_is_loading_is_one_line(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "typer.py").write_text("import pathlib, time\npathlib.Path('loading').touch()\ntime.sleep(100)\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"}
    process = subprocess.Popen(
        [sys.executable, "-m", *words], cwd=tmp_path, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )  # fmt: skip
    while not (tmp_path / "loading").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, "", "error: interrupted\n")


def test_ctrl_c_while_a_tool_takes_the_place_of_its_command_waits_until_it_can_be_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worked = []

    def begin_to_load(*words: object) -> None:  # what is blocked stays so in the program that exec starts
        signal.raise_signal(signal.SIGINT)  # to this thread, which holds it back: those of pytest-xdist do not
        worked.append("imports")

    monkeypatch.setattr(os, "execve", begin_to_load)
    become_tool("data_inspect.py")
    assert run_main(lambda: worked.append("main")) == 130
    assert (worked, capsys.readouterr().err) == (["imports"], "error: interrupted\n")


def test_the_commands_are_those_that_the_package_installs() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"nemotron": "nemotron.cli.entry:main", "nemo-runspec": "nemo_runspec.entry:main"}
