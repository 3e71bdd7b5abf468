"""nemotron FAMILY model: models to Hugging Face and to Megatron, the same for every family.

From Hugging Face to this registry comes `nemotron artifacts add`.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Annotated

import typer

from nemo_runspec.artifacts.registry import Registry, Version
from nemo_runspec.config.inputs import is_place
from nemo_runspec.errors import UserError
from nemotron.cli.groups import QuickGroup
from nemotron.cli.tool import become_tool

model = typer.Typer(
    cls=QuickGroup,
    help="Models to Hugging Face: export; to Megatron: import. From Hugging Face: nemotron artifacts add.",
    no_args_is_help=True,
)


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
    like: Annotated[
        str | None,
        typer.Option(
            "--like", help="Of a Megatron checkpoint: a model of its architecture, directory or hf://ORG/NAME."
        ),
    ] = None,
) -> None:
    """Write a model for transformers, vLLM and the Hub.

    config.json, safetensors with an index, tokenizer with chat template, generation config, and a model card
    (README.md) made from the artifact's record.

    A checkpoint of Megatron is converted by Megatron-Bridge, in its image: weights, config and tokenizer alone.

    \b
    Examples:
      nemotron nano2 model export nano2-rl-model -o my-model
      nemotron nano3 model export nano3-sft-model-small:2 -o my-model --dtype bfloat16
      nemotron nano3 model export nano3-rl-model-tiny --push hf://me/my-model
      nemotron nano3 model export nano3-sft-model-default -o my-model --like hf://nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
    """
    version = None if is_place(ref) else Registry.default().resolve(ref)
    model = ref if version is None else version.ref
    if version is not None and _is_megatron(version):
        if like is None or output is None:
            missing = "--like hf://ORG/NAME" if like is None else "-o DIRECTORY"
            raise UserError(f"{model} is a Megatron checkpoint: say {missing}", "it has weights and no config.json")
        own = (("--push", push), ("--dtype", dtype != "auto"), ("--max-shard-size", max_shard_size != "5GB"))
        if unused := [option for option, given in (*own, ("--force", force)) if given]:
            hint = f"export what this writes: nemotron FAMILY model export {output} {unused[0]} …"
            raise UserError(f"{', '.join(unused)}: not of {model}, which is a Megatron checkpoint", hint)
        _check_megatron_bridge()
        become_tool("megatron_export.py", model=model, output=output, like=like)
    if like is not None:
        hint = "leave --like out; nemotron artifacts watch FOLDER --name NAME --once makes an artifact of a checkpoint"
        raise UserError(f"{model} is no artifact with a Megatron checkpoint", hint)
    become_tool(
        "model_export.py",
        model=model,
        output=output,
        push=push,
        dtype=dtype,
        max_shard_size=max_shard_size,
        force=force,
    )


@model.command("import")
def import_(
    ref: Annotated[
        str, typer.Argument(metavar="MODEL", help="NAME or NAME:VERSION of an artifact, a directory, hf://ORG/NAME.")
    ],
    name: Annotated[str, typer.Option("--name", "-n", help="Name of the Megatron checkpoint as an artifact.")],
) -> None:
    """Make a Megatron checkpoint of a model, for training at the published size.

    Megatron-Bridge converts it, in its image. `sft` takes a model in Hugging Face layout as well, and converts it when
    it starts: this is for a model that is trained from several times.

    \b
    Examples:
      nemotron nano3 model import hf://nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16 --name nano3-base
      nemotron nano3 model import my-model --name my-model-megatron
    """
    version = None if is_place(ref) else Registry.default().resolve(ref)
    model = ref if version is None else version.ref
    if version is not None and _is_megatron(version):
        raise UserError(f"{model} is a Megatron checkpoint already", f"train it: run.model={model}")
    _check_megatron_bridge()
    become_tool("megatron_import.py", model=model, name=name)


def _is_megatron(version: Version) -> bool:
    return str(version.record.get("type")).rpartition(".")[2] == "MegatronCheckpoint"


def _check_megatron_bridge() -> None:
    try:
        importlib.metadata.distribution("megatron-bridge")
    except importlib.metadata.PackageNotFoundError:
        hint = "run this in an image that has it, such as nvcr.io/nvidia/nemo:26.08"
        raise UserError("megatron-bridge, which converts it, is not installed", hint) from None
