"""nemotron data inspect: what is in a file, a folder or an artifact of data."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from nemo_runspec.errors import debugging
from nemotron.cli.recipe_dir import recipe_dir


def inspect(
    path: Annotated[
        str | None,
        typer.Argument(help="A file, folder, glob, bin/idx prefix, address (hf://, s3://), or an artifact."),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=0, help="Samples shown.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, exact, as JSON.")] = False,
) -> None:
    """Show counts, lengths, mixture and samples of data.

    Any input or output: documents, conversations, token streams, blends, packed rows, a run that is not finished. Of
    large data a sample is read.

    \b
    Examples:
      nemotron data inspect my-folder
      nemotron data inspect nano3-pretrain-data-tiny --samples 5
      nemotron data inspect nano3-sft-data-tiny --json
    """
    from nemo_runspec.execution.local import local_environment

    arguments = [f"--samples={samples}"]
    if as_json:
        arguments.append("--json")
    if debugging():
        arguments.append("--debug")
    if path is not None:
        arguments += ["--", path]
    script = recipe_dir("tools") / "data_inspect.py"
    os.execve(sys.executable, [sys.executable, str(script), *arguments], local_environment({}))
