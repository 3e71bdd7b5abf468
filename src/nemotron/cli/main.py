"""The `nemotron` command: the list of families and tools, and how an error becomes a line and an exit code."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from nemo_runspec.cli import VERSION, run_app
from nemo_runspec.errors import run_main
from nemotron.cli.commands.artifacts import artifacts
from nemotron.cli.commands.bench import bench
from nemotron.cli.commands.env import env
from nemotron.cli.commands.fork import fork
from nemotron.cli.commands.lm_eval import lm_eval
from nemotron.cli.commands.models import models
from nemotron.cli.commands.plan import plan
from nemotron.cli.commands.runs import runs
from nemotron.cli.commands.serve import serve
from nemotron.cli.groups import QuickGroup
from nemotron.kit.commands import command_hint

# Folders under commands/, and of the same name under recipes/.
FAMILIES = ("nano3", "super3", "lightning35", "nano2", "data")

app = typer.Typer(
    name="nemotron",
    cls=QuickGroup,
    help="Train Nemotron models: every recipe whole, on this machine or at scale.",
    epilog="Start here: nemotron nano3 pipe -c tiny. Every command takes --debug, which shows tracebacks.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain pages, as those of the recipes; rich would double the time that --help takes
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(version: bool = VERSION) -> None:
    """Take the options that stand before a command."""


for family in FAMILIES:
    app.add_typer(import_module(f"nemotron.cli.commands.{family}.app").app, name=family)
app.add_typer(models, name="models")
app.command("plan")(plan)
app.command("serve")(serve)
app.command("lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(lm_eval)
app.command("fork")(fork)
app.add_typer(bench, name="bench")
app.add_typer(env, name="env")
app.add_typer(artifacts, name="artifacts")
app.add_typer(runs, name="runs")


def main() -> None:
    """Entry point of the `nemotron` command. Exits 0 done, 1 failed, 2 refused, 130 interrupted, 143 preempted."""
    sys.exit(run_main(_run, command_hint))


def _run() -> int:
    # `--debug` may stand anywhere; `errors.debugging` finds it on the command line, and no command has to know it.
    words = [word for word in sys.argv[1:] if word != "--debug"]
    return run_app(app, "nemotron", words)
