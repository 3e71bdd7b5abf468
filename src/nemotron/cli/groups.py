"""Two kinds of command group: one that lists its commands in the order of a recipe, one that is a command itself."""

from __future__ import annotations

import typer
from typer.core import TyperGroup

OPTIONS_WITH_VALUE = ("-c", "--config", "--run", "--batch", "--from")


RECIPE_ORDER = ("pipe", "data", "pretrain", "sft", "rl", "eval", "chat", "model")
DATA_ORDER = ("curate", "tokenize", "pack", "inspect", "preview")


class FamilyGroup(TyperGroup):
    """A recipe family: the help page lists its commands as one would run them (typer puts groups last)."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Names in RECIPE_ORDER, then the others."""
        return [name for name in RECIPE_ORDER if name in self.commands] + [
            name for name in self.commands if name not in RECIPE_ORDER
        ]


class DataGroup(TyperGroup):
    """Data for any family: commands in the order of the work."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Names in DATA_ORDER, then the others."""
        return [name for name in DATA_ORDER if name in self.commands] + [
            name for name in self.commands if name not in DATA_ORDER
        ]


class GroupThatRuns(TyperGroup):
    """`nemotron nano3 rl -c tiny` runs all phases, `nemotron nano3 rl rlvr -c tiny` one of them.

    Typer's group takes the first word for a sub-command; this one only if it is no option and no `key=value`.
    Without one all words go to the group's own function, in `ctx.args`. Options may stand before the sub-command.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Split `args` as described above; the rest is typer's."""
        position = _first_word(args)
        if position is not None:
            return super().parse_args(ctx, [args[position], *args[:position], *args[position + 1 :]])
        asks_for_help = any(arg in ctx.help_option_names for arg in args)
        super().parse_args(ctx, ["--help"] if asks_for_help else [])
        ctx.args = list(args)
        return ctx.args


def _first_word(args: list[str]) -> int | None:
    """Index of the first word that can only be a sub-command: no option, no option's value, no `key=value`."""
    takes_value = False
    for index, arg in enumerate(args):
        if takes_value:
            takes_value = False
        elif arg in OPTIONS_WITH_VALUE:
            takes_value = True
        elif not arg.startswith("-") and "=" not in arg:
            return index
    return None
