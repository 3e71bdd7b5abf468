"""The commands of the super3 family: its steps, as its list has them, and what else it has."""

from __future__ import annotations

import typer

from nemo_runspec.job import CONTEXT_SETTINGS
from nemotron.cli.commands.chat import FamilyModels, chat_command, chat_help
from nemotron.cli.commands.model import model
from nemotron.cli.commands.super3.pipe import HELP, RECIPE, pipe
from nemotron.cli.commands.super3.rl.published import rl
from nemotron.cli.groups import GroupThatRuns, QuickGroup, add_steps, group_in_order

WORDS = CONTEXT_SETTINGS  # all words go to the command, which knows each of them or refuses it
ORDER = ["pipe", *(RECIPE.words(step)[0] for step in RECIPE.steps), "chat", "model"]
MODELS = FamilyModels(
    "super3",
    "nemotron super3",
    base=("pretrain",),
    aligned=("sft", "rl", "rlhf", "mtp-healing", "quantize", "qad"),
    defaults=("sft", "rlhf", "mtp-healing"),
    names_end_with_config=True,
    base_config="tiny-phase2",
)

app = typer.Typer(
    cls=group_in_order(ORDER),
    no_args_is_help=True,
    help="Nemotron 3 Super: LatentMoE, multi-token prediction, staged RL, quantisation.",
)
data = typer.Typer(cls=QuickGroup, help="What the stages are trained on.", no_args_is_help=True)
prep = typer.Typer(cls=QuickGroup, help="Prepare the data of a stage.", no_args_is_help=True)
phases = typer.Typer(cls=GroupThatRuns, invoke_without_command=True, context_settings=WORDS)
phases.callback(help=rl.__doc__)(rl)

app.command("pipe", context_settings=WORDS, help=HELP)(pipe)
add_steps({"": app, "data": data, "data prep": prep, "rl": phases}, RECIPE, __package__)
data.add_typer(prep, name="prep")
app.add_typer(data, name="data")
app.add_typer(phases, name="rl")
app.command("chat", help=chat_help(MODELS))(chat_command(MODELS))
app.add_typer(model, name="model")
