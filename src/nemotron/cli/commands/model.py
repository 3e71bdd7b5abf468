"""nemotron FAMILY model: models to Hugging Face, the same for every family; back comes `nemotron artifacts add`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nemo_runspec.artifacts.registry import Registry
from nemo_runspec.config.inputs import is_place
from nemotron.cli.tool import become_tool

model = typer.Typer(help="Models to Hugging Face: export. The way back: nemotron artifacts add.", no_args_is_help=True)


@model.command("export")
def export(
    ref: Annotated[
        str, typer.Argument(metavar="MODEL", help="NAME or NAME:VERSION of an artifact, a directory, hf://ORG/NAME.")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The directory to write.")] = None,
    push: Annotated[
        str | None,
        typer.Option("--push", help="Upload it to hf://ORG/NAME, with the model card; a new repository is private."),
    ] = None,
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
      nemotron nano2 model export nano2-rl-model -o my-model
      nemotron nano3 model export nano3-sft-model-small:2 -o my-model --dtype bfloat16
      nemotron nano3 model export nano3-rl-model-tiny --push hf://me/my-model
    """
    model = ref if is_place(ref) else Registry.default().resolve(ref).ref
    become_tool(
        "model_export.py",
        model=model,
        output=output,
        push=push,
        dtype=dtype,
        max_shard_size=max_shard_size,
        force=force,
    )
