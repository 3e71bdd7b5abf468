"""nemotron env: environments of reinforcement learning, for other trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nemotron.cli.groups import QuickGroup
from nemotron.cli.tool import become_tool

env = typer.Typer(cls=QuickGroup, help="Environments for other trainers: serve, records.", no_args_is_help=True)

_NAME = "A family, as math, or one of yours: FILE.py:NAME, whose code is run."


@env.command("serve")
def serve(
    name: Annotated[str, typer.Argument(metavar="ENVIRONMENT", help=_NAME)],
    host: Annotated[str, typer.Option(help="Address; any other than this machine's own lets others in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    sandbox: Annotated[
        str, typer.Option(help="Where code_generation runs programs: bubblewrap, or subprocess, which keeps no secret.")
    ] = "bubblewrap",
) -> None:
    """Serve an environment as a resources server of NeMo Gym.

    POST /seed_session, /verify, /aggregate_metrics, and the tools by their names.

    \b
    Examples:
      nemotron env serve math
      nemotron env serve workplace_assistant --port 8001
      nemotron env serve halves.py:Halves
    """
    become_tool("env_serve.py", name=name, host=host, port=port, sandbox=sandbox)


@env.command("records")
def records(
    name: Annotated[str, typer.Argument(metavar="ENVIRONMENT", help=_NAME)],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Different tasks, at most.")] = 100,
    split: Annotated[str, typer.Option(help="train, valid or eval; the same task never is in two.")] = "train",
    seed: Annotated[int, typer.Option(min=0, help="Of the generator.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; else they are shown.")
    ] = None,
) -> None:
    """Write tasks as records of NeMo Gym.

    JSONL, for the server of that environment.

    \b
    Examples:
      nemotron env records math -n 1000 -o math.jsonl
      nemotron env records workplace_assistant --split eval
    """
    become_tool("env_records.py", name=name, count=count, split=split, seed=seed, output=output)
