"""Help pages of the commands that start scripts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_runspec.config.help import config_lines, config_option, example_config, option_lines
from nemo_runspec.runspec import parse

if TYPE_CHECKING:
    from typer.core import TyperCommand


def recipe_help(command: str, about: str, config_dir: Path, default: str = "default") -> str:
    """The page of a recipe's command, `cook soup --help`.

    Args:
        command: `cook soup`.
        about: what it does, in a line or a paragraph.
        config_dir: the configs that `-c` chooses from.
        default: the config of the bare command.
    """
    example = example_config(config_dir, default)
    lines = [
        f"Usage: {command} [-c CONFIG] [--run PROFILE | --batch PROFILE] [--dry-run] [key=value …]",
        "",
        *about.strip().splitlines(),
        "",
        "Configs (-c):",
        *config_lines(config_dir),
        "",
        "Options, anywhere on the line:",
        *option_lines(
            {
                "-c, --config NAME": config_option(config_dir, default),
                "--run PROFILE": "run under a profile of env.toml, attached",
                "--batch PROFILE": "submit under a cluster profile of env.toml, and return",
                "--dry-run": "check everything and print what would run",
                "--force": "start afresh instead of going on with an unfinished run",
                "--debug": "show tracebacks",
                "key=value": "set a key of the config, as in optimizer.lr=1e-3",
            }
        ),
        "",
        "Examples:",
        f"  {command} -c {example}",
        f"  {command} -c {example} --dry-run",
    ]
    return "\n".join(lines)


def recipe_command(script: Path) -> type[TyperCommand]:
    """The class for `app.command(cls=…)` whose `--help` is `recipe_help`, with the configs that the block of `script`
    names; nothing is read before it is asked for."""
    import typer
    from typer.core import TyperCommand

    class RecipeCommand(TyperCommand):
        """A typer command with the help page of a recipe."""

        def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
            """The whole page."""
            spec = parse(script)
            return recipe_help(ctx.command_path, self.help or "", spec.config_dir, spec.config.default)

        def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
            """Write the page as it is, without wrapping."""
            formatter.write(self.get_help(ctx) + "\n")

    return RecipeCommand
