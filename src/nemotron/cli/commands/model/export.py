"""nemotron FAMILY model export: a model artifact as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nemotron.cli.tool import become_tool


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

    options = {"model": Registry.default().resolve(ref).ref, "output": output, "dtype": dtype}
    options |= {"max-shard-size": max_shard_size, "force": force}
    become_tool("model_export.py", options)
