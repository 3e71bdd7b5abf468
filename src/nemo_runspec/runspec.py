"""Read the `[tool.runspec]` block of a script (PEP 723) into a frozen `Runspec`, strictly.

The block is a comment, so nothing is imported or run: `parse` is safe on any file. Every fault is a `UserError` that
names the file, the line, the key and what is allowed. The format is specified in docs/runspec/v1/spec.md.
"""

from __future__ import annotations

import os
import re
import shlex
import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_runspec.errors import UserError, did_you_mean, nearest
from nemo_runspec.rules import STRING, VARIABLE, Rule, choice, integer, near_choice, shown_value
from nemo_runspec.secrets import has_password, looks_secret
from nemo_runspec.toml_text import TomlText, read_toml
from nemo_runspec.words import shown

SCHEMA_VERSION = "1"
LAUNCHERS = ("torchrun", "ray", "direct")
FORMATS = ("omegaconf", "yaml", "json")
DEFAULT_CMD = "python {script} --config {config}"

_START = re.compile(r"^# /// script[ \t]*$", re.MULTILINE)
# PEP 723: the last `# ///` of the comment ends the block.
_BLOCK = re.compile(r"\n(?P<comments>(?:#(?: .*)?\n)*)# ///[ \t]*$", re.MULTILINE)

_DISTRIBUTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*"  # of a script, its family or its stage

_TOP = {
    "schema": STRING,
    "name": Rule(
        str,
        'words of letters, digits, ".", "_", "-", joined by "/"',
        NAME,
    ),
    "docs": STRING,
    "image": STRING,
    "setup": STRING,
}
_TABLES = {
    "run": {"launch": choice(*LAUNCHERS), "cmd": STRING, "workdir": STRING},
    "config": {
        "dir": STRING,
        "default": STRING,
        "format": choice(*FORMATS),
        "schema": Rule(str, '"file.py:Class"', r"[^:]+\.py:[A-Za-z_][A-Za-z0-9_]*"),
    },
    "resources": {"nodes": integer(1), "gpus_per_node": integer(0)},
}


@dataclass(frozen=True)
class Run:
    """How a script is started. `cmd` holds `{script}` and `{config}`; it is split into words, no shell sees it."""

    launch: str = "direct"
    cmd: str = DEFAULT_CMD
    workdir: Path | None = None


@dataclass(frozen=True)
class ConfigLayout:
    """Where a script's configs lie. `schema` is `file.py:Class`, relative to the script."""

    dir: str = "./config"
    default: str = "default"
    format: str = "omegaconf"
    schema: str | None = None


@dataclass(frozen=True)
class Resources:
    """What a cluster gives the script. A local run takes the visible GPUs of this machine instead, or none."""

    nodes: int = 1
    gpus_per_node: int = 8


@dataclass(frozen=True)
class Runspec:
    """What a script says about itself. `script_path` and `config_dir` are absolute.

    `dependencies` are the names of the distributions that PEP 723's key of this name lists, without versions.
    """

    name: str
    script_path: Path
    config_dir: Path
    schema: str = SCHEMA_VERSION
    docs: str = ""
    image: str | None = None
    setup: str = ""
    run: Run = field(default_factory=Run)
    config: ConfigLayout = field(default_factory=ConfigLayout)
    resources: Resources = field(default_factory=Resources)
    env: dict[str, str] = field(default_factory=dict)
    dependencies: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The part of `name` before the first slash: `garden` of `garden/data/prep/beds`."""
        return self.name.partition("/")[0]

    @property
    def stage(self) -> str:
        """The part of `name` after the first slash: `data/prep/beds`; the whole name when it has no slash."""
        return self.name.partition("/")[2] or self.name

    def is_named(self, script: str) -> bool:
        """Whether `run.script` of a config means this script, be it a file's name or a longer end of its path."""
        parts = Path(script).parts
        return self.script_path.parts[-len(parts) :] == parts

    @property
    def schema_ref(self) -> str | None:
        """`schema.py:PretrainConfig`, the pydantic class of this script's config; None when it has none."""
        return self.config.schema

    @property
    def schema_path(self) -> Path | None:
        """Absolute path of the schema file, or None."""
        return None if self.schema_ref is None else self.script_path.parent / self.schema_ref.partition(":")[0]

    @property
    def job_config_name(self) -> str:
        """File name under which a job's config is written for the script."""
        return "train.json" if self.config.format == "json" else "train.yaml"

    def to_dict(self) -> dict[str, Any]:
        """All fields, paths as text: what `nemo-runspec show --json` prints."""
        fields = asdict(self)
        fields["script_path"], fields["config_dir"] = str(self.script_path), str(self.config_dir)
        fields["dependencies"] = list(self.dependencies)
        fields["run"]["workdir"] = None if self.run.workdir is None else str(self.run.workdir)
        return fields | {"family": self.family, "stage": self.stage}


def find_script(folder: Path, name: str) -> Path:
    """The script that `run.script` of a config for the scripts in `folder` names.

    A file's name is in `folder`. A path with a slash begins at a folder above, the nearest where it leads to a file:
    `garden/beds/dig.py` names the script of the recipe `garden` from any recipe beside it.
    """
    above = folder.parents if "/" in name else ()
    return next((start / name for start in above if (start / name).is_file()), folder / name)


def recipe_name(run: Mapping[str, Any], spec: Runspec) -> str:
    """What a run of `spec`'s script is a run of, as in `garden/beds`.

    It is the script's own name, unless the `run` group of the config names another family or stage.
    """
    family, stage = run.get("family") or spec.family, run.get("stage") or spec.stage
    return spec.name if (family, stage) == (spec.family, spec.stage) else f"{family}/{stage}"


def parse(path: str | Path, configs: Path | None = None) -> Runspec:
    """Parse the block of the script at `path`.

    Args:
        configs: the folder of the configs, where it is not the one that the block names: that of another recipe.

    Raises:
        UserError: no such file, no block, two blocks, bad TOML, an unknown key, a wrong type, an unknown launcher,
            format or schema version; with file and line.
    """
    script = Path(path).absolute()
    try:
        text = script.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"no such script: {path}", _nearest_file(script)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    first_line, block = _extract_block(script, text)
    spec = _build(read_toml(block, shown(script), first_line), script, first_line)
    return spec if configs is None else replace(spec, config_dir=configs.absolute())


def _nearest_file(script: Path) -> str | None:
    if not script.parent.is_dir():
        return None
    near = nearest(script.name, [file.name for file in script.parent.glob("*.py")])
    return None if near is None else f"did you mean {shown(script.parent / near)}?"


def _extract_block(script: Path, text: str) -> tuple[int, str]:
    """The TOML of the one `# /// script` block, and the number of its first line (counted from 1)."""
    starts = list(_START.finditer(text))
    if not starts:
        raise UserError(
            f"{shown(script)}: no runspec: the file has no `# /// script` block",
            "a script describes itself in [tool.runspec]; see docs/runspec/v1/spec.md",
        )
    blocks: list[tuple[int, str]] = []
    for start in starts:
        line = text.count("\n", 0, start.start()) + 1
        block = _BLOCK.match(text, start.end())
        if block is None:
            raise UserError(f"{shown(script)}:{line}: the `# /// script` block is not closed by a line `# ///`")
        blocks.append((line + 1, "\n".join(comment[2:] for comment in block["comments"].splitlines())))
    if len(blocks) > 1:
        raise UserError(f"{shown(script)}:{blocks[1][0] - 1}: two `# /// script` blocks; a script has one")
    return blocks[0]


def _build(toml: TomlText, script: Path, first_line: int) -> Runspec:
    tool = toml.data.get("tool")
    block = tool.get("runspec") if isinstance(tool, dict) else None
    if not isinstance(block, dict):
        raise UserError(
            f"{shown(script)}:{first_line - 1}: no runspec: the `# /// script` block has no [tool.runspec] table",
            "see docs/runspec/v1/spec.md",
        )
    tables = {name: block.get(name, {}) for name in (*_TABLES, "env")}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise _fault(toml, (name,), f"= {shown_value(table)}: must be a table, [tool.runspec.{name}]")
    _check_table(toml, (), {key: value for key, value in block.items() if key not in tables}, (*_TOP, *tables), _TOP)
    for name, rules in _TABLES.items():
        _check_table(toml, (name,), tables[name], (*rules,), rules)
    for name, value in tables["env"].items():
        if not re.fullmatch(VARIABLE, name):
            raise _fault(toml, ("env", name), "is not a name of an environment variable")
        if looks_secret(name):  # its value is not repeated here
            hint = f'take it out of the block and change it; secrets = ["{name}"] in a profile passes it on'
            raise _fault(toml, ("env", name), "looks like a secret, which has no value in a script", hint)
        if not isinstance(value, str):
            raise _fault(toml, ("env", name), f"= {shown_value(value)}: must be a string")
        if has_password(value):
            hint = f'take it out of the block; secrets = ["{name}"] in a profile passes it on'
            raise _fault(toml, ("env", name), "is an address with a password, which has no place in a script", hint)
    if "name" not in block:
        raise UserError(f"{toml.where('tool', 'runspec')}: [tool.runspec] has no 'name', which is required")
    if (version := block.get("schema", SCHEMA_VERSION)) != SCHEMA_VERSION:
        message = f'= "{version}": unknown version; this program reads schema "{SCHEMA_VERSION}"'
        raise _fault(toml, ("schema",), message)
    config = ConfigLayout(**tables["config"])
    if config.schema is not None:
        file = script.parent / config.schema.partition(":")[0]
        if not file.is_file():
            raise _fault(toml, ("config", "schema"), f'= "{config.schema}": no such file: {shown(file)}')
    config_dir = Path(os.path.normpath(script.parent / config.dir))
    if "dir" in tables["config"] and not config_dir.is_dir():
        folder = nearest(config_dir.name, [entry.name for entry in script.parent.iterdir() if entry.is_dir()])
        near_folder = f"did you mean ./{folder}?" if folder else None
        raise _fault(toml, ("config", "dir"), f'= "{config.dir}": no such folder: {shown(config_dir)}', near_folder)
    workdir = tables["run"].get("workdir")
    workdir = None if workdir is None else Path(os.path.normpath(script.parent / workdir))
    run = Run(**{**tables["run"], "workdir": workdir})
    _check_command(toml, run)
    return Runspec(
        **{key: value for key, value in block.items() if key in _TOP},
        script_path=script,
        config_dir=config_dir,
        run=run,
        config=config,
        resources=Resources(**tables["resources"]),
        env=tables["env"],
        dependencies=_dependencies(toml),
    )


def _dependencies(toml: TomlText) -> tuple[str, ...]:
    """The names in PEP 723's list; a requirement with a marker is for some machines only, and is passed over."""
    listed = toml.data.get("dependencies", [])
    texts = [text for text in listed if isinstance(text, str)] if isinstance(listed, list) else []
    names = (_DISTRIBUTION.match(text) for text in texts if ";" not in text)
    return tuple(name[0] for name in names if name)


def _check_table(
    toml: TomlText, path: tuple[str, ...], table: dict[str, Any], known: tuple[str, ...], rules: dict[str, Rule]
) -> None:
    """Refuse a key that is not `known`, and a value that its rule does not allow."""
    for key, value in table.items():
        if key not in known:
            place = f" in [{'.'.join(path)}]" if path else ""
            message = f"{toml.where('tool', 'runspec', *path, key)}: unknown runspec key {key!r}{place}"
            raise UserError(message, did_you_mean(key, known, "known keys"))
        if not rules[key].allows(value):
            text = f'"{value}"' if isinstance(value, str) else shown_value(value)
            rule = rules[key]
            raise _fault(toml, (*path, key), f"= {text}: must be {rule.text}", near_choice(value, rule))


def _check_command(toml: TomlText, run: Run) -> None:
    try:
        placeholders = {name for _, name, _, _ in string.Formatter().parse(run.cmd) if name is not None}
        if placeholders <= {"script", "config"}:
            [word.format(script="", config="") for word in shlex.split(run.cmd)]
    except ValueError as error:
        raise _fault(toml, ("run", "cmd"), f'= "{run.cmd}": {error}') from None
    if unknown := placeholders - {"script", "config"}:
        message = f'= "{run.cmd}": unknown placeholder {{{min(unknown)}}}'
        raise _fault(toml, ("run", "cmd"), message, "known: {script}, {config}")
    if "config" not in placeholders:
        raise _fault(toml, ("run", "cmd"), f'= "{run.cmd}": must hold {{config}}, the path of the job\'s config')
    if run.launch == "torchrun" and not run.cmd.startswith("python "):
        message = f'= "{run.cmd}": must start with "python " under launch = "torchrun"'
        raise _fault(toml, ("run", "cmd"), message)


def _fault(toml: TomlText, path: tuple[str, ...], message: str, hint: str | None = None) -> UserError:
    return UserError(f"{toml.where('tool', 'runspec', *path)}: {'.'.join(path)} {message}", hint)
