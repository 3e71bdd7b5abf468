"""Pages of the reference that are written from the code when the site is built. A hook of MkDocs (mkdocs.yml).

`docs/reference/commands/`: the help page of every command. `docs/reference/keys/`: every key of every script's config.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from nemo_runspec.cli import app as nemo_runspec
from nemo_runspec.config.help import Key, docstring, keys_of
from nemo_runspec.config.loader import list_configs
from nemo_runspec.config.schema import load_schema
from nemo_runspec.runspec import Runspec, parse
from nemotron.cli.main import FAMILIES
from nemotron.cli.main import app as nemotron
from nemotron.kit.steps import RECIPES

ROOT = Path(__file__).resolve().parents[2]
COMMANDS, KEYS = "docs/reference/commands", "docs/reference/keys"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the written pages."""
    for path, content in {**command_pages(), **key_pages()}.items():
        page = File.generated(config, path, content=content)
        page.dest_uri = page.dest_uri.removeprefix("docs/")
        files.append(page)
    return files


def command_pages() -> dict[str, str]:
    """Path -> page: one a family, one for the other commands of `nemotron`, one for `nemo-runspec`."""
    os.environ["COLUMNS"] = "110"  # of the help pages, whatever terminal this runs in
    program: Any = typer.main.get_command(nemotron)
    own = {name: command for name, command in program.commands.items() if name not in FAMILIES}
    families = {name: help_pages(program.commands[name], f"nemotron {name}") for name in FAMILIES}
    others = [page for name, command in own.items() for page in help_pages(command, f"nemotron {name}")]
    top = help_page(program, "nemotron")
    toolkit = help_pages(typer.main.get_command(nemo_runspec), "nemo-runspec")
    about = (
        "What `--help` of every command says. Exit codes: 0 done, 1 failed while working, 2 refused before any work, "
        "130 interrupted, 143 stopped by a signal with its checkpoint saved."
    )
    helps = {name: program.commands[name].help for name in FAMILIES}
    pages = {name: [f"# nemotron {name}", helps[name], about, *texts] for name, texts in families.items()}
    pages["nemotron"] = ["# nemotron", program.help, about, top.partition("\n\n")[2], *others]
    pages["nemo-runspec"] = ["# nemo-runspec", nemo_runspec.info.help, about, *toolkit]
    return {f"{COMMANDS}/{name}.md": "\n\n".join(parts) + "\n" for name, parts in pages.items()}


def help_pages(command: Any, words: str) -> Iterator[str]:
    """The sections of a command and of all below it."""
    yield help_page(command, words)
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from help_pages(below, f"{words} {name}")


def help_page(command: Any, words: str) -> str:
    """A section with what `words --help` prints."""
    context = command.make_context(words, [], resilient_parsing=True)
    return f"## {words}\n\n```text\n{command.get_help(context).strip()}\n```"


def key_pages() -> dict[str, str]:
    """Path -> page: one a family, a section with a table for each of its scripts."""
    scripts: dict[str, list[Path]] = {}
    for script in sorted(RECIPES.rglob("*.py")):
        if "\n# [tool.runspec]\n" in script.read_text(encoding="utf-8"):
            scripts.setdefault(script.relative_to(RECIPES).parts[0], []).append(script)
    return {f"{KEYS}/{family}.md": key_page(family, found) for family, found in scripts.items()}


def key_page(family: str, scripts: list[Path]) -> str:
    """Every key of a family's scripts, from their schemas."""
    about = (
        f"Every key of every script of `{family}`, from the schemas: what a value may be, its default, and what it "
        "is, with its unit. A key without a default has to stand in the config. A key is set in a config's YAML or "
        "behind a command, as in `train.global_batch_size=16`; `--keys` of a command prints its own. `sources.0` is "
        "the first of a list."
    )
    return "\n\n".join([f"# Config keys of {family}", about, *(section(parse(script)) for script in scripts)]) + "\n"


def section(spec: Runspec) -> str:
    """The heading, configs and table of a script."""
    place = spec.script_path.relative_to(RECIPES)
    lines = [f"## {place.relative_to(place.parts[0])}", docstring(spec.script_path).partition("\n\n")[0]]
    if configs := list_configs(spec.config_dir, spec.config.format):
        lines.append(f"Configs: {', '.join(f'`{name}`' for name in configs)}.")
    schema = load_schema(spec)
    if schema is None:
        return "\n\n".join(lines)
    rows = map(row, keys_of(schema))
    return "\n\n".join([*lines, "\n".join(["| key | value | default | |", "|---|---|---|---|", *rows])])


def row(key: Key) -> str:
    """A line of the table."""
    return f"| {' | '.join([f'`{key.name}`', cell(key.allowed), cell(key.default), cell(key.about)])} |"


def cell(text: str) -> str:
    """A text as a cell of a table shows it as it is; what stands between backticks is code."""
    marks = {"\\": "\\\\", "*": "\\*", "_": "\\_", "<": "&lt;", "[": "\\["}
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    plain = ["".join(marks.get(character, character) for character in part) for part in parts[::2]]
    return "`".join(part for pair in zip(plain, [*parts[1::2], ""], strict=True) for part in pair).removesuffix("`")
