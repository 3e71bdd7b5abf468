"""nemotron FAMILY model: the commands that exchange models with other programs, as a list."""

from __future__ import annotations

import typer

from nemotron.cli.commands.model.export import export
from nemotron.cli.commands.model.import_model import import_model

model = typer.Typer(help="Models to and from Hugging Face: export, import.", no_args_is_help=True)
model.command("export")(export)
model.command("import")(import_model)
