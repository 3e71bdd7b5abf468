"""The steps of a recipe, in order: what `steps.toml` in its folder lists, a line a step.

The commands, the pipe and its help page, the report, and the hint of an error about an artifact that is missing all
follow from this list, so that a step is added in one place. Nothing here is imported from a recipe: the list is data.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from nemo_runspec.errors import UserError, did_you_mean
from nemo_runspec.runspec import find_script
from nemo_runspec.toml_text import TomlText, read_toml

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
STEPS_FILE = "steps.toml"
FORK = "NEMOTRON_RECIPES"  # a variable: the folder of a fork's recipes

_KEYS = ("command", "script", "configs", "about", "in_pipe", "config_suffix")


@dataclass(frozen=True)
class RecipeStep:
    """One line of the list.

    `name`: in the pipe, as in `sft:optimizer.lr=1e-3`. `command`: all words of the command that runs the step alone.
    `script`: absolute. `about`: one sentence for the help page; empty where the command's own docstring has it.
    `in_pipe`: false where the pipe leaves the step out, and its command alone runs it. `config_suffix`: stands behind
    the name of the config that the pipe chose, where a script runs twice. `configs`: where the script is that of
    another recipe, the folder of this recipe's configs for it, absolute.
    """

    name: str
    command: str
    script: Path
    about: str = ""
    in_pipe: bool = True
    config_suffix: str = ""
    configs: Path | None = None


@dataclass(frozen=True)
class Recipe:
    """A recipe and its steps. `pipe`: the command that runs all of them; None where they do not belong together."""

    folder: Path
    pipe: str | None
    steps: tuple[RecipeStep, ...]

    @property
    def piped(self) -> tuple[RecipeStep, ...]:
        """The steps that the pipe runs."""
        return tuple(step for step in self.steps if step.in_pipe)

    def words(self, step: RecipeStep) -> list[str]:
        """The words of a step's command behind those that all have: `data`, `prep`, `sft` of those of
        `nemotron nano3 data prep sft`, as the pipe is `nemotron nano3 pipe`."""
        common = (self.pipe or f"nemotron {self.folder.name} pipe").split()[:-1]
        return step.command.split()[len(common) :]

    def runs_later(self, step: RecipeStep, config: str) -> bool:
        """Whether `config` is that of another step with the script of `step`, by its suffix."""
        place = step.script, step.configs
        others = (other.config_suffix for other in self.steps if (other.script, other.configs) == place)
        return any(len(suffix) > len(step.config_suffix) and config.endswith(suffix) for suffix in others)

    def part(self, start: str | None, end: str | None) -> slice:
        """Which steps of the pipe run from the stage of the step `start` to the step `end`, that one included.

        A stage begins with the first step of the same folder of the recipe, be it that of the script or of the configs
        for the script of another recipe. None: from the first, to the last.

        Raises:
            UserError: no step of the pipe is called so; `end` comes before that stage.
        """
        folders = {step.name: self._stage(step) for step in self.piped}
        for name in (start, end):
            if name is not None and name not in folders:
                raise UserError(f"unknown step '{name}'", did_you_mean(name, folders, "steps"))
        first = list(folders.values()).index(folders[start]) if start else 0
        behind = list(folders).index(end) + 1 if end else len(folders)
        if behind <= first:
            raise UserError(f"--to {end} comes before --from {start}", f"the order is {', '.join(folders)}")
        return slice(first, behind)

    def _stage(self, step: RecipeStep) -> Path:
        """The folder of a step's stage."""
        if step.configs is None:
            return step.script.parent
        return self.folder / step.configs.relative_to(self.folder).parts[0]


def read_recipe(folder: Path) -> Recipe:
    """The recipe in `folder`, by its steps.toml.

    Raises:
        UserError: no such file, bad TOML, an unknown or missing key, a script that does not exist; with file and line.
    """
    path = folder / STEPS_FILE
    try:
        toml = read_toml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    for key in toml.data:
        if key not in ("pipe", "steps"):
            raise UserError(f"{toml.where(key)}: unknown key {key!r}", did_you_mean(key, ("pipe", "steps")))
    steps, pipe = toml.data.get("steps", {}), toml.data.get("pipe")
    if pipe is not None and not isinstance(pipe, str):
        raise UserError(f"{toml.where('pipe')}: pipe = {pipe!r}: must be the text of a command")
    return Recipe(folder, pipe, tuple(_read_step(name, steps[name], toml, folder) for name in steps))


def _read_step(name: str, line: object, toml: TomlText, folder: Path) -> RecipeStep:
    at = f"{toml.where('steps', name)}: {name}"
    texts = {key: value for key, value in line.items() if key != "in_pipe"} if isinstance(line, dict) else {}
    if not isinstance(line, dict) or not all(isinstance(value, str) for value in texts.values()):
        raise UserError(f"{at}: must be a table of text", 'as in {command = "nemotron …", script = "train.py"}')
    for key in line:
        if key not in _KEYS:
            raise UserError(f"{at}: unknown key {key!r}", did_you_mean(key, _KEYS))
    if missing := [key for key in ("command", "script") if not line.get(key)]:
        raise UserError(f"{at}: has no {missing[0]!r}, which is required")
    if not isinstance(in_pipe := line.get("in_pipe", True), bool):
        raise UserError(f"{at}: in_pipe = {in_pipe!r}: must be true or false")
    script = folder / line["script"]
    if not script.is_file():
        script = find_script(folder, line["script"])  # that of another recipe
    if not script.is_file():
        near = did_you_mean(line["script"], [file.relative_to(folder).as_posix() for file in folder.rglob("*.py")])
        raise UserError(f"{at}: script = {line['script']!r}: no such file in {folder}", near)
    configs = folder / line["configs"] if "configs" in line else None
    suffix = line.get("config_suffix", "")
    return RecipeStep(name, line["command"], script, line.get("about", ""), in_pipe, suffix, configs)


def recipe_folders() -> list[Path]:
    """The folder of every recipe that lists steps, sorted; in a fork of one (`nemotron fork`) that one's, too.

    The fork's command names its folder of recipes in NEMOTRON_RECIPES; a script that a user starts there is below it.
    """
    script = Path(sys.argv[0]).absolute()
    beside = next((folder.parent for folder in script.parents if (folder / STEPS_FILE).is_file()), RECIPES)
    folders = (RECIPES, Path(os.environ.get(FORK) or beside))
    return sorted({file.parent for top in folders for file in top.rglob(STEPS_FILE)})
