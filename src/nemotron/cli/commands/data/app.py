"""The commands of `nemotron data`, as a list. What each one does stands in its own file."""

from __future__ import annotations

import typer

from nemo_runspec.config.help import recipe_command
from nemo_runspec.job import CONTEXT_SETTINGS
from nemotron.cli.commands.data.curate import CURATION, STEPS, curate
from nemotron.cli.commands.data.curate_step import curate_step
from nemotron.cli.commands.data.inspect import inspect
from nemotron.cli.commands.data.pack import pack
from nemotron.cli.commands.data.preview import preview
from nemotron.cli.commands.data.tokenize import tokenize
from nemotron.cli.groups import GroupInOrder, GroupThatRuns
from nemotron.cli.recipe_dir import recipe_dir

WORDS = CONTEXT_SETTINGS  # all words go to the command, which knows each of them or refuses it

data = typer.Typer(cls=GroupInOrder, no_args_is_help=True, help="Your data: curate, tokenise, pack, look at it.")
# `recipe_command(script)` writes a command's help page from the configs that it can run.
data.command(
    "tokenize", cls=recipe_command(recipe_dir("data/tokenize") / "tokenize_documents.py"), context_settings=WORDS
)(tokenize)
data.command("pack", cls=recipe_command(recipe_dir("data/pack") / "pack.py"), context_settings=WORDS)(pack)
data.command("inspect")(inspect)
data.command("preview")(preview)

curation = typer.Typer(cls=GroupThatRuns, invoke_without_command=True, context_settings=WORDS)
curation.callback(help=curate.__doc__)(curate)
for step, about in STEPS.items():
    curation.command(step, help=about, cls=recipe_command(CURATION / f"{step}.py"), context_settings=WORDS)(curate_step)
data.add_typer(curation, name="curate")
