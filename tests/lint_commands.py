"""Part of `make lint`: command files are copies on purpose, and differ only as written down here.

Every step in a recipe's steps.toml has a command file of the words of its command: that of `nemotron nano3 sft` is
nano3/sft.py; one file runs every step of the curation, and one every step of a family of configs alone. Each file is
compared with one whose script also runs on a Ray cluster, both without what is their own: title, folder, names of
function and script, help text. The command of torchrun scripts alone has no branch for a Ray cluster; that of a script
of another recipe says where the configs are. Every script with a runspec is a step, or a config of a step names it. A
fork that rewrites its command files drops this script from its Makefile.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

from nemo_runspec.config.loader import list_configs, load_config
from nemo_runspec.runspec import Runspec, find_script, parse
from nemotron.kit.steps import RECIPES, RecipeStep, read_recipe, recipe_folders

COMMANDS = RECIPES.parent / "cli" / "commands"
MODEL = "nano3/data/prep/pretrain"
# What the command of a torchrun script says of its processes here, and has instead of the branch for a Ray cluster.
WITH_TORCHRUN = ((r"a subprocess\.", "a subprocess, torchrun if there are several GPUs."),)
WITHOUT_RAY = (
    (r"from nemo_runspec\.pipeline import submit_to_ray\n", ""),
    (r"Ray's own client hands them to a Ray cluster \.\.\.", "NeMo-Run submits to Slurm, here or over SSH."),
    (r'        if env\.executor == "ray":\n.*\n.*\n', ""),
)
# What the commands that prepare data have alone.
WITH_SCALE = (
    (r"from nemotron\.cli\.scale import Scale\n", ""),
    (r"parse_recipe_config\(ctx, scale(_all)?=scale\)", "parse_recipe_config(ctx)"),
)
# The commands of these have one file, which is told which step it runs.
OF_ANY_STEP = {"data/curate/": "data/curate_step"} | {
    f"{path.parent.name}/": f"{path.parent.name}/run_step" for path in COMMANDS.glob("*/run_step.py")
}
ANY_STEP = (
    (r"parse_recipe_config\(ctx\)\)", "parse_recipe_config(ctx), str(ctx.info_name))"),
    (r"cfg: job\.RecipeConfig\)", "cfg: job.RecipeConfig, step: str)"),
)
# Where all scripts are those of other recipes, it takes script and configs from the list of steps.
FROM_THE_LIST = (
    (r"from nemotron\.kit\.steps import RecipeStep, read_recipe\n", ""),
    (r'RECIPE = read_recipe\(recipe_dir\("\w+"\)\)\nSTEPS = .*\n', "STAGE = FOLDER\n"),
    (r"step\.script, step\.configs\)", "STAGE / SCRIPT)"),
    (r"find_script\(RECIPE\.folder, ", "find_script(STAGE, "),
    (r"STEPS\[str\(ctx\.info_name\)\]\)", "str(ctx.info_name))"),
    (r"step: RecipeStep\)", "step: str)"),
)


def own_words(name: str, spec: Runspec, text: str) -> tuple[tuple[str, str], ...]:
    """What `text`, the file of the command `name`, has of its own -> a common word for it; `spec`: of its script."""
    folder = re.escape(f'recipe_dir("{spec.script_path.parent.relative_to(RECIPES).as_posix()}")')
    (function,) = re.findall(r"^def ([a-z]\w*)\(", text, re.MULTILINE)  # a command file has one public function
    title, script = name.replace("/", " ").replace("_", "-"), f'"{spec.script_path.name}"'
    if name == "data/curate_step":
        title, script = "data curate STEP", 'f"{step}.py"'
    elif name.endswith("/run_step"):
        title, folder, script = name.replace("/run_step", " STEP"), "FOLDER", "SCRIPT"
    return (
        (rf'\A"""nemotron {title}: .*"""\n', "TITLE\n"),
        (folder, "FOLDER"),
        (
            rf"def {function}\(ctx: typer\.Context(, scale: Scale = None)?\) -> None:\n    .*\n",
            "COMMAND(ctx)\n    HELP\n",
        ),
        (rf"_execute_{function}\(", "_execute_COMMAND("),
        (rf"STAGE / {re.escape(script)}", "STAGE / SCRIPT"),
    )


def with_configs(configs: Path) -> tuple[tuple[str, str], ...]:
    """What the command of a script of another recipe has beside it: `configs`, the folder of its own configs."""
    folder = configs.relative_to(RECIPES).as_posix()
    return (
        (rf'  # the script is that of \w+\nCONFIGS = recipe_dir\("{folder}"\)\n', "\n"),
        (r'(STAGE / "\w+\.py"), CONFIGS\)', r"\1)"),
        (r"find_script\(CONFIGS, ", "find_script(STAGE, "),
    )


def changed(text: str, changes: tuple[tuple[str, str], ...]) -> str:
    """`text` with every pattern replaced; one that is not there is noted, and so becomes a difference."""
    for pattern, new in changes:
        text, count = re.subn(pattern, new, text)
        text += "" if count else f"not there: {pattern}\n"
    return text


def scripts_of(step: RecipeStep) -> set[Path]:
    """The script of a step, and those that its configs name."""
    used, spec = {step.script}, parse(step.script, step.configs)
    for name in list_configs(spec.config_dir, spec.config.format):
        script = vars(load_config(spec.config_dir, name, (), spec.config.format).run).get("script")
        used.add(find_script(step.script.parent, script or step.script.name))
    return used


def unused_scripts(steps: list[RecipeStep]) -> list[Path]:
    """Scripts with a runspec that are no step, and that no config of a step beside them names."""
    used = {script for step in steps for script in scripts_of(step)}
    scripts = [path for path in RECIPES.rglob("*.py") if "\n# [tool.runspec]\n" in path.read_text()]
    called = {path for path in scripts if (path.parent / "__main__.py").is_file()}  # Nano 2's: no `nemotron` command
    return sorted(set(scripts) - used - called)


def main() -> int:
    """Print every other difference; 1 if there is one."""
    steps = [step for recipe in map(read_recipe, recipe_folders()) for step in recipe.steps]
    commands: dict[str, Runspec] = {}
    launches: dict[str, set[str]] = {}
    configs: dict[str, Path] = {}
    for step in steps:
        name = "/".join(step.command.replace("-", "_").split()[1:])
        name = next((file for words, file in OF_ANY_STEP.items() if name.startswith(words)), name)
        commands.setdefault(name, parse(step.script))
        launches.setdefault(name, set()).update(parse(script).run.launch for script in scripts_of(step))
        if step.configs is not None and name not in OF_ANY_STEP.values():
            configs[name] = step.configs
    files = {path.relative_to(COMMANDS).with_suffix("").as_posix(): path.read_text() for path in COMMANDS.rglob("*.py")}
    texts = {name: text for name, text in files.items() if "execute_local(spec, " in text}
    model = changed(changed(texts[MODEL], WITH_SCALE), own_words(MODEL, commands[MODEL], texts[MODEL]))
    problems = [f"{name}.py: no step has this command" for name in sorted(texts.keys() - commands.keys())]
    problems += [f"{commands[name].name}: no {name}.py runs it" for name in sorted(commands.keys() - texts.keys())]
    problems += [f"{path}: no steps.toml lists it, and no config names it" for path in unused_scripts(steps)]
    for name in sorted(texts.keys() & commands.keys()):
        expected = changed(model, WITH_TORCHRUN) if commands[name].run.launch == "torchrun" else model
        expected = changed(expected, WITHOUT_RAY) if launches[name] == {"torchrun"} else expected
        expected = changed(expected, ANY_STEP) if name in OF_ANY_STEP.values() else expected
        text = changed(texts[name], WITH_SCALE) if "cli.scale" in texts[name] else texts[name]
        text = changed(text, with_configs(configs[name])) if name in configs else text
        text = changed(text, FROM_THE_LIST) if name.endswith("/run_step") else text
        text = changed(text, own_words(name, commands[name], texts[name]))
        problems += difflib.unified_diff(
            expected.splitlines(), text.splitlines(), "expected", f"{name}.py", lineterm=""
        )
    print("\n".join(problems) if problems else f"{len(texts)} command files are alike, but for their own words")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
