"""nemotron fork: a family as a project of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nemotron.cli.tool import become_tool


def fork(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help="nano3, super3, lightning35 or nano2.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the package, the command, the artifacts.")],
    into: Annotated[Path | None, typer.Option("--into", help="A folder that is new or empty; default: NAME.")] = None,
) -> None:
    """Copy a family into a project of its own.

    The copy stands alone: it has every script, config and command file that it runs, under its own name, with a
    pyproject.toml, a README and tests. Of the installed cookbook it imports what all recipes share (the embedded stack,
    data preparation, the kit, tools), so that a newer cookbook changes no recipe of yours.

    \b
    Examples:
      nemotron fork nano3 mymodel
      nemotron fork nano2 my_tutorial --into tutorial
    """
    become_tool("fork.py", family=family, name=name, into=into)
