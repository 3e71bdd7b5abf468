"""Every command has a help page, derived from the script that it starts; that of a missing script cannot be made."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from quick_commands import COMMAND_OF
from typer.testing import CliRunner

from nemo_runspec.errors import UserError
from nemo_runspec.runspec import parse
from nemotron.cli.main import app
from nemotron.kit.steps import read_recipe, recipe_folders


def command_lines(command: object, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """The words of `command` and of every command and group below it, each with the command itself."""
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from command_lines(below, (*words, name))


COMMANDS = dict(command_lines(COMMAND_OF(app)))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_a_help_page(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage: " in result.output


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nano3 pretrain --keys", ["optimizer.lr ", "a number > 0, default 0.001: peak learning rate", "rng.seed "]),
        ("nano3 data prep pretrain -c tiny --keys", ["sources.0.paths ", "sources.0.weight ", "tokenizer.vocab_size "]),
        ("nano3 data prep rl --keys -c published", ["valid_rows "]),  # the script that this config names
        ("nano3 rl rlvr --keys -c tiny", ["an integer >= 1, default 1000, in tiny 20: GRPO steps"]),
        ("data curate language --keys", ["threshold "]),
        ("nano2 pretrain --keys", ["lr ", "a number > 0, default 0.004: the smaller the model, the larger"]),
    ],
)
def test_keys_are_listed_with_what_they_are(line: str, expected: list[str]) -> None:
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.output
    for words in expected:
        assert words in result.output
    assert all(re.fullmatch(r"  \S+ +\S.*", row) for row in result.output.splitlines()), result.output


def test_without_c_every_command_takes_the_config_called_default() -> None:
    defaults = {
        (recipe.folder.name, parse(step.script).config.default)
        for recipe in map(read_recipe, recipe_folders())
        for step in recipe.steps
    }
    assert {default for family, default in defaults if family != "nano2"} == {"default"}
    assert {default for family, default in defaults if family == "nano2"} == {"tiny"}  # the tutorial has no other


def test_what_a_config_is_stands_on_the_page_as_a_whole_sentence() -> None:
    page = CliRunner().invoke(app, ["data", "curate", "quality", "--help"]).output
    about = re.findall(r"^  (?:default|tiny) +(\S.*)$", page, re.MULTILINE)
    assert len(about) == 2 and all(line.endswith(".") for line in about), about


def test_scale_is_an_option_of_data_preparation_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = CliRunner().invoke(app, ["nano3", "data", "prep", "rl", "--help"]).output
    assert "--scale SCALE      tiny 1 %, small 10 %, medium 30 % of every source, your own included" in page
    for line in (
        "nano3 data prep rl --scale small -c tiny --dry-run",
        "nano3 data prep rl -c tiny --dry-run --scale=small",
    ):
        done = CliRunner().invoke(app, line.split())
        assert done.exit_code == 0 and "scale_all=small" in done.output, done.output
    with pytest.raises(UserError, match="scale_all = 'smal': must be one of 'tiny', 'small', 'medium', 'full' or null"):
        CliRunner().invoke(
            app, ["nano3", "data", "prep", "rl", "-c", "tiny", "--scale", "smal"], catch_exceptions=False
        )
    with pytest.raises(UserError, match="unknown option --scale"):
        CliRunner().invoke(app, ["nano3", "rl", "rlvr", "--scale", "small"], catch_exceptions=False)


def test_descriptions_of_commands_are_whole_sentences() -> None:
    rows = CliRunner().invoke(app, ["data", "curate", "--help"]).output.split("Commands:\n")[1]
    assert "Tell the language of every document and keep the wanted ones." in " ".join(rows.split())


@pytest.mark.parametrize(
    "group", [words for words, command in COMMANDS.items() if hasattr(command, "commands")], ids=" ".join
)
def test_no_description_of_a_command_is_cut(group: tuple[str, ...]) -> None:
    assert "..." not in CliRunner().invoke(app, [*group, "--help"]).output.split("Commands:\n")[1]
