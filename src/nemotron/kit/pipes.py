"""Scripts in a shell pipe: `python data_curation.py | python training.py`.

The last line on stdout is a JSON map from a role (`data`, `model`) to an artifact reference; everything else that a
script prints goes to stderr. The next script finds its inputs there if its command line names none: only then does
`load_script_config` call `read_pipe`, so that `--help` and commands with explicit inputs never wait for stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from typing import Protocol

from nemo_runspec.artifacts.naming import parse_reference
from nemo_runspec.errors import UserError


class Saved(Protocol):
    """An artifact that has been saved."""

    @property
    def uri(self) -> str:
        """`art://name:3`."""


_read: dict[str, str] | None = None  # stdin can be read once


def print_complete(artifacts: Mapping[str, Saved | str]) -> None:
    """Print the map of what this script made, as the last line of stdout, and close the pipe behind it.

    Args:
        artifacts: role -> a saved artifact, or a reference. Raises ValueError for an artifact that was not saved.

    A reader that has gone away is no error: the artifacts are published.
    """
    references = {role: item if isinstance(item, str) else item.uri for role, item in artifacts.items()}
    try:
        print(json.dumps(references), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def stdout_kept_for_the_map() -> Iterator[None]:
    """What is printed inside goes to stderr, also by programs that begin there: that of W&B prints after all others."""
    try:
        stdout = os.dup(1)
    except OSError:  # closed: nobody reads
        yield
        return
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def piped() -> bool:
    """Whether stdin is a pipe or a file, so that `read_pipe` would read it. A terminal or /dev/null is neither."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, replaced, or absent
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def read_pipe() -> dict[str, str]:
    """The artifact references that the script before this one in the pipe printed, by role.

    Waits until that script has finished. Empty when stdin is no pipe and no file, and, with a warning, when nothing
    came through it. Raises UserError when what came does not end in such a map (that script failed, most likely), and
    under torchrun with several processes, of which only one would get what comes.
    """
    global _read
    if _read is None:
        if piped() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError("several processes cannot read their inputs from one pipe", "name them: run.data=NAME")
        _read = _parse(sys.stdin.buffer.read().decode(errors="backslashreplace")) if piped() else {}
    return dict(_read)


def _parse(text: str) -> dict[str, str]:
    last = next((line for line in reversed(text.split("\n")) if line.strip()), None)
    if last is None:
        print("warning: nothing came through the pipe on stdin: no inputs are taken from it", file=sys.stderr)
        return {}
    hint = "the script before it in the pipe failed, or did not end with print_complete()"
    try:
        references = json.loads(last)
    except ValueError:
        references = None
    if not isinstance(references, dict) or not all(isinstance(value, str) for value in references.values()):
        raise UserError(f"the last line of stdin is not a JSON map of artifact references: {last[:80]}", hint)
    for reference in references.values():
        parse_reference(reference)
    return references
