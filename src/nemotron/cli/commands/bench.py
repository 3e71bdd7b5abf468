"""nemotron bench: ideas about training, measured."""

from __future__ import annotations

from typing import Annotated

import typer

from nemotron.cli.groups import QuickGroup
from nemotron.cli.tool import become_tool

bench = typer.Typer(cls=QuickGroup, help="An idea about training, measured within minutes.", no_args_is_help=True)


@bench.callback()
def group() -> None:
    """Keep `research` a word of its own: a group of one command would be that command."""


@bench.command("research")
def research(
    entry: Annotated[
        str, typer.Argument(metavar="[ENTRY.py]", help="A file with a function train(task).")
    ] = "examples/research/baseline.py",
    seed: Annotated[int, typer.Option(min=0, help="Of the first run.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="How many runs, each with the next seed.")] = 1,
    budget: Annotated[
        float, typer.Option(min=5, max=86_400, metavar="SECONDS", help="Of processor time; the leaderboard's are 300.")
    ] = 300,
    record: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Add an improvement to the leaderboard beside the entry: what it changes."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run the leaderboard beside the entry again, SEEDS runs of each line.")
    ] = False,
) -> None:
    """Train an entry for five minutes of processor time, and score it: bits per byte of held-out text.

    The last line on stdout is JSON. What an entry is, and what counts as an improvement: examples/research/program.md.

    \b
    Examples:
      nemotron bench research
      nemotron bench research examples/research/baseline.py --seed 7 --budget 60
      nemotron bench research examples/research/baseline.py --seeds 3
      nemotron bench research --check
    """
    options = {"entry": entry, "seed": seed, "seeds": seeds, "budget": budget, "record": record, "check": check}
    become_tool("bench_research.py", **options)
