"""How a tool gets its options, which `nemotron` has read and hands over as JSON, and writes the file they name."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from nemo_runspec.errors import UserError, run_main
from nemotron.kit.commands import command_hint

Options = TypeVar("Options")


def run_tool(main: Callable[[Options], None], options: type[Options]) -> int:
    """Call `main` with the options that stand on the command line as one JSON object, and return the exit code.

    Their defaults and limits stand in the command's file. Whoever starts a script by hand gives all of them:
    python data_inspect.py '{"path": "my-folder", "samples": 3, "as_json": false}'

    Args:
        options: a dataclass of them.
    """
    return run_main(lambda: main(_read(options)), command_hint)


def write_output(file: Path, text: str, option: str = "--output") -> None:
    """Write the file that `option` names, and the folders above it. UserError: it cannot be written there."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # `run_main` has the words for a full disk
        raise UserError(f"cannot write {file}: {error.strerror}", f"{option} names another place") from None


def _read(options: Any) -> Any:
    try:
        return options(**json.loads(sys.argv[1]))
    except (IndexError, ValueError, TypeError):
        names = ", ".join(field.name for field in fields(options))
        script = Path(sys.argv[0]).name
        raise UserError(f"{script} takes its options as one JSON object", f"with exactly these keys: {names}") from None
