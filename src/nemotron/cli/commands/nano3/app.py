"""The commands of the nano3 family, as a list. What each one does stands in its own file."""

from __future__ import annotations

import typer

from nemo_runspec.config.help import recipe_command
from nemo_runspec.job import CONTEXT_SETTINGS
from nemotron.cli.commands.model import model
from nemotron.cli.commands.nano3.chat import chat
from nemotron.cli.commands.nano3.data.prep.pretrain import pretrain as prep_pretrain
from nemotron.cli.commands.nano3.data.prep.rl import rl as prep_rl
from nemotron.cli.commands.nano3.data.prep.sft import sft as prep_sft
from nemotron.cli.commands.nano3.eval import evaluate
from nemotron.cli.commands.nano3.pipe import pipe
from nemotron.cli.commands.nano3.pretrain import pretrain
from nemotron.cli.commands.nano3.rl.published import rl
from nemotron.cli.commands.nano3.rl.rlvr import rlvr
from nemotron.cli.commands.nano3.sft import sft
from nemotron.cli.groups import GroupInOrder, GroupThatRuns, QuickGroup
from nemotron.cli.recipe_dir import recipe_dir

PRETRAIN, SFT, RL, EVAL = (
    recipe_dir(f"nano3/{stage}") for stage in ("stage0_pretrain", "stage1_sft", "stage2_rl", "stage3_eval")
)
# `recipe_command(script)` writes a command's help page from the configs that it can run.
WORDS = CONTEXT_SETTINGS  # all words go to the command, which knows each of them or refuses it

nano3 = typer.Typer(
    cls=GroupInOrder, no_args_is_help=True, help="Nemotron 3 Nano: Mamba-2, attention and mixture of experts."
)
nano3.command("pipe", context_settings=WORDS)(pipe)

data = typer.Typer(cls=QuickGroup, help="What the stages are trained on.", no_args_is_help=True)
prep = typer.Typer(cls=QuickGroup, help="Prepare the data of a stage.", no_args_is_help=True)
prep.command("pretrain", cls=recipe_command(PRETRAIN / "data_prep.py"), context_settings=WORDS)(prep_pretrain)
prep.command("sft", cls=recipe_command(SFT / "data_prep.py"), context_settings=WORDS)(prep_sft)
prep.command("rl", cls=recipe_command(RL / "data_prep.py"), context_settings=WORDS)(prep_rl)
data.add_typer(prep, name="prep")
nano3.add_typer(data, name="data")

nano3.command("pretrain", cls=recipe_command(PRETRAIN / "train.py"), context_settings=WORDS)(pretrain)
nano3.command("sft", cls=recipe_command(SFT / "train.py"), context_settings=WORDS)(sft)

phases = typer.Typer(cls=GroupThatRuns, invoke_without_command=True, context_settings=WORDS)
phases.callback(help=rl.__doc__)(rl)
phases.command("rlvr", cls=recipe_command(RL / "rlvr.py"), context_settings=WORDS)(rlvr)
nano3.add_typer(phases, name="rl")

nano3.command("eval", cls=recipe_command(EVAL / "evaluate.py"), context_settings=WORDS)(evaluate)
nano3.command("chat")(chat)
nano3.add_typer(model, name="model")
