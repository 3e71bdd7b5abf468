"""nemotron artifacts list: what is there."""

from __future__ import annotations

from typing import Annotated

import typer

from nemo_runspec.artifacts.listing import list_entries
from nemo_runspec.artifacts.registry import Registry
from nemo_runspec.artifacts.stored import human_size


def list_artifacts(
    name: Annotated[str | None, typer.Argument(help="Only this artifact, with all its versions.")] = None,
    all_versions: Annotated[bool, typer.Option("--all", "-a", help="Every version, not only the latest.")] = False,
) -> None:
    """List what has been published.

    Shows reference, type, size, time, and the first digits of the payload digest.
    """
    registry = Registry.default()
    entries = list_entries(registry, name, all_versions=all_versions)
    if not entries:
        typer.echo(f"no artifacts in {registry.root}; `nemotron nano3 pipe -c tiny` makes some")
        return
    rows = [
        (e.ref, "corrupt", "", "", "")
        if e.problem
        else (e.ref, e.type, human_size(e.size_bytes), e.created_at[:19], e.digest[:12])
        for e in entries
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for ref, kind, size, created, digest in rows:
        line = f"{ref:<{widths[0]}}  {kind:<{widths[1]}}  {size:>{widths[2]}}  {created:<{widths[3]}}  {digest}"
        typer.echo(line.rstrip())
