"""nemotron models: the commands about architectures, as a list."""

from __future__ import annotations

import typer

from nemotron.cli.commands.models.show import show

models = typer.Typer(help="Architectures: layers, parameters, memory, FLOPs.", no_args_is_help=True)
models.command("show")(show)
