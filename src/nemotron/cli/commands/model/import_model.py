"""nemotron FAMILY model import: a Hugging Face directory as a model artifact."""

from __future__ import annotations

from typing import Annotated

import typer

from nemotron.cli.tool import become_tool


def import_model(
    ctx: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="DIR|ORG/MODEL", help="A directory, or a model of the Hub (needs nemotron[hf]).")
    ],
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Name of the artifact (default: that of the directory).")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Of a Hub model: a branch, tag or commit.")] = None,
) -> None:
    """Register a Nemotron-H model from elsewhere as an artifact.

    Reads what transformers and the published checkpoints have: config.json, safetensors (one file or an index and its
    shards), tokenizer.json. All of it is checked first; pickles are never opened. `chat --model NAME` then talks to it.

    \b
    Examples:
      nemotron nano3 model import my-model
      nemotron nano3 model import someone/their-model --name theirs
    """
    options = {"source": source, "family": ctx.command_path.split()[1], "name": name, "revision": revision}
    become_tool("model_import.py", options)
