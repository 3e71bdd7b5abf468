"""Tasks of an environment as JSONL records of NeMo Gym, for `nemotron env records`, which starts this script."""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.recipes.tools.env_serve import find_environment
from nemotron.recipes.tools.options import run_tool, write_output
from nemotron.stack.environments import Split, Task, iter_tasks, own
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
    """Different tasks of the split, in the order of the generator."""
    name, environment = find_environment(options.name)
    split = cast(Split, options.split)
    if environment is None:
        return iter_tasks(name, split, options.seed, distinct=True)
    return own.distinct_tasks(name, environment, split)


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
    write_output(Path(options.output), "".join(lines))
    print(f"{options.output}: {len(lines):,} records", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_tool(main, Options))
