"""nemotron models: look at architectures."""

from __future__ import annotations

from typing import Annotated

import typer

from nemotron.cli.groups import QuickGroup
from nemotron.cli.tool import become_tool

models = typer.Typer(cls=QuickGroup, help="Architectures: layers, parameters, memory, FLOPs.", no_args_is_help=True)


@models.command("show")
def show(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A preset (without a name: the list of them), a directory with config.json, or an artifact."
        ),
    ] = None,
    seq_length: Annotated[
        int, typer.Option("--seq-length", min=1, help="Tokens a sequence, for FLOPs and KV cache.")
    ] = 8192,
    as_json: Annotated[bool, typer.Option("--json", help="All numbers, exact, as JSON.")] = False,
) -> None:
    """Show layers, parameters, memory and FLOPs of a model.

    Computed from its config; no weights are read.

    \b
    Examples:
      nemotron models show nano3-30b
      nemotron models show super3-120b --seq-length 65536
      nemotron models show nano3-sft-model-tiny --json
    """
    become_tool("models_show.py", name=name, seq_length=seq_length, as_json=as_json)
