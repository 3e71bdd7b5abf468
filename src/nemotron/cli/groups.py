"""Command groups: one that lists its commands in a given order, one that is a command itself; and the commands of a
recipe's steps, put into the groups by the list of the steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import isfunction
from typing import Any

import typer
from typer.core import TyperGroup

from nemo_runspec.config.help import recipe_command
from nemo_runspec.errors import UserError, did_you_mean, nearest
from nemo_runspec.job import CONTEXT_SETTINGS, VALUED
from nemotron.kit.steps import STEPS_FILE, Recipe, RecipeStep

OPTIONS_WITH_VALUE = (*VALUED, "--from", "--to")


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line and with its full stop."""
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".") + "." if text else ""


class QuickGroup(TyperGroup):
    """A group with whole sentences on its help page, which refuses an option given twice or too early.

    It does not load pydantic: typer does, to convert a `--help` that is not on the command line.
    """

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """The commands, each with the whole first sentence of its help (typer cuts it after 45 characters)."""
        commands = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        rows = [(name, first_sentence(command.help or "")) for name, command in commands if not command.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]
        """Typer's own, flags (`--help`, `--install-completion`) with a default that needs no conversion."""
        params: list[Any] = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False) and param.default is None:
                param.default = False
        return params

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Typer's own; an option of some command that stands before it (`--run X nano3 pretrain`) is a UserError."""
        option = args[0].partition("=")[0] if args else ""
        own = [spelling for param in self.get_params(ctx) for spelling in param.opts]
        if option.startswith("-") and option not in own and nearest(option, own) is None:
            raise UserError(f"option {option} stands before the command", f"as in {ctx.command_path} COMMAND {option}")
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        """Typer's own, which of an option with one value takes the last: one that is given twice is a UserError."""
        name, command, words = super().resolve_command(ctx, args)
        options = [word.partition("=")[0] for word in itertools.takewhile(lambda word: word != "--", words)]
        for param in command.params if command else ():
            if not getattr(param, "is_flag", False) and not getattr(param, "multiple", False):
                given = [option for option in options if option.startswith("-") and option in param.opts]
                if len(given) > 1:
                    raise UserError(f"option {given[0]} is given twice")
        return name, command, words


def group_in_order(order: Sequence[str]) -> type[QuickGroup]:
    """The class of a group whose help page lists its commands in `order`, then the others (typer puts groups last)."""

    class GroupInOrder(QuickGroup):
        """A group whose commands have an order."""

        def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
            """Names in `order`, then the others."""
            return sorted(self.commands, key=lambda name: order.index(name) if name in order else len(order))

    return GroupInOrder


def add_steps(groups: Mapping[str, typer.Typer], recipe: Recipe, package: str) -> None:
    """Put the command of every step of `recipe` into its group.

    Args:
        groups: the family's own group under "", those below it under their words, as in "data prep".
        package: that of the family's command files.

    Raises:
        UserError: a step's command is in none of the groups, or there is no file for it.
    """
    for step in {step.command: step for step in recipe.steps}.values():  # one command may run two steps
        *group, name = recipe.words(step)
        words = " ".join(group)
        if words not in groups:
            at = f"{recipe.folder / STEPS_FILE}: {step.name}: command = {step.command!r}"
            raise UserError(f"{at}: no group {words!r}", did_you_mean(words, [word for word in groups if word]))
        page = recipe_command(step.script, step.configs)
        add = groups[words].command(name, cls=page, context_settings=CONTEXT_SETTINGS)
        add(_command_of(step, recipe, ".".join([package, *group, name]).replace("-", "_")))


def _command_of(step: RecipeStep, recipe: Recipe, name: str) -> Callable[..., None]:
    """The first public function of the command file, the module `name`, which has the words of the step's command: that
    of `nemotron nano3 data prep sft` is in commands/nano3/data/prep/sft.py; a dash in a word is an underscore there."""
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the command file imports
        at = f"{recipe.folder / STEPS_FILE}: {step.name}: command = {step.command!r}"
        raise UserError(f"{at}: there is no src/{name.replace('.', '/')}.py", "copy the file of another step") from None
    functions = [value for key, value in vars(module).items() if isfunction(value) and not key.startswith("_")]
    own = [function for function in functions if function.__module__ == name]
    if not own:
        raise UserError(f"src/{name.replace('.', '/')}.py: no public function in it; the first one is the command")
    command: Callable[..., None] = own[0]
    return command


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
