"""How a command becomes a script of `recipes/tools`, which imports what the command line never does."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from nemo_runspec.errors import debugging
from nemotron.cli.recipe_dir import recipe_dir


def become_tool(script: str, options: Mapping[str, object], word: str | None = None) -> NoReturn:
    """The script takes this process's place: the terminal, Ctrl-C and the exit code are its own.

    Args:
        script: file name in `recipes/tools`.
        options: name -> value, as in {"seed": 0}; True is `--name` alone, None and False leave it out.
        word: stands after the options.
    """
    from nemo_runspec.execution.local import local_environment

    chosen = {**options, "debug": debugging()}
    arguments = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in chosen.items()
        if value is not None and value is not False  # 0 is a value
    ]
    if word is not None:
        arguments += ["--", word]
    path = str(recipe_dir("tools") / script)
    os.execve(sys.executable, [sys.executable, path, *arguments], local_environment({}))
