"""nemotron artifacts: the four commands that look at what runs have published, as a list."""

from __future__ import annotations

import typer

from nemotron.cli.commands.artifacts.lineage import lineage
from nemotron.cli.commands.artifacts.list import list_artifacts
from nemotron.cli.commands.artifacts.show import show
from nemotron.cli.commands.artifacts.verify import verify

artifacts = typer.Typer(help="Published artifacts: list, show, trace back, verify.", no_args_is_help=True)
artifacts.command("list")(list_artifacts)
artifacts.command("show")(show)
artifacts.command("lineage")(lineage)
artifacts.command("verify")(verify)
