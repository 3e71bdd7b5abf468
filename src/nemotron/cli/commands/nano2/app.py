"""The commands of the nano2 family: its steps, as its list has them, and what else it has."""

from __future__ import annotations

import typer

from nemo_runspec.job import CONTEXT_SETTINGS
from nemotron.cli.commands.chat import FamilyModels, chat_command, chat_help
from nemotron.cli.commands.model import model
from nemotron.cli.commands.nano2.pipe import HELP, RECIPE, pipe
from nemotron.cli.groups import QuickGroup, add_steps, group_in_order

ORDER = ["pipe", "data", "pretrain", "long", "sft", "rl", "compress", "eval", "chat", "model"]
MODELS = FamilyModels(
    "nano2",
    "nemotron nano2",
    base=("pretrain", "long"),
    aligned=("sft", "rl", "compressed"),
    defaults=("sft", "rl"),
    names_end_with_config=False,
)

app = typer.Typer(
    cls=group_in_order(ORDER), no_args_is_help=True, help="Nemotron Nano 2, the tutorial: Mamba-2, attention and MLP."
)
data = typer.Typer(cls=QuickGroup, help="What the stages are trained on.", no_args_is_help=True)
prep = typer.Typer(cls=QuickGroup, help="Prepare the data of a stage.", no_args_is_help=True)
halves = typer.Typer(cls=QuickGroup, help="A smaller model: prune, then distil (stage 3).", no_args_is_help=True)
evaluations = typer.Typer(cls=QuickGroup, help="Measure what a stage has made.", no_args_is_help=True)

app.command("pipe", context_settings=CONTEXT_SETTINGS, help=HELP)(pipe)
add_steps({"": app, "data": data, "data prep": prep, "compress": halves, "eval": evaluations}, RECIPE, __package__)
data.add_typer(prep, name="prep")
app.add_typer(data, name="data")
app.add_typer(halves, name="compress")
app.add_typer(evaluations, name="eval")
app.command("chat", help=chat_help(MODELS))(chat_command(MODELS))
app.add_typer(model, name="model")
