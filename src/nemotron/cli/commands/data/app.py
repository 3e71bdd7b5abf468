"""The commands of `nemotron data`. What each one does stands in its own file."""

from __future__ import annotations

import typer

from nemo_runspec.config.help import recipe_command
from nemo_runspec.job import CONTEXT_SETTINGS
from nemotron.cli.commands.data import curate as curation
from nemotron.cli.commands.data.curate_step import curate_step
from nemotron.cli.commands.data.inspect import inspect
from nemotron.cli.commands.data.preview import preview
from nemotron.cli.groups import GroupThatRuns, add_steps, group_in_order
from nemotron.cli.recipe_dir import recipe_dir
from nemotron.kit.steps import read_recipe

WORDS = CONTEXT_SETTINGS  # all words go to the command, which knows each of them or refuses it
ORDER = ("curate", "tokenize", "pack", "inspect", "preview")

app = typer.Typer(
    cls=group_in_order(ORDER), no_args_is_help=True, help="Your data: curate, tokenise, pack, look at it."
)
add_steps({"": app}, read_recipe(recipe_dir("data")), __package__)
app.command("inspect")(inspect)
app.command("preview")(preview)

curate = typer.Typer(cls=GroupThatRuns, invoke_without_command=True, context_settings=WORDS)
curate.callback(help=curation.curate.__doc__)(curation.curate)
for step in curation.RECIPE.steps:  # one command file runs every step
    add = curate.command(step.name, help=step.about, cls=recipe_command(step.script), context_settings=WORDS)
    add(curate_step)
app.add_typer(curate, name="curate")
