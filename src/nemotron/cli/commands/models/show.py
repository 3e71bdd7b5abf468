"""nemotron models show: what a model is made of, and what it costs."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from nemo_runspec.errors import debugging
from nemotron.cli.recipe_dir import recipe_dir


def show(
    name: Annotated[
        str | None,
        typer.Argument(help="nano3-30b, super3-120b, nano2-12b, nano2-9b; a directory with config.json; an artifact."),
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
    from nemo_runspec.execution.local import local_environment

    arguments = [f"--seq-length={seq_length}"]
    if as_json:
        arguments.append("--json")
    if debugging():
        arguments.append("--debug")
    if name is not None:
        arguments += ["--", name]
    script = recipe_dir("tools") / "models_show.py"
    os.execve(sys.executable, [sys.executable, str(script), *arguments], local_environment({}))
