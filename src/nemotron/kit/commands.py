"""Which `nemotron` command makes an artifact: what an error about a missing or corrupt one says to its reader."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from nemo_runspec.config.loader import list_configs, load_config
from nemo_runspec.errors import ArtifactError, RunspecError, UserError, nearest, run_main
from nemo_runspec.runspec import Runspec, parse
from nemotron.kit.steps import read_recipe, recipe_folders
from nemotron.kit.stop import stop_at_once


class Maker(NamedTuple):
    """`command` makes an artifact; `pipe`, where there is one, also makes everything that it needs."""

    command: str
    pipe: str | None


def command_hint(error: RunspecError) -> str | None:
    """For `run_main`: the hint of an artifact's error with the command that makes it; None where none is known."""
    if not isinstance(error, ArtifactError):
        return None
    makers = makers_by_artifact()
    maker = makers.get(error.name)
    if maker is None:
        if error.corrupt:
            return None
        if Path(error.name).is_dir():
            return f"the directory of that name is ./{error.name}; nemotron artifacts list names the artifacts"
        if error.hint:
            return None
        near = nearest(error.name, makers)
        if near is None:
            return "nemotron artifacts list names those that exist"
        return f"did you mean {near}? make it: {makers[near].command}"
    if error.corrupt:
        return f"make it again: {maker.command} --force"
    return f"make it: {maker.command}" + (f" (with all before it: {maker.pipe})" if maker.pipe else "")


def run_data_script(main: Callable[[], None]) -> NoReturn:
    """Run the main of a data preparation and leave with its exit code. A signal ends it at once: see `stop_at_once`."""
    stop_at_once()
    sys.exit(run_main(main, command_hint))


def command_for(name: str) -> str | None:
    """The command that makes the artifact `name`; None where no config of a step writes one of that name."""
    maker = makers_by_artifact().get(name)
    return None if maker is None else maker.command


@functools.cache
def makers_by_artifact() -> dict[str, Maker]:
    """Name of an artifact -> what makes it, of all configs of all steps of all recipes.

    `nano3-sft-model-tiny` -> `nemotron nano3 sft -c tiny`. A list of steps, a script or a config that cannot be read
    makes nothing here: this serves the hint of another error.
    """
    makers: dict[str, Maker] = {}
    for folder in recipe_folders():
        with contextlib.suppress(UserError):
            recipe = read_recipe(folder)
            specs = [parse(step.script, step.configs) for step in recipe.steps]
            configs = [list_configs(spec.config_dir, spec.config.format) for spec in specs]
            piped = [
                {config.removesuffix(step.config_suffix) for config in names if config.endswith(step.config_suffix)}
                for step, names in zip(recipe.steps, configs, strict=True)
                if step.in_pipe
            ]
            of_all = set.intersection(*piped) if piped else set()
            for number, (step, spec) in enumerate(zip(recipe.steps, specs, strict=True)):
                for config in configs[number]:
                    chosen = config.removesuffix(step.config_suffix)  # of the whole pipe
                    # `-phase1` is the suffix of tiny-phase1, and of phase1, the published size, which no pipe runs.
                    if recipe.runs_later(step, config) or not f"-{config}".endswith(step.config_suffix):
                        continue
                    has_pipe = recipe.pipe and number > 0 and step.in_pipe and chosen in of_all
                    maker = Maker(f"{step.command} -c {config}", f"{recipe.pipe} -c {chosen}" if has_pipe else None)
                    makers = dict.fromkeys(_written(spec, config), maker) | makers
    return makers


def _written(spec: Runspec, config: str) -> list[str]:
    """Names of the artifacts that a config writes; none where it cannot be read."""
    try:
        run = vars(load_config(spec.config_dir, config, (), spec.config.format).run)
    except UserError:
        return []
    return [str(run[key]) for key in ("output", "results") if run.get(key)]
