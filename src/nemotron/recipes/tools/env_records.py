"""Tasks of an environment as JSONL records of NeMo Gym, for `nemotron env records`, which starts this script."""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import errno
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.recipes.tools.env_serve import find_environment
from nemotron.recipes.tools.options import run_tool
from nemotron.stack.environments import Split, Task, iter_tasks, own, split_of
from nemotron.stack.environments.gym_server import record_of
from nemotron.stack.environments.task import SPLITS


@dataclass(frozen=True)
class Options:
    """Of `nemotron env records`."""

    name: str
    count: int
    split: str
    seed: int
    output: str | None


def tasks_of(options: Options) -> Iterator[Task]:
    """Different tasks of the split, in the order of the generator; of endless ones those before a long run without a
    new one."""
    name, environment = find_environment(options.name)
    if environment is None:
        yield from iter_tasks(name, cast(Split, options.split), options.seed, distinct=True)
        return
    seen: set[str] = set()
    fruitless = 0
    for task in own.read_tasks(name, environment):
        fruitless += 1
        if split_of(task.canonical) == options.split and task.canonical not in seen:
            seen.add(task.canonical)
            fruitless = 0
            yield task
        elif fruitless == own.MAX_FRUITLESS:
            return


def main(options: Options) -> None:
    """Write them."""
    if options.split not in SPLITS:
        raise UserError(f"unknown split {options.split!r}", did_you_mean(options.split, SPLITS))
    lines = [json.dumps(record_of(task)) + "\n" for task in islice(tasks_of(options), options.count)]
    if not lines:
        raise UserError(f"{options.name} has no task of the split {options.split}")
    if options.output is None:
        sys.stdout.writelines(lines)
        return
    try:
        Path(options.output).write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # `run_main` has the words for a full disk
        raise UserError(f"cannot write {options.output}: {error.strerror}", "--output names another place") from None
    print(f"{options.output}: {len(lines):,} records", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
