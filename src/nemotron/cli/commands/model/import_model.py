"""nemotron FAMILY model import: a Hugging Face directory as a model artifact."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from nemo_runspec.errors import debugging
from nemotron.cli.recipe_dir import recipe_dir


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
    from nemo_runspec.execution.local import local_environment

    arguments = [f"--source={source}", f"--family={ctx.command_path.split()[1]}"]
    if name is not None:
        arguments.append(f"--name={name}")
    if revision is not None:
        arguments.append(f"--revision={revision}")
    if debugging():
        arguments.append("--debug")
    script = recipe_dir("tools") / "model_import.py"
    os.execve(sys.executable, [sys.executable, str(script), *arguments], local_environment({}))
