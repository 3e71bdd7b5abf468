"""The options of `nemotron` itself, and what a shell that completes a word is answered."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest

import nemo_runspec
from nemo_runspec.installation import install_line
from nemotron.cli import main as nemotron


@pytest.mark.parametrize(("words", "word", "completions"), [
    ("nemotron na", 1, ["nano3", "nano2"]),
    ("nemotron nano3 data prep ", 4, ["pretrain", "sft", "rl", "dpo"]),
    ("nemotron data curate p", 3, ["pii"]),
    ("nemotron nano3 rl ", 3, ["rlvr", "genrm", "rlhf", "dpo"]),
    ("nemotron super3 rl ", 3, ["rlvr", "genrm", "rlhf", "mtp-healing"]),
    ("nemotron lightning35 data", 2, ["data-pretrain", "data-sft", "data-rl"]),
])  # fmt: skip
def test_a_shell_completes_commands(
    words: str, word: int, completions: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_NEMOTRON_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(word))
    monkeypatch.setattr("sys.argv", ["nemotron"])
    with pytest.raises(SystemExit) as left:
        nemotron.main()
    assert left.value.code == 0
    assert capsys.readouterr().out.split() == completions


@pytest.mark.parametrize("module", ["nemotron", "nemo_runspec"])
def test_version(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [module, "--version"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module(module, run_name="__main__")
    assert left.value.code == 0
    assert capsys.readouterr().out == f"nemotron-cookbook {nemo_runspec.__version__}\n"


@pytest.mark.parametrize(
    "line",
    ["nano3 pretrain -c tiny", "nano3 pipe -c tiny --dry-run", "nano3 sft -c tiny --dry-run", "artifacts add ."],
)
def test_without_torch_what_needs_it_is_refused_at_once(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else find_spec(name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(tmp_path / "output"))
    monkeypatch.setattr("sys.argv", ["nemotron", *line.split()])
    with pytest.raises(SystemExit) as left:
        nemotron.main()
    assert left.value.code == 2
    assert f"needs torch, which is not installed\n{install_line('train')}\n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
