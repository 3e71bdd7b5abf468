"""Shortcuts for tests that try what the command line takes, hundreds of times in one process."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import typer.main

from nemo_runspec.git import ask_git
from nemo_runspec.packaging import BundlePlan, PackedCode

# Of a Typer there is one tree of commands, whenever it is asked for; that of `nemotron` takes 50 ms to make.
COMMAND_OF = functools.cache(typer.main.get_command)
# What git lists of this project does not change meanwhile.
ASKED_ONCE = functools.cache(ask_git)


def make_command_line_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tree of commands."""
    monkeypatch.setattr("typer.main.get_command", COMMAND_OF)
    monkeypatch.setattr("typer.testing._get_command", COMMAND_OF)


def pack_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out of a bundle the copy of every file of this project, and ask git once which these are:
    tests/nemo_runspec/test_packaging.py has both."""

    def pack(plan: BundlePlan, folder: Path) -> PackedCode:
        folder.mkdir(parents=True)
        return PackedCode("0" * 64, 0)

    monkeypatch.setattr("nemo_runspec.bundle.pack_code", pack)
    monkeypatch.setattr("nemo_runspec.packaging.ask_git", ASKED_ONCE)
