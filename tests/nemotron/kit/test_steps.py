"""steps.toml of a recipe: read strictly, and where a stage begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_runspec.errors import UserError
from nemotron.kit.steps import RECIPES, read_recipe, recipe_folders

EXAMPLE = 'as in {command = "nemotron …", script = "train.py"}'
LINE = 'sow = {command = "nemotron garden sow", script = "bed/sow.py"}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("bed/dig.py", "bed/sow.py", "kitchen/cook.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_steps_are_in_the_order_of_the_file(folder: Path) -> None:
    (folder / "steps.toml").write_text(
        'pipe = "nemotron garden pipe"\n[steps]\ndig = {command = "nemotron garden dig", script = "bed/dig.py"}\n'
        f'{LINE}\ncook = {{command = "nemotron garden cook", script = "kitchen/cook.py", about = "Cook it."}}\n'
    )
    recipe = read_recipe(folder)
    assert [step.name for step in recipe.steps] == ["dig", "sow", "cook"]
    assert recipe.pipe == "nemotron garden pipe"
    assert recipe.steps[2].script == folder / "kitchen" / "cook.py" and recipe.steps[2].about == "Cook it."
    # A stage is a folder: it begins with its first step.
    assert [recipe.part(name, None) for name in (None, "dig", "sow", "cook")] == [slice(n, 3) for n in (0, 0, 0, 2)]
    # It ends with the very step.
    assert [recipe.part("sow", name) for name in ("dig", "sow", "cook")] == [slice(0, n) for n in (1, 2, 3)]
    with pytest.raises(UserError, match="--to sow comes before --from cook"):
        recipe.part("cook", "sow")
    with pytest.raises(UserError) as caught:
        recipe.part(None, "cok")
    assert (caught.value.message, caught.value.hint) == ("unknown step 'cok'", "did you mean cook?")


def test_a_step_outside_the_pipe_has_a_command_alone(folder: Path) -> None:
    (folder / "steps.toml").write_text(
        '[steps]\ndig = {command = "nemotron garden dig", script = "bed/dig.py", in_pipe = false}\n'
        f'{LINE}\ncook = {{command = "nemotron garden cook", script = "kitchen/cook.py"}}\n'
    )
    recipe = read_recipe(folder)
    assert [step.name for step in recipe.steps] == ["dig", "sow", "cook"]
    assert [step.name for step in recipe.piped] == ["sow", "cook"]
    assert [recipe.part(name, None) for name in ("sow", "cook")] == [slice(0, 2), slice(1, 2)]
    with pytest.raises(UserError, match="unknown step 'dig'"):
        recipe.part("dig", None)


def test_a_script_that_runs_twice_takes_a_config_of_its_own_for_each(folder: Path) -> None:
    again = LINE.replace("sow =", "sow-again =").replace("}", ', config_suffix = "-late"}')
    (folder / "steps.toml").write_text(f"[steps]\n{LINE}\n{again}\n")
    recipe = read_recipe(folder)
    first, second = recipe.steps
    assert (first.config_suffix, second.config_suffix) == ("", "-late")
    assert recipe.runs_later(first, "tiny-late") and not recipe.runs_later(first, "tiny")
    assert not recipe.runs_later(second, "tiny-late")


def test_a_script_of_another_recipe_has_its_configs_here(folder: Path) -> None:
    """The scripts of the folder itself come first; a stage is the folder of the configs."""
    mine = folder / "mine"
    (mine / "bed").mkdir(parents=True)
    (mine / "bed/dig.py").touch()
    again = 'sow-late = {command = "nemotron mine sow", script = "bed/sow.py", configs = "kitchen/late"'
    (mine / "steps.toml").write_text(
        '[steps]\ndig = {command = "nemotron mine dig", script = "bed/dig.py"}\n'
        f'{LINE[:-1]}, configs = "bed/config/sow"}}\n{again}, config_suffix = "-late"}}\n'
    )
    recipe = read_recipe(mine)
    assert [(step.script, step.configs) for step in recipe.steps] == [
        (mine / "bed/dig.py", None),
        (folder / "bed/sow.py", mine / "bed/config/sow"),
        (folder / "bed/sow.py", mine / "kitchen/late"),
    ]
    assert [recipe.part(name, None).start for name in ("dig", "sow", "sow-late")] == [0, 0, 2]
    assert not recipe.runs_later(recipe.steps[1], "tiny-late")  # its folder has no such config


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[step]", ":1: unknown key 'step'", "did you mean steps?"),
        ("pipe = 3", ":1: pipe = 3: must be the text of a command", None),
        ('[steps]\nsow = "sow.py"', ":2: sow: must be a table of text", EXAMPLE),
        ('[steps]\nsow = {comand = "x"}', ":2: sow: unknown key 'comand'", "did you mean command?"),
        ('[steps]\nsow = {command = "x"}', ":2: sow: has no 'script', which is required", None),
        (f"[steps]\n{LINE.replace('/sow', '/sew')}", ":2: sow: script = 'bed/sew.py'", "did you mean bed/sow.py?"),
        (f"[steps]\n{LINE[:-1]}, in_pipe = 0}}", ":2: sow: in_pipe = 0: must be true or false", None),
        ("[steps\n", ":1: bad TOML", None),
    ],
)
def test_what_is_refused(folder: Path, text: str, message: str, hint: str | None) -> None:
    (folder / "steps.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        read_recipe(folder)
    assert caught.value.message.startswith(f"{folder / 'steps.toml'}{message}")
    assert caught.value.hint == hint


def test_recipes_are_found_at_any_depth() -> None:
    names = [folder.relative_to(RECIPES).as_posix() for folder in recipe_folders()]
    assert {"data/curation/nemotron_cc", "data", "nano3"} <= set(names)
