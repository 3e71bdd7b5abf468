"""nemotron artifacts verify: is every byte what was published?"""

from __future__ import annotations

from typing import Annotated

import typer

from nemo_runspec.artifacts.registry import Registry


def verify(
    refs: Annotated[list[str] | None, typer.Argument(help="Versions to check; without any, all there are.")] = None,
) -> None:
    """Read every byte and compare it with the manifest.

    Exits 1 when a file is not as it was published.
    """
    registry = Registry.default()
    chosen = refs or [f"{name}:{version}" for name in registry.names() for version in registry.versions(name)]
    if not chosen:
        typer.echo(f"no artifacts in {registry.root}")
        return
    damaged = 0
    for ref in chosen:
        problems = registry.verify(ref)
        damaged += bool(problems)
        typer.echo(f"{ref}: {'ok' if not problems else 'corrupt'}")
        for problem in problems:
            typer.echo(f"  {problem}")
    if damaged:
        typer.echo(f"{damaged} of {len(chosen)} versions are corrupt", err=True)
        raise typer.Exit(1)
