"""nemotron data inspect: what is in a file, a folder or an artifact of data."""

from __future__ import annotations

from typing import Annotated

import typer

from nemotron.cli.tool import become_tool


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
    become_tool("data_inspect.py", path=path, samples=samples, as_json=as_json)
