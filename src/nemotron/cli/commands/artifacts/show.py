"""nemotron artifacts show: one version's record and files."""

from __future__ import annotations

from typing import Annotated

import typer

from nemo_runspec.artifacts.listing import describe
from nemo_runspec.artifacts.registry import Registry


def show(
    ref: Annotated[str, typer.Argument(help="NAME, NAME:VERSION or art://NAME:VERSION.")],
    as_json: Annotated[bool, typer.Option("--json", help="The record as it is stored.")] = False,
) -> None:
    """Show the record of an artifact.

    Fields, metrics, who made it from what, its files and their checksums.
    """
    version = Registry.default().resolve(ref)
    if as_json:
        import json

        typer.echo(json.dumps(version.record, indent=2, ensure_ascii=False))
        return
    rows = describe(version)
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        typer.echo(f"{label:<{width}}  {text}")
