"""Help pages of scripts, derived from runspec, docstring, configs and schema."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from nemo_runspec.config.explain import allowed
from nemo_runspec.config.loader import list_configs, load_config
from nemo_runspec.config.schema import RESERVED_RUN_KEYS, leaf_keys, load_schema
from nemo_runspec.config.yaml_text import split_key
from nemo_runspec.errors import UserError
from nemo_runspec.runspec import Runspec

_WIDTH = 18


@dataclass(frozen=True)
class ConfigSummary:
    """A config as a help page lists it. `comment` is the first comment line of the file."""

    name: str
    comment: str
    script: str | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def summarize_config(config_dir: Path, name: str, fmt: str = "omegaconf") -> ConfigSummary:
    """What a config says about itself; a config that cannot be read says so instead of breaking the help page."""

    try:
        loaded = load_config(config_dir, name, (), fmt)
        run = vars(loaded.run)
    except UserError as error:
        return ConfigSummary(name, f"(unreadable: {error.message})", None, (), ())
    comment = ""
    if fmt != "json":
        lines = loaded.path.read_text(encoding="utf-8").splitlines()
        comment = next((line.strip("# ").strip() for line in lines[:3] if line.startswith("#")), "")
    reads = tuple(dict.fromkeys(str(value) for key, value in run.items() if key not in RESERVED_RUN_KEYS and value))
    writes = tuple(str(run[key]) for key in ("output", "results") if run.get(key))
    return ConfigSummary(name, comment, run.get("script"), reads, writes)


def docstring(script: Path) -> str:
    """The script's docstring, without running the script; empty when it has none."""
    try:
        return ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    except SyntaxError:
        return ""


def config_lines(config_dir: Path, fmt: str = "omegaconf") -> list[str]:
    """The section of a help page that lists the configs with the artifacts that each reads and writes."""

    lines = []
    for name in list_configs(config_dir, fmt):
        summary = summarize_config(config_dir, name, fmt)
        lines.append(f"  {name:<{_WIDTH}} {summary.comment}".rstrip())
        if summary.reads:
            lines.append(f"  {'':<{_WIDTH}} reads   {', '.join(summary.reads)}")
        if summary.writes:
            lines.append(f"  {'':<{_WIDTH}} writes  {', '.join(summary.writes)}")
    return lines or ["  none"]


def script_help(spec: Runspec, command: str) -> str:
    """The page of `python train.py --help`."""
    example = example_config(spec.config_dir, spec.config.default, spec.config.format)
    chosen = config_option(spec.config_dir, spec.config.default, spec.config.format)
    lines = [
        f"Usage: {command} [--config NAME|PATH] [key=value …]",
        "",
        *docstring(spec.script_path).splitlines(),
        "",
        f"Runspec: {spec.name}, launched with {spec.run.launch}",
        "",
        "Configs:",
        *config_lines(spec.config_dir, spec.config.format),
        "",
        "Options:",
        *option_lines({"-c, --config NAME": chosen, "--debug": "show tracebacks"}),
        "",
        "Keys with their types and limits:",
        *(key_lines(spec) or ["  this script declares no schema"]),
        "",
        "Examples:",
        f"  {command} --config {example}",
    ]
    return "\n".join(lines)


def key_lines(spec: Runspec) -> list[str]:
    """Every key of the script's schema with its default, what is allowed and its description."""

    schema = load_schema(spec)
    if schema is None:
        return []
    lines = []
    for key in leaf_keys(schema):
        group, _, last = key.rpartition(".")
        if group == "run" and last in RESERVED_RUN_KEYS:
            continue
        rule = allowed(schema, split_key(key))
        about = "" if rule.hint is None else f": {rule.hint.partition(': ')[2]}"
        lines.append(f"  {key:<{2 * _WIDTH}} {rule.text}{about}")
    return lines


def option_lines(options: dict[str, str]) -> list[str]:
    """Options and what they do, in two columns."""
    return [f"  {name:<{_WIDTH}} {about}" for name, about in options.items()]


def config_option(config_dir: Path, default: str, fmt: str = "omegaconf") -> str:
    """What `-c` chooses, and what the command does without it."""

    bare = f"{default} if none is given" if default in list_configs(config_dir, fmt) else "no default yet: name one"
    return f"a config above, or the path of a file; {bare}"


def example_config(config_dir: Path, default: str, fmt: str = "omegaconf") -> str:
    """The config that an example shows: tiny, the one that runs on a laptop, where there is one."""

    names = list_configs(config_dir, fmt)
    return next((name for name in ("tiny", default, *names) if name in names), default)
