"""Every command has a help page, derived from the script that it starts; that of a missing script cannot be made."""

from __future__ import annotations

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
