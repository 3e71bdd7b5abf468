"""nemotron artifacts lineage: from an artifact back to the raw sources."""

from __future__ import annotations

from typing import Annotated

import typer


def lineage(
    ref: Annotated[str, typer.Argument(help="NAME, NAME:VERSION or art://NAME:VERSION.")],
    digits: Annotated[int, typer.Option(min=8, max=64, help="Digits of each digest.")] = 12,
) -> None:
    """Walk from an artifact back to its raw sources.

    Every part with its digest. Exits 1 when a part is missing or corrupt.
    """
    from nemotron.kit.lineage import format_lineage, problems, raw_sources, walk

    node = walk(ref)
    for line in format_lineage(node, digits=digits):
        typer.echo(line)
    sources = raw_sources(node)
    typer.echo(f"{len(sources)} raw source{'' if len(sources) == 1 else 's'}")
    if found := problems(node):
        for problem in found:
            typer.echo(f"broken: {problem}", err=True)
        raise typer.Exit(1)
