"""Two kinds of command group: one that lists its commands in the order of a recipe, one that is a command itself."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

OPTIONS_WITH_VALUE = ("-c", "--config", "--run", "--batch", "--from")

# Of a recipe family, and of `nemotron data`.
ORDER = (
    *("pipe", "data", "pretrain", "sft", "rl", "eval", "chat", "model"),
    *("curate", "tokenize", "pack", "inspect", "preview"),
)


class QuickGroup(TyperGroup):
    """A group that does not load pydantic: typer does, to convert a `--help` that is not on the command line."""

    def get_help_option(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Typer's own, with a value that needs no conversion."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


class GroupInOrder(QuickGroup):
    """A group whose help page lists its commands as one would run them (typer puts groups last)."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Names in ORDER, then the others."""
        return sorted(self.commands, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


class GroupThatRuns(QuickGroup):
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
