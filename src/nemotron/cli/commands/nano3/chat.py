"""nemotron nano3 chat: talk to the model of a stage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.cli.tool import become_tool

if TYPE_CHECKING:
    from nemo_runspec.artifacts.registry import Registry

STAGES = ("pretrain", "sft", "rl", "rlhf", "final")


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="One question. Without it: interactive, or one question from stdin.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="The config that trained the model, as in -c tiny.")
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage",
            "-s",
            help="Whose model: pretrain (completes text), sft, rl, rlhf or final (default: the last from rl on).",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Another model: NAME[:VERSION] of an artifact, a directory, hf://ORG/NAME."),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option("--template", help="Chat template, by name or path (default: the model's own)."),
    ] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="Reason before answering (default: as the model was trained)."),
    ] = None,
    reasoning_budget: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens of reasoning, at most; then it has to answer. 0: --no-thinking."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, reasoning included.")] = 256,
    seed: Annotated[int, typer.Option(help="For temperatures above 0.")] = 0,
) -> None:
    """Talk to the model of a stage.

    Reads the artifact nano3-STAGE-model-CONFIG.

    \b
    Examples:
      nemotron nano3 chat -c tiny
      nemotron nano3 chat -c tiny --stage sft "What is 728+654?"
      nemotron nano3 chat -c tiny --reasoning-budget 8 "What is 728+654?"
      nemotron nano3 chat -m ./my-model
      echo "def main(" | nemotron nano3 chat -c tiny --stage pretrain
    """
    if reasoning_budget is not None and reasoning_budget >= max_new_tokens:
        raise UserError(f"--reasoning-budget {reasoning_budget} leaves no answer in --max-new-tokens {max_new_tokens}")
    if None not in (reasoning_budget, thinking) and thinking != bool(reasoning_budget):
        switch = "--thinking" if thinking else "--no-thinking"
        raise UserError(f"{switch} and --reasoning-budget {reasoning_budget} contradict each other", "give one of them")
    if stage is not None and stage not in STAGES:
        raise UserError(f"unknown stage '{stage}'", did_you_mean(stage, STAGES))
    if model is not None and config is not None:
        raise UserError("--config and --model both name a model", "give one of them")
    if model is None and config is None:
        raise UserError("which model? neither --config nor --model names one", "as in nemotron nano3 chat -c tiny")
    from nemo_runspec.artifacts.registry import Registry
    from nemo_runspec.config.inputs import is_place
    from nemotron.kit.model_folder import read_origin

    if model is not None and is_place(model):  # a directory or a model of the Hub, as it is
        folder, record = model, {}
    else:
        registry = Registry.default()
        name = model or (f"nano3-{stage}-model-{config}" if stage else _last_aligned(registry, str(config)))
        version = registry.resolve_verified(name)
        folder, record = str(version.path), version.record
    origin = read_origin(Path(folder).expanduser())  # a directory that an export made says how it was trained
    fields, producer = record.get("fields") or {}, (record.get("producer") or {}).get("name")
    is_base = origin.is_base if origin else producer is not None and producer.endswith("/pretrain")
    complete = stage == "pretrain" if stage else is_base and template is None
    if complete and reasoning_budget is not None:
        raise UserError("--reasoning-budget is for answers, and this model completes text", "leave it out")
    reasoning = origin.reasoning if origin else fields.get("reasoning")
    if thinking is None:
        thinking = reasoning is not False or bool(reasoning_budget)
    become_tool(
        "chat.py",
        model=folder,
        tokenizer=fields.get("tokenizer_path"),
        recorded_template=fields.get("chat_template"),
        producer=producer,
        template=template,
        max_reasoning=reasoning_budget if thinking else 0,
        complete=complete,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        prompt=prompt,
    )


def _last_aligned(registry: Registry, config: str) -> str:
    """The last aligned model of a config that there is; where there is none, the last that some config makes."""
    from nemotron.kit.commands import command_for

    names = [f"nano3-{stage}-model-{config}" for stage in ("final", "rlhf", "rl")]
    existing = [name for name in names if registry.versions(name)]
    return (existing or [name for name in names if command_for(name)] or names)[0]
