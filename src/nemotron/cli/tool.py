"""How a command becomes a script of `recipes/tools`, which imports what the command line never does."""

from __future__ import annotations

import json
import os
import sys
from typing import NoReturn

from nemo_runspec.errors import DEBUG, debugging, hold_interrupts
from nemo_runspec.installation import check_imports
from nemotron.cli.recipe_dir import recipe_dir


def become_tool(script: str, **options: object) -> NoReturn:
    """The script takes this process's place: the terminal, Ctrl-C and the exit code are its own.

    Args:
        script: file name in `recipes/tools`.
        options: what its `main` takes; it gets them as JSON (`nemotron.recipes.tools.options`), paths as text.
    """
    from nemo_runspec.execution.local import local_environment

    path = recipe_dir("tools") / script
    check_imports(path)
    environment = local_environment({DEBUG: "1"} if debugging() else {})
    hold_interrupts()
    os.execve(sys.executable, [sys.executable, str(path), json.dumps(options, default=str)], environment)
