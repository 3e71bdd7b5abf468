"""Read the `[tool.runspec]` block of a script (PEP 723) into a frozen `Runspec`, strictly.

The block is a comment, so nothing is imported or run: `parse` is safe on any file. Every fault is a `UserError` that
names the file, the line, the key and what is allowed. The format is specified in docs/runspec/v1/spec.md.
"""

from __future__ import annotations

import os
import re
import string
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo_runspec.errors import UserError, did_you_mean, nearest
from nemo_runspec.secrets import public
from nemo_runspec.toml_text import read_toml

SCHEMA_VERSION = "1"
LAUNCHERS = ("torchrun", "ray", "direct")
FORMATS = ("omegaconf", "yaml", "json")
DEFAULT_CMD = "python {script} --config {config}"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SCHEMA_REF = re.compile(r"(?P<file>[^:]+\.py):(?P<cls>[A-Za-z_][A-Za-z0-9_]*)")


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
    """What a script says about itself. `script_path` and `config_dir` are absolute."""

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

    @property
    def family(self) -> str:
        """The part of `name` before the first slash: `garden` of `garden/data/prep/beds`."""
        return self.name.partition("/")[0]

    @property
    def stage(self) -> str:
        """The part of `name` after the first slash: `data/prep/beds`; the whole name when it has no slash."""
        return self.name.partition("/")[2] or self.name

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
        """All fields, paths as text and secrets hidden: what `runspec show --json` prints."""
        fields = asdict(self)
        fields["env"] = {name: public(name, value) for name, value in self.env.items()}
        fields["script_path"], fields["config_dir"] = str(self.script_path), str(self.config_dir)
        fields["run"]["workdir"] = None if self.run.workdir is None else str(self.run.workdir)
        return fields | {"family": self.family, "stage": self.stage}


def parse(path: str | Path) -> Runspec:
    """Parse the block of the script at `path`.

    Raises:
        UserError: no such file, no block, two blocks, bad TOML, an unknown key, a wrong type, an unknown launcher,
            format or schema version; with file and line.
    """
    script = Path(path).absolute()
    try:
        lines = script.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"no such script: {path}", _nearest_file(script)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    first, toml = _extract_block(script, lines)
    block = _Block(script, first, toml)
    return _build(block, script)


def _nearest_file(script: Path) -> str | None:
    if not script.parent.is_dir():
        return None
    near = nearest(script.name, [file.name for file in script.parent.glob("*.py")])
    return None if near is None else f"did you mean {script.parent / near}?"


def _extract_block(script: Path, lines: list[str]) -> tuple[int, list[str]]:
    """The TOML lines of the one `# /// script` block, and the number of the first of them (counted from 1)."""
    blocks: list[tuple[int, list[str]]] = []
    number = 0
    while number < len(lines):
        if lines[number].rstrip() != "# /// script":
            number += 1
            continue
        start, content = number + 1, []
        number += 1
        while number < len(lines) and (lines[number] == "#" or lines[number].startswith("# ")):
            content.append(lines[number][2:])
            number += 1
        # PEP 723: the last `# ///` of the comment ends the block.
        ends = [index for index, line in enumerate(content) if line.rstrip() == "///"]
        if not ends:
            raise UserError(f"{script}:{start}: the `# /// script` block is not closed by a line `# ///`")
        inner = content[: ends[-1]]
        if "/// script" in (line.rstrip() for line in inner):
            raise UserError(f"{script}:{start}: two `# /// script` blocks; a script has one")
        blocks.append((start + 1, inner))
    if not blocks:
        raise UserError(
            f"{script}: no runspec: the file has no `# /// script` block",
            "a script describes itself in [tool.runspec]; see docs/runspec/v1/spec.md",
        )
    if len(blocks) > 1:
        raise UserError(f"{script}:{blocks[1][0] - 1}: two `# /// script` blocks; a script has one")
    return blocks[0]


class _Block:
    """The parsed TOML of a block, with typed access to its keys; knows the script line that each key stands on."""

    def __init__(self, script: Path, first_line: int, toml: list[str]) -> None:
        self.script, self.first_line = script, first_line
        self.toml = read_toml("\n".join(toml), str(script), first_line)
        tool = self.toml.data.get("tool")
        spec = tool.get("runspec") if isinstance(tool, dict) else None
        if not isinstance(spec, dict):
            raise UserError(
                f"{script}:{first_line - 1}: no runspec: the `# /// script` block has no [tool.runspec] table",
                "see docs/runspec/v1/spec.md",
            )
        self.data: dict[str, Any] = spec

    def where(self, *path: str) -> str:
        """`file:line` of a key (of its table, where the key itself is absent)."""
        return self.toml.where("tool", "runspec", *path)

    def fail(self, path: tuple[str, ...], message: str, hint: str | None = None) -> UserError:
        return UserError(f"{self.where(*path)}: {'.'.join(path)} {message}", hint)

    def check_keys(self, path: tuple[str, ...], table: dict[str, Any], allowed: tuple[str, ...]) -> None:
        for key in table:
            if key not in allowed:
                where = f" in [{'.'.join(path)}]" if path else ""
                message = f"{self.where(*path, key)}: unknown runspec key {key!r}{where}"
                raise UserError(message, did_you_mean(key, allowed, "known keys"))

    def table(self, name: str, allowed: tuple[str, ...] | None) -> dict[str, Any]:
        value = self.data.get(name, {})
        if not isinstance(value, dict):
            raise self.fail((name,), f"= {value!r}: must be a table, [tool.runspec.{name}]")
        if allowed is not None:
            self.check_keys((name,), value, allowed)
        return value

    def text(self, path: tuple[str, ...], default: str | None, choices: tuple[str, ...] | None = None) -> str | None:
        table = self.data.get(path[0], {}) if len(path) > 1 else self.data
        value = table.get(path[-1], default)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.fail(path, f"= {value!r}: must be a string")
        if choices is not None and value not in choices:
            raise self.fail(path, f'= "{value}": must be one of {", ".join(choices)}', _near_hint(value, choices))
        return value

    def integer(self, path: tuple[str, str], default: int, least: int) -> int:
        value = self.data.get(path[0], {}).get(path[1], default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.fail(path, f"= {value!r}: must be an integer >= {least}")
        return value


def _near_hint(value: str, choices: tuple[str, ...]) -> str | None:
    near = nearest(value, choices)
    return f'did you mean "{near}"?' if near else None


_TOP = ("schema", "docs", "name", "image", "setup", "run", "config", "resources", "env")


def _build(block: _Block, script: Path) -> Runspec:
    block.check_keys((), block.data, _TOP)
    if "name" not in block.data:
        raise UserError(f"{block.where()}: [tool.runspec] has no 'name', which is required")
    if block.text(("schema",), SCHEMA_VERSION) != SCHEMA_VERSION:
        version = block.data["schema"]
        raise block.fail(("schema",), f'= "{version}": unknown version; this program reads schema "{SCHEMA_VERSION}"')
    name = block.text(("name",), None) or ""
    if not _NAME.fullmatch(name):
        raise block.fail(("name",), f'= "{name}": must be words of letters, digits, ".", "_", "-", joined by "/"')
    config = _build_config(block, script)
    return Runspec(
        name=name,
        script_path=script,
        config_dir=Path(os.path.normpath(script.parent / config.dir)),
        docs=block.text(("docs",), "") or "",
        image=block.text(("image",), None),
        setup=block.text(("setup",), "") or "",
        run=_build_run(block, script),
        config=config,
        resources=_build_resources(block),
        env=_build_env(block),
    )


def _build_run(block: _Block, script: Path) -> Run:
    block.table("run", ("launch", "cmd", "workdir"))
    launch = block.text(("run", "launch"), "direct", LAUNCHERS) or "direct"
    cmd = block.text(("run", "cmd"), DEFAULT_CMD) or ""
    try:
        placeholders = {name for _, name, _, _ in string.Formatter().parse(cmd) if name is not None}
    except ValueError as error:
        raise block.fail(("run", "cmd"), f'= "{cmd}": {error}') from None
    if unknown := placeholders - {"script", "config"}:
        message = f'= "{cmd}": unknown placeholder {{{min(unknown)}}}'
        raise block.fail(("run", "cmd"), message, "known: {script}, {config}")
    if "config" not in placeholders:
        raise block.fail(("run", "cmd"), f'= "{cmd}": must hold {{config}}, the path of the job\'s config')
    if launch == "torchrun" and not cmd.startswith("python "):
        raise block.fail(("run", "cmd"), f'= "{cmd}": must start with "python " under launch = "torchrun"')
    workdir = block.text(("run", "workdir"), None)
    return Run(launch, cmd, None if workdir is None else Path(os.path.normpath(script.parent / workdir)))


def _build_config(block: _Block, script: Path) -> ConfigLayout:
    block.table("config", ("dir", "default", "format", "schema"))
    schema = block.text(("config", "schema"), None)
    if schema is not None:
        match = _SCHEMA_REF.fullmatch(schema)
        if match is None:
            raise block.fail(("config", "schema"), f'= "{schema}": must be "file.py:Class"')
        if not (script.parent / match["file"]).is_file():
            raise block.fail(("config", "schema"), f'= "{schema}": no such file: {script.parent / match["file"]}')
    return ConfigLayout(
        dir=block.text(("config", "dir"), "./config") or "./config",
        default=block.text(("config", "default"), "default") or "default",
        format=block.text(("config", "format"), "omegaconf", FORMATS) or "omegaconf",
        schema=schema,
    )


def _build_resources(block: _Block) -> Resources:
    block.table("resources", ("nodes", "gpus_per_node"))
    return Resources(
        nodes=block.integer(("resources", "nodes"), 1, least=1),
        gpus_per_node=block.integer(("resources", "gpus_per_node"), 8, least=0),
    )


def _build_env(block: _Block) -> dict[str, str]:
    env = block.table("env", None)
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            raise block.fail(("env", name), "is not a name of an environment variable")
        if not isinstance(value, str):
            raise block.fail(("env", name), f"= {value!r}: must be a string")
    return dict(env)
