"""The commands of the lightning35 family: its steps, as its list has them, and what else it has."""

from __future__ import annotations

import typer

from nemo_runspec.config.help import recipe_command
from nemo_runspec.job import CONTEXT_SETTINGS
from nemotron.cli.commands.chat import FamilyModels, chat_command, chat_help
from nemotron.cli.commands.lightning35.pipe import HELP, pipe
from nemotron.cli.commands.lightning35.run_step import RECIPE, run_step
from nemotron.cli.commands.model import model
from nemotron.cli.groups import group_in_order

MODELS = FamilyModels(
    "lightning35",
    "nemotron lightning35",
    base=("pretrain",),
    aligned=("sft", "rl"),
    defaults=("rl",),
    names_end_with_config=True,
)

app = typer.Typer(
    cls=group_in_order(["pipe", *(step.name for step in RECIPE.steps), "chat", "model"]),
    no_args_is_help=True,
    help="Nemotron 3.5 Lightning: Nano's size with multi-token prediction, as configs alone.",
)
app.command("pipe", context_settings=CONTEXT_SETTINGS, help=HELP)(pipe)
for step in RECIPE.steps:  # one command file runs every step
    page = recipe_command(step.script, step.configs)
    app.command(step.name, help=step.about, cls=page, context_settings=CONTEXT_SETTINGS)(run_step)
app.command("chat", help=chat_help(MODELS))(chat_command(MODELS))
app.add_typer(model, name="model")
