"""The options of `nemotron` itself, and what a shell that completes a word is answered."""

from __future__ import annotations

import runpy

import pytest

import nemo_runspec
from nemotron.cli import main as nemotron


@pytest.mark.parametrize(("words", "word", "completions"), [
    ("nemotron na", 1, ["nano3"]),
    ("nemotron nano3 data prep ", 4, ["pretrain", "sft", "rl"]),
    ("nemotron data curate p", 3, ["pii"]),
    ("nemotron nano3 rl ", 3, ["rlvr"]),
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
