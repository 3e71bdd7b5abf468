"""Help pages of scripts and of the commands that start them, from runspec, docstring, configs and schema."""

from __future__ import annotations

import ast
import itertools
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_runspec.config.explain import allowed
from nemo_runspec.config.inputs import references_of
from nemo_runspec.config.loader import LoadedConfig, list_configs, load_config
from nemo_runspec.config.schema import (
    LISTS,
    RESERVED_RUN_KEYS,
    group_of,
    leaf_keys,
    load_schema,
    members,
    optional_group,
)
from nemo_runspec.config.yaml_text import KeyPath, dotted, spelled, split_key, value_at
from nemo_runspec.errors import UserError
from nemo_runspec.runspec import Runspec, find_script, parse
from nemo_runspec.secrets import public

if TYPE_CHECKING:
    from pydantic import BaseModel
    from typer.core import TyperCommand

_WIDTH = 18


def docstring(script: Path) -> str:
    """The script's docstring, without running the script; empty when it has none."""
    try:
        return ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    except SyntaxError:
        return ""


def config_lines(spec: Runspec) -> list[str]:
    """The section of a help page that lists the configs with the artifacts that each reads and writes.

    A config that cannot be read says so instead of breaking the page.
    """
    lines = []
    for name in list_configs(spec.config_dir, spec.config.format):
        try:
            loaded = load_config(spec.config_dir, name, (), spec.config.format)
            run = vars(loaded.run)
        except UserError as error:
            lines.append(f"  {name:<{_WIDTH}} (unreadable: {error.message})")
            continue
        about = _first_sentence(loaded.path.read_text(encoding="utf-8")) if spec.config.format != "json" else ""
        lines.append(f"  {name:<{_WIDTH}} {about}".rstrip())
        reads = list(references_of(run).values())
        writes = [str(run[key]) for key in ("output", "results") if run.get(key)]
        for verb, names in (("reads", reads), ("writes", writes)):
            if names:
                lines.append(f"  {'':<{_WIDTH}} {verb:<7} {', '.join(dict.fromkeys(names))}")
    return lines or ["  none"]


def _first_sentence(text: str) -> str:
    """The first sentence of the comment that a config begins with; examples in it are set off by more blanks."""
    comment = itertools.takewhile(lambda line: re.match(r"# ?\S", line), text.splitlines())
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join(line.strip("# ") for line in comment), maxsplit=1)[0]


def script_help(spec: Runspec, command: str) -> str:
    """The page of `python train.py --help`."""
    lines = [
        f"Usage: {command} [--config NAME|PATH] [key=value …]",
        "",
        *docstring(spec.script_path).splitlines(),
        "",
        f"Runspec: {spec.name}, launched with {spec.run.launch}",
        "",
        "Configs:",
        *config_lines(spec),
        "",
        "Options:",
        *option_lines({"-c, --config NAME": config_option(spec), "--debug": "show tracebacks"}),
        "",
        "Keys with their types and limits:",
        *(key_lines(spec) or ["  this script declares no schema"]),
        "",
        "Examples:",
        f"  {command} --config {example_config(spec)}",
    ]
    return "\n".join(lines)


class Key(NamedTuple):
    """A key of a script's schema: its dotted name, what is allowed, its default as YAML spells it ("" where a config
    has to say it), and its description."""

    name: str
    allowed: str
    default: str
    about: str


def keys_of(schema: type[BaseModel]) -> list[Key]:
    """The keys of a schema, but those that every config has; of a list of groups also those of its first item."""
    keys = []
    for name in leaf_keys(schema):
        group, _, last = name.rpartition(".")
        if group == "run" and last in RESERVED_RUN_KEYS:
            continue
        path = split_key(name)
        item = _group_of_items(schema, path)
        for each in (path, *((*path, 0, *split_key(below)) for below in (leaf_keys(item) if item else ()))):
            rule = allowed(schema, each)
            about = (rule.hint or "").partition(": ")[2]
            keys.append(Key(dotted(each), rule.text, _default(schema, each), about))
    return keys


def key_lines(spec: Runspec, config: LoadedConfig | None = None) -> list[str]:
    """Every key of the script's schema with what is allowed, its default, its value in `config` and its description."""
    schema = load_schema(spec)
    return [] if schema is None else [_key_line(key, config) for key in keys_of(schema)]


def _key_line(key: Key, config: LoadedConfig | None) -> str:
    default = f", default {key.default}" if key.default else ""
    here = ""
    if config is not None and (path := split_key(key.name)) in config.origins:
        here = f", in {config.name} {public(key.name, spelled(value_at(config.data, path)))}"
    return f"  {key.name:<{2 * _WIDTH}} {key.allowed}{default}{here}{f': {key.about}' if key.about else ''}"


def _default(schema: type[BaseModel], path: KeyPath) -> str:
    """The default of a key as YAML spells it; "" where a config has to give it."""
    from pydantic import BaseModel

    undefined = object()
    annotation: Any = schema
    value: Any = None  # of what is at hand: a group whose default has other values than its class has them below, too
    for part in path:
        if isinstance(part, int):  # an item has the defaults of its class
            annotation, value = group_of(annotation), None
            continue
        group = optional_group(annotation)
        assert group is not None
        field = group.model_fields[part]
        annotation = field.annotation
        if isinstance(value, BaseModel):
            value = getattr(value, part)
        elif field.is_required() or field.default_factory_takes_validated_data:
            value = undefined
        else:
            try:
                value = field.get_default(call_default_factory=True)
            except ValueError:  # a group some of whose keys have to be given
                value = undefined
    return "" if value is undefined else spelled(value)


def _group_of_items(schema: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """The group that each item of the list at `path` is; None where it is no list of groups."""
    annotation: Any = schema
    for part in path:
        group = optional_group(annotation)
        assert group is not None
        annotation = group.model_fields[str(part)].annotation
    is_list = any(typing.get_origin(member) in LISTS for member in members(annotation))
    return group_of(annotation) if is_list else None


def option_lines(options: dict[str, str]) -> list[str]:
    """Options and what they do, in two columns."""
    return [f"  {name:<{_WIDTH}} {about}" for name, about in options.items()]


def config_option(spec: Runspec) -> str:
    """What `-c` chooses, and what the command does without it."""
    default = spec.config.default
    has_default = default in list_configs(spec.config_dir, spec.config.format)
    bare = f"{default} if none is given" if has_default else "no default yet: name one"
    return f"a config above, or the path of a file; {bare}"


def example_config(spec: Runspec) -> str:
    """The config that an example shows: tiny, the one that runs on a laptop, where there is one."""
    names, default = list_configs(spec.config_dir, spec.config.format), spec.config.default
    return next((name for name in ("tiny", default, *names) if name in names), default)


def recipe_help(spec: Runspec, command: str, about: str, own_options: Mapping[str, str] | None = None) -> str:
    """The page of a recipe's command, `cook soup --help`.

    Args:
        command: `cook soup`.
        about: what it does, in a line or a paragraph.
        own_options: options of this command alone, and what they do.
    """
    example = example_config(spec)
    lines = [
        f"Usage: {command} [-c CONFIG] [--run PROFILE | --batch PROFILE] [--dry-run] [key=value …]",
        "",
        *about.strip().splitlines(),
        "",
        "Configs (-c):",
        *config_lines(spec),
        "",
        "Options, anywhere on the line:",
        *option_lines(
            {
                "-c, --config NAME": config_option(spec),
                "--run PROFILE": "run under a profile of env.toml, attached",
                "--batch PROFILE": "submit under a cluster profile of env.toml, and return",
                "--dry-run": "check everything and print what would run",
                **(own_options or {}),
                "--force": "start afresh instead of going on with an unfinished run",
                "--debug": "show tracebacks",
                "--keys": "list every key of the config: type, limits, what it is",
                "key=value": "set a key of the config, as in optimizer.lr=1e-3",
            }
        ),
        "",
        "Examples:",
        f"  {command} -c {example}",
        f"  {command} -c {example} --dry-run",
    ]
    return "\n".join(lines)


def _chosen(spec: Runspec, words: list[str]) -> tuple[Runspec, LoadedConfig | None]:
    """The config that `-c` chooses among `words`, and its script, which may be another one than that of `spec`."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name = (
            following if word in ("-c", "--config") else word.partition("=")[2] if word.startswith("--config=") else ""
        )
        if name:
            config = load_config(spec.config_dir, name, (), spec.config.format)
            script = vars(config.run).get("script") or spec.script_path.name
            return parse(find_script(spec.script_path.parent, script)), config
    return spec, None


def recipe_command(script: Path, configs: Path | None = None) -> type[TyperCommand]:
    """The class for `app.command(cls=…)` whose `--help` is `recipe_help`, with the configs that the block of `script`
    names, or those in the folder `configs`; nothing is read before it is asked for."""
    import typer
    from typer.core import TyperCommand, TyperOption

    class RecipeCommand(TyperCommand):
        """A typer command with the help page of a recipe."""

        def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
            """Answer `--keys`, which needs no more than a script; everything else is the command's."""
            if "--keys" in args:
                lines = key_lines(*_chosen(parse(script, configs), args))
                typer.echo("\n".join(lines or ["this script declares no schema"]))
                raise typer.Exit
            return super().parse_args(ctx, args)

        def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
            """The whole page."""
            own = {
                f"{parameter.opts[0]} {parameter.metavar}": parameter.help or ""
                for parameter in self.params
                if isinstance(parameter, TyperOption)
            }
            return recipe_help(parse(script, configs), ctx.command_path, self.help or "", own)

        def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
            """Write the page as it is, without wrapping."""
            formatter.write(self.get_help(ctx) + "\n")

    return RecipeCommand
