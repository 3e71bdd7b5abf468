"""`nano3 chat` finds the model and lets the chat script take its place, with the settings that every local job gets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_runspec.artifacts import Registry
from nemo_runspec.execution.local import CPU_SETTINGS
from nemotron.cli.main import _run
from nemotron.cli.recipe_dir import recipe_dir

Start = Callable[..., tuple[list[str], dict[str, str]]]


class Started(Exception):
    """Raised where the process would be replaced."""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """`start("--stage", "sft")`: the words after the interpreter, and the environment, that chat would start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "artifacts"))
    registry = Registry(tmp_path / "artifacts")
    for name in ("nano3-pretrain-model-tiny", "nano3-rl-model-tiny"):
        (tmp_path / "payload").write_text(name)
        record = {"type": "Model", "types": ["Model"], "fields": {}, "metrics": {}, "inputs": {}}
        registry.publish(name, tmp_path / "payload", record)
    calls: list[tuple[list[str], dict[str, str]]] = []

    def replace_process(path: str, words: list[str], environment: dict[str, str]) -> None:
        assert words[0] == path
        calls.append((words[1:], environment))
        raise Started

    monkeypatch.setattr(os, "execve", replace_process)

    def run(*words: str) -> tuple[list[str], dict[str, str]]:
        monkeypatch.setattr("sys.argv", ["nemotron", "nano3", "chat", *words])
        with pytest.raises(Started):
            _run()
        return calls[-1]

    return run


def test_the_script_gets_the_model_and_the_options(start: Start, tmp_path: Path) -> None:
    words, _ = start("--no-thinking", "--temperature=0.5", "What is 1 + 1?")
    assert words[0] == str(recipe_dir("tools") / "chat.py") and Path(words[0]).is_file()
    assert f"--model={Registry(tmp_path / 'artifacts').resolve('nano3-rl-model-tiny').path}" in words
    assert {"--no-thinking", "--temperature=0.5", "--prompt=What is 1 + 1?"} <= set(words)
    assert not {"--complete", "--debug"} & set(words)


def test_a_base_model_completes_text(start: Start) -> None:
    assert "--complete" in start("--stage", "pretrain")[0]


def test_the_script_gets_the_cpu_settings_unless_the_user_has_set_them(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CPU_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert start()[1].items() >= CPU_SETTINGS.items()
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert start()[1]["OMP_WAIT_POLICY"] == "ACTIVE"


def test_debug_goes_on_to_the_script(start: Start) -> None:
    assert "--debug" in start("--debug")[0]
