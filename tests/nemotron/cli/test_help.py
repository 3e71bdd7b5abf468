"""Every command has a help page, derived from the script that it starts; that of a missing script cannot be made."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

from nemotron.cli.main import app


def command_lines(command: object, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command and group below `command`."""
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from command_lines(below, (*words, name))


@pytest.mark.parametrize("words", list(command_lines(typer.main.get_command(app))), ids=" ".join)
def test_every_command_has_a_help_page(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage: " in result.output


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nano3 pretrain --keys", ["optimizer.lr ", "a number > 0: peak learning rate", "rng.seed "]),
        ("nano3 data prep pretrain -c tiny --keys", ["sources.0.paths ", "sources.0.weight ", "tokenizer.vocab_size "]),
        ("nano3 data prep rl --keys -c published", ["valid_rows "]),  # the script that this config names
        ("data curate language --keys", ["threshold "]),
    ],
)
def test_keys_are_listed_with_what_they_are(line: str, expected: list[str]) -> None:
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.output
    for words in expected:
        assert words in result.output
    assert all(re.fullmatch(r"  \S+ +\S.*", row) for row in result.output.splitlines()), result.output


def test_descriptions_of_commands_are_whole_sentences() -> None:
    rows = CliRunner().invoke(app, ["data", "curate", "--help"]).output.split("Commands:\n")[1]
    assert "Tell the language of every document and keep the wanted ones." in " ".join(rows.split())
    assert "..." not in rows
