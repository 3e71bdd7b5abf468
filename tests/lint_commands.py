"""Part of `make lint`: command files are copies on purpose, and differ only in their own words.

Each that runs a script is compared with one whose script also runs on a Ray cluster, both without what is their own:
title, folder, names of function and script, help text. A command whose script is a torchrun script has no branch for a
Ray cluster. A fork that rewrites its command files drops this script from its Makefile.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

COMMANDS = Path(__file__).resolve().parents[1] / "src/nemotron/cli/commands"
MODEL = "nano3/data/prep/pretrain.py"
OWN_WORDS = (
    (r'\A"""nemotron .*"""\n', "TITLE\n"),
    (r'recipe_dir\("[\w/]+"\)', "FOLDER"),
    (r"def \w+\(ctx: typer\.Context\) -> None:\n    .*\n", "def COMMAND(ctx: typer.Context) -> None:\n    HELP\n"),
    (r"_execute_\w+\(", "_execute_COMMAND("),
    (r'STAGE / f?"[\w{}]+\.py"', "STAGE / SCRIPT"),
)
# What a torchrun script has instead of the branch for a Ray cluster.
WITHOUT_RAY = (
    (r"from nemo_runspec\.pipeline import submit_to_ray\n", ""),
    (r"a subprocess\.", "a subprocess, torchrun if there are several GPUs."),
    (r"Ray's own client hands them to a Ray cluster \.\.\.", "NeMo-Run submits to Slurm, here or over SSH."),
    (r'        if env\.executor == "ray":\n.*\n.*\n', ""),
)
# One command runs every step of the curation: it is told which.
ANY_STEP = (
    (r"parse_recipe_config\(ctx\)\)", "parse_recipe_config(ctx), str(ctx.info_name))"),
    (r"cfg: job\.RecipeConfig\)", "cfg: job.RecipeConfig, step: str)"),
)


def changed(text: str, changes: tuple[tuple[str, str], ...]) -> str:
    """`text` with every pattern replaced; one that is not there is noted, and so becomes a difference."""
    for pattern, new in changes:
        text, count = re.subn(pattern, lambda match, new=new: new, text)
        text += "" if count else f"not there: {pattern}\n"
    return text


def main() -> int:
    """Print every other difference; 1 if there is one."""
    texts = {path.relative_to(COMMANDS).as_posix(): path.read_text(encoding="utf-8") for path in COMMANDS.rglob("*.py")}
    commands = {name: text for name, text in sorted(texts.items()) if "execute_local(spec, " in text}
    model = changed(commands[MODEL], OWN_WORDS)
    problems: list[str] = []
    for name, text in commands.items():
        expected = model if "submit_to_ray" in text else changed(model, WITHOUT_RAY)
        expected = changed(expected, ANY_STEP) if name == "data/curate_step.py" else expected
        lines = expected.splitlines(), changed(text, OWN_WORDS).splitlines()
        problems += difflib.unified_diff(*lines, "expected", name, lineterm="")
    print("\n".join(problems) if problems else f"{len(commands)} command files are alike, but for their own words")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
