"""nemotron FAMILY model export: a model artifact as a Hugging Face directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from nemo_runspec.errors import debugging
from nemotron.cli.recipe_dir import recipe_dir


def export(
    ref: Annotated[str, typer.Argument(metavar="NAME", help="A model artifact: NAME, NAME:VERSION or art://NAME.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory to write.")],
    dtype: Annotated[
        str, typer.Option(help="Of the weights: auto (as they are), float32, bfloat16 or float16.")
    ] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file, as in 5GB or 800MB.")] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="Replace the model that is in the directory.")] = False,
) -> None:
    """Write a model for transformers, vLLM and the Hub.

    config.json, safetensors with an index, tokenizer with chat template, generation config, and a model card
    (README.md) made from the artifact's record.

    \b
    Examples:
      nemotron nano3 model export nano3-rl-model-tiny -o my-model
      nemotron nano3 model export nano3-sft-model-small:2 -o my-model --dtype bfloat16
    """
    from nemo_runspec.artifacts.registry import Registry
    from nemo_runspec.execution.local import local_environment

    version = Registry.default().resolve(ref)
    arguments = [
        f"--model={version.ref}",
        f"--output={output}",
        f"--dtype={dtype}",
        f"--max-shard-size={max_shard_size}",
    ]
    if force:
        arguments.append("--force")
    if debugging():
        arguments.append("--debug")
    script = recipe_dir("tools") / "model_export.py"
    os.execve(sys.executable, [sys.executable, str(script), *arguments], local_environment({}))
