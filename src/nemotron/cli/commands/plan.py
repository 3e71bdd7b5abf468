"""nemotron plan: what a training would take."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from nemo_runspec.errors import UserError
from nemotron.cli.tool import become_tool


def plan(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help="nano3, super3, lightning35 or nano2.")],
    stage: Annotated[str, typer.Argument(metavar="STAGE", help="As in `nemotron FAMILY STAGE`: pretrain, sft, rlvr …")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Keys of the config.")] = None,
    config: Annotated[str | None, typer.Option("--config", "-c", help="A config of the stage, or a file.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="h100, h200, b200, gb200, b300, gb300; cpu: this machine. Else as the config.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="How many; else as the config says.")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Of a GPU for an hour, in your currency.")] = None,
    mean_tokens: Annotated[
        int | None,
        typer.Option("--mean-tokens", min=1, help="RL: tokens of a mean sequence; else half of the longest."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All numbers, exact, as JSON.")] = False,
) -> None:
    """Plan a training: memory of a GPU by part, time, GPU-hours, cost.

    Suggests the smallest layout that fits, and refuses one that does not divide. Nothing is started.

    \b
    Examples:
      nemotron plan nano3 pretrain --gpu h100 --nodes 128 --price 2.5
      nemotron plan nano3 pretrain -c phase2 --gpu gb200 model.tensor_model_parallel_size=2 model.sequence_parallel=true
      nemotron plan nano3 pretrain -c tiny --gpu cpu
    """
    if price is not None and not math.isfinite(price):
        raise UserError(f"--price {price}: must be a finite number", "as in --price 2.5")
    become_tool(
        "plan.py",
        family=family,
        stage=stage,
        config=config,
        overrides=overrides or [],
        gpu=gpu,
        nodes=nodes,
        price=price,
        mean_tokens=mean_tokens,
        as_json=as_json,
    )
