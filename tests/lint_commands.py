"""Part of `make lint`: command files are copies on purpose, and differ only as written down here.

Every script with a runspec has a command file that is called like it, `nano3/sft` has `nano3/sft.py`; the exceptions
are listed below. Each file is compared with one whose script also runs on a Ray cluster, both without what is their
own: title, folder, names of function and script, help text. The command of a torchrun script has no branch for a Ray
cluster. A fork that rewrites its command files drops this script from its Makefile.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

from nemo_runspec.runspec import Runspec, parse

PACKAGE = Path(__file__).resolve().parents[1] / "src/nemotron"
COMMANDS, RECIPES = PACKAGE / "cli/commands", PACKAGE / "recipes"
MODEL = "nano3/data/prep/pretrain"
# The command of a script that is called otherwise; one command runs every step of the curation.
CALLED = {
    "nano3/rl": "nano3/rl/rlvr",
    "nano3/data/prep/rl/blend": None,  # a config of `nano3 data prep rl` names this script
    **{f"data/curate/{path.stem}": "data/curate_step" for path in RECIPES.glob("data/curation/nemotron_cc/*.py")},
}
FUNCTIONS = {"nano3/eval": "evaluate"}  # `eval` is Python's
# What a torchrun script has instead of the branch for a Ray cluster.
WITHOUT_RAY = (
    (r"from nemo_runspec\.pipeline import submit_to_ray\n", ""),
    (r"a subprocess\.", "a subprocess, torchrun if there are several GPUs."),
    (r"Ray's own client hands them to a Ray cluster \.\.\.", "NeMo-Run submits to Slurm, here or over SSH."),
    (r'        if env\.executor == "ray":\n.*\n.*\n', ""),
)
# The command that runs every step of the curation is told which.
ANY_STEP = (
    (r"parse_recipe_config\(ctx\)\)", "parse_recipe_config(ctx), str(ctx.info_name))"),
    (r"cfg: job\.RecipeConfig\)", "cfg: job.RecipeConfig, step: str)"),
)


def own_words(name: str, spec: Runspec) -> tuple[tuple[str, str], ...]:
    """What the file of the command `name`, which runs the script of `spec`, has of its own -> a common word for it."""
    folder = spec.script_path.parent.relative_to(RECIPES).as_posix()
    function = FUNCTIONS.get(name, Path(name).name)
    title, script = name.replace("/", " "), f'"{spec.script_path.name}"'
    if name == "data/curate_step":
        title, script = "data curate STEP", 'f"{step}.py"'
    return (
        (rf'\A"""nemotron {title}: .*"""\n', "TITLE\n"),
        (rf'recipe_dir\("{folder}"\)', "FOLDER"),
        (rf"def {function}\(ctx: typer\.Context\) -> None:\n    .*\n", "def COMMAND(ctx) -> None:\n    HELP\n"),
        (rf"_execute_{function}\(", "_execute_COMMAND("),
        (rf"STAGE / {re.escape(script)}", "STAGE / SCRIPT"),
    )


def changed(text: str, changes: tuple[tuple[str, str], ...]) -> str:
    """`text` with every pattern replaced; one that is not there is noted, and so becomes a difference."""
    for pattern, new in changes:
        text, count = re.subn(pattern, new, text)
        text += "" if count else f"not there: {pattern}\n"
    return text


def main() -> int:
    """Print every other difference; 1 if there is one."""
    specs = [parse(path) for path in sorted(RECIPES.rglob("*.py")) if "\n# [tool.runspec]\n" in path.read_text()]
    commands = {name: spec for spec in specs if (name := CALLED.get(spec.name, spec.name))}
    files = {path.relative_to(COMMANDS).with_suffix("").as_posix(): path.read_text() for path in COMMANDS.rglob("*.py")}
    texts = {name: text for name, text in files.items() if "execute_local(spec, " in text}
    model = changed(texts[MODEL], own_words(MODEL, commands[MODEL]))
    problems = [f"{name}.py: no script of this name" for name in sorted(texts.keys() - commands.keys())]
    problems += [f"{commands[name].name}: no {name}.py runs it" for name in sorted(commands.keys() - texts.keys())]
    for name in sorted(texts.keys() & commands.keys()):
        expected = changed(model, WITHOUT_RAY) if commands[name].run.launch == "torchrun" else model
        expected = changed(expected, ANY_STEP) if name == "data/curate_step" else expected
        text = changed(texts[name], own_words(name, commands[name]))
        problems += difflib.unified_diff(
            expected.splitlines(), text.splitlines(), "expected", f"{name}.py", lineterm=""
        )
    print("\n".join(problems) if problems else f"{len(texts)} command files are alike, but for their own words")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
