"""A group that runs by itself: which words are a sub-command, and which belong to the group's own function."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from nemo_runspec.errors import UserError
from nemotron.cli.groups import GroupThatRuns, _command_of


def build() -> tuple[typer.Typer, list[tuple[str, list[str]]]]:
    calls: list[tuple[str, list[str]]] = []
    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
    app = typer.Typer()
    group = typer.Typer(cls=GroupThatRuns, invoke_without_command=True, context_settings=anything)

    @group.callback()
    def itself(ctx: typer.Context) -> None:
        if ctx.invoked_subcommand is None:
            calls.append(("rl", list(ctx.args)))

    @group.command("rlvr", context_settings=anything)
    def rlvr(ctx: typer.Context) -> None:
        calls.append(("rlvr", list(ctx.args)))

    app.add_typer(group, name="rl")
    app.command("other")(lambda: None)
    return app, calls


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rl", ("rl", [])),
        ("rl -c tiny", ("rl", ["-c", "tiny"])),
        ("rl -c tiny grpo.lr=1 --dry-run", ("rl", ["-c", "tiny", "grpo.lr=1", "--dry-run"])),
        ("rl --config=tiny", ("rl", ["--config=tiny"])),
        ("rl -c rlvr", ("rl", ["-c", "rlvr"])),
        ("rl rlvr -c tiny", ("rlvr", ["-c", "tiny"])),
        ("rl -c tiny rlvr a.b=2", ("rlvr", ["-c", "tiny", "a.b=2"])),
        ("rl --dry-run rlvr", ("rlvr", ["--dry-run"])),
    ],
)
def test_words_go_where_they_belong(line: str, expected: tuple[str, list[str]]) -> None:
    app, calls = build()
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.output
    assert calls == [expected]


@pytest.mark.parametrize("line", ["rl rlhv", "rl -c tiny rlvvr"])
def test_a_misspelt_sub_command_is_refused(line: str) -> None:
    app, calls = build()
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 2
    assert "rlvr" in result.output
    assert calls == []


@pytest.mark.parametrize("line", ["rl --help", "rl -c tiny -h"])
def test_help_of_the_group_lists_its_sub_commands_and_runs_nothing(line: str) -> None:
    app, calls = build()
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0
    assert "rlvr" in result.output
    assert calls == []


def test_the_first_public_function_of_a_command_file_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("nemotron.cli.commands.toy.train")
    exec("class Settings: ...\ndef _private(): ...", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "nemotron.cli.commands.toy", ModuleType("nemotron.cli.commands.toy"))
    step: Any = SimpleNamespace(name="train", command="nemotron toy train")
    with pytest.raises(UserError, match=r"toy/train\.py: no public function in it"):
        _command_of(step, None, module.__name__)  # type: ignore[arg-type]
    exec("def train(): ...\ndef launch(): ...", vars(module))
    assert _command_of(step, None, module.__name__).__name__ == "train"  # type: ignore[arg-type]
