"""nemotron nano3 chat: talk to the model of a stage."""

from __future__ import annotations

from typing import Annotated

import typer

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.cli.tool import become_tool

STAGES = ("pretrain", "sft", "rl")


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="One question. Without it: interactive, or one question from stdin.")
    ] = None,
    config: Annotated[str, typer.Option("--config", "-c", help="The config that trained the model.")] = "tiny",
    stage: Annotated[
        str, typer.Option("--stage", "-s", help="Whose model: pretrain (completes text), sft or rl.")
    ] = "rl",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="An artifact reference instead of --config and --stage.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option("--template", help="Chat template, by name or path (default: the model's own)."),
    ] = None,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="Reason before answering.")] = True,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, reasoning included.")] = 256,
    seed: Annotated[int, typer.Option(help="For temperatures above 0.")] = 0,
) -> None:
    """Talk to the model of a stage.

    Reads the artifact nano3-STAGE-model-CONFIG.

    \b
    Examples:
      nemotron nano3 chat
      nemotron nano3 chat --stage sft --no-thinking "What is 728+654?"
      echo "def main(" | nemotron nano3 chat --stage pretrain
    """
    if stage not in STAGES:
        raise UserError(f"unknown stage '{stage}'", did_you_mean(stage, STAGES))
    from nemo_runspec.artifacts.registry import Registry

    version = Registry.default().resolve_verified(model or f"nano3-{stage}-model-{config}")
    fields = version.record["fields"]
    become_tool(
        "chat.py",
        model=version.path,
        tokenizer=fields.get("tokenizer_path"),
        recorded_template=fields.get("chat_template"),
        producer=(version.record.get("producer") or {}).get("name"),
        template=template,
        thinking=thinking,
        complete=stage == "pretrain" and model is None,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        prompt=prompt,
    )
