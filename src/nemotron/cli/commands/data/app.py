"""The commands of `nemotron data`, as a list. What each one does stands in its own file."""

from __future__ import annotations

import typer

from nemotron.cli.groups import DataGroup

data = typer.Typer(cls=DataGroup, no_args_is_help=True, help="Your data: curate, tokenise, pack, look at it.")
