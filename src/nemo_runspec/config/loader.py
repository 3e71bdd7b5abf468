"""Config files + `defaults:` + overrides -> one tree of plain values that knows where each value came from.

Interpolations are still text here; `resolve.py` resolves and validates.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nemo_runspec.config.interpolate import interpolate
from nemo_runspec.config.yaml_text import (
    KeyPath,
    dotted,
    escape_interpolation,
    read_scalar,
    read_yaml,
    split_key,
)
from nemo_runspec.errors import UserError, did_you_mean, nearest
from nemo_runspec.runspec import Runspec
from nemo_runspec.user_files import expanded
from nemo_runspec.words import shown

COMMAND_LINE = "command line"
_SUFFIXES = {"omegaconf": (".yaml", ".yml"), "yaml": (".yaml", ".yml"), "json": (".json",)}
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+|\[[0-9]+\])*")


@dataclass(frozen=True)
class LoadedConfig:
    """A merged config before interpolation.

    `data` are plain values; `origins` maps a key path to `file:line` or "command line"; `name` is the file's stem;
    `bases` are the files of its `defaults:`, however deep; `config_dir` is the folder in which names of configs are
    looked up.
    """

    name: str
    path: Path
    data: dict[str, Any]
    origins: dict[KeyPath, str]
    config_dir: Path
    overrides: tuple[str, ...] = ()
    bases: tuple[Path, ...] = ()

    @functools.cached_property
    def run(self) -> SimpleNamespace:
        """The `run` group as attributes, interpolated (`${run.config}`, `${oc.env:…}`; artifacts are not looked up)."""
        return SimpleNamespace(**interpolate(self.data, self.origin, "run"))

    def origin(self, path: KeyPath) -> str:
        """`file:line` or "command line": where the value at `path`, or else the group that it is in, was written."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, shown(self.path))

    def origin_of_fault(self, path: KeyPath, message: str) -> str:
        """Where a fault of the group at `path` was written: the command line if `message` names a key set there."""
        keys = (key for key, at in self.origins.items() if at == COMMAND_LINE and key[: len(path)] == path)
        is_named = any(re.search(rf"\b{re.escape(str(key[-1]))}\b", message) for key in keys)
        return COMMAND_LINE if is_named else self.origin(path)

    def on_command_line(self, path: KeyPath) -> bool:
        """Whether the command line sets the value at `path`, or a part of it (`run.env.mounts[0]`)."""
        return any(at == COMMAND_LINE and key[: len(path)] == path for key, at in self.origins.items())


def list_configs(config_dir: Path, fmt: str = "omegaconf") -> list[str]:
    """Names of the configs in a folder, sorted; files that start with `_` are parts of others and not listed."""
    if not config_dir.is_dir():
        return []
    return sorted(
        file.stem for file in config_dir.iterdir() if file.suffix in _SUFFIXES[fmt] and not file.name.startswith("_")
    )


def chosen_config(spec: Runspec, name: str | None) -> str:
    """The config that the command line chose, or the script's default one.

    Raises:
        UserError: none was chosen, and the default one does not exist; the hint lists the configs that there are.
    """
    names, default = list_configs(spec.config_dir, spec.config.format), spec.config.default
    if name is None and default not in names:
        hint = f"choose one with -c NAME: {', '.join(names)}" if names else None
        raise UserError(f"no config was chosen, and there is no config {default!r} in {shown(spec.config_dir)}", hint)
    return name or default


def find_config(config_dir: Path, name_or_path: str, fmt: str = "omegaconf") -> Path:
    """The file of a config: a path, or a name in `config_dir` with or without its suffix.

    Raises:
        UserError: there is none; the hint is the nearest name, or all of them.
    """
    suffixes = _SUFFIXES[fmt]
    if name_or_path.endswith((".json", ".yaml", ".yml")) and not name_or_path.endswith(suffixes):
        raise UserError(
            f"{name_or_path}: a config of this script ends in {' or '.join(suffixes)}",
            f'its block says format = "{fmt}"',
        )
    if name_or_path.endswith(suffixes):
        for path in (expanded(name_or_path), config_dir / name_or_path):
            if path.is_file():
                return path.absolute()
        if "/" in name_or_path:
            near = nearest(Path(name_or_path).name, _files_in(expanded(name_or_path).parent, suffixes))
            hint = f"did you mean {Path(name_or_path).with_name(near)}?" if near else None
            raise UserError(f"no such config file: {name_or_path}", hint)
        names = list_configs(config_dir, fmt)
        if name_or_path.rsplit(".", 1)[0] not in names:
            hint = did_you_mean(name_or_path.rsplit(".", 1)[0], names, "configs")
            raise UserError(f"no file {name_or_path} here, nor in {shown(config_dir)}", hint)
        name_or_path = name_or_path.rsplit(".", 1)[0]
    for suffix in suffixes:
        if name_or_path and (path := config_dir / f"{name_or_path}{suffix}").is_file():
            return path.absolute()
    names = list_configs(config_dir, fmt)
    hint = did_you_mean(name_or_path, names, "configs") or "the folder has no configs"
    if own := [f"{name_or_path}{suffix}" for suffix in suffixes if expanded(f"{name_or_path}{suffix}").is_file()]:
        hint = f"for the file write {own[0]}"
    raise UserError(f"no config {name_or_path!r} in {shown(config_dir)}", hint)


def _files_in(folder: Path, suffixes: tuple[str, ...]) -> list[str]:
    return [file.name for file in folder.iterdir() if file.suffix in suffixes] if folder.is_dir() else []


def load_config(
    config_dir: Path,
    name_or_path: str,
    overrides: Sequence[str] = (),
    fmt: str = "omegaconf",
    script: str | None = None,
) -> LoadedConfig:
    """Load a config, the files in its `defaults:` below it, and the overrides over it.

    Args:
        config_dir: the script's config folder.
        name_or_path: `tiny`, or a path to a file anywhere.
        overrides: `key.sub=value` words; values are YAML.
        fmt: `omegaconf` (YAML with `defaults:` and interpolation), `yaml` or `json` (values as they stand).
        script: `run.script` of a config that names none.

    Raises:
        UserError: no such config, malformed YAML or JSON (file and line), a circle of defaults, a bad override.
    """
    path = find_config(config_dir, name_or_path, fmt)
    bases: list[Path] = []
    data, origins = _load_file(path, config_dir, fmt, (), bases)
    for override in overrides:
        _apply_override(data, origins, override)
    if fmt != "omegaconf":
        data = escape_interpolation(data)
    run = data.setdefault("run", {})
    if not isinstance(run, dict):
        raise UserError(f"{origins.get(('run',), shown(path))}: run = {run!r}: must be a group of keys")
    run.setdefault("config", path.stem)
    if script is not None and not run.get("script"):
        run["script"] = script
    return LoadedConfig(path.stem, path, data, origins, config_dir, tuple(overrides), tuple(bases))


def _load_file(
    path: Path, config_dir: Path, fmt: str, above: tuple[Path, ...], bases: list[Path]
) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """One file with its defaults merged in; `above` are the files that led here. Every default is noted in `bases`."""
    where = shown(path)
    if path in above:
        raise UserError(f"{where}: defaults include each other: {' -> '.join(shown(p) for p in (*above, path))}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {where}: {error}") from None
    values, lines = _parse(text, where, fmt)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise UserError(f"{where}:1: a config is a mapping of keys, not a {type(values).__name__}")
    if fmt != "omegaconf" or "defaults" not in values:
        return values, lines
    defaults = values.pop("defaults")
    if not isinstance(defaults, list) or not all(isinstance(item, str) for item in defaults):
        at = lines.get(("defaults",), where)
        raise UserError(f"{at}: defaults must be a list of config names, as in [base, _self_]")
    lines = {key: at for key, at in lines.items() if key[0] != "defaults"}
    data: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    # `_self_` is the file's own place among its defaults; without it the file comes last and wins.
    for name in defaults if "_self_" in defaults else [*defaults, "_self_"]:
        if name == "_self_":
            merge(data, origins, values, lines)
        else:
            base = _find_default(path, config_dir, name, fmt)
            bases.append(base)
            merge(data, origins, *_load_file(base, config_dir, fmt, (*above, path), bases))
    return data, origins


def _find_default(path: Path, config_dir: Path, name: str, fmt: str) -> Path:
    """A default is looked for beside the file that names it, then in the config folder."""
    for folder in (path.parent, config_dir):
        for candidate in (folder / name, *(folder / f"{name}{suffix}" for suffix in _SUFFIXES[fmt])):
            if candidate.is_file():
                return candidate.absolute()
    hint = did_you_mean(name, [*list_configs(path.parent, fmt)], "configs")
    raise UserError(f"{shown(path)}: defaults: no config {name!r} in {shown(path.parent)}", hint)


def _parse(text: str, where: str, fmt: str) -> tuple[Any, dict[KeyPath, str]]:
    if fmt != "json":
        return read_yaml(text, where)
    try:
        return json.loads(text), {}
    except json.JSONDecodeError as error:
        raise UserError(f"{where}:{error.lineno}: malformed JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, nesting without end
        raise UserError(f"{where}: malformed JSON: {error}") from None


def merge(data: dict[str, Any], origins: dict[KeyPath, str], over: Any, over_origins: dict[KeyPath, str]) -> None:
    """Merge `over` onto `data` in place: mappings merge key by key, everything else is replaced."""

    def put(into: dict[str, Any], new: dict[str, Any], path: KeyPath) -> None:
        for key, value in new.items():
            if isinstance(value, dict) and isinstance(into.get(key), dict):
                put(into[key], value, (*path, key))
            else:
                into[key] = copy.deepcopy(value)
                forget(origins, (*path, key))

    put(data, over, ())
    origins.update(over_origins)


def forget(origins: dict[KeyPath, str], path: KeyPath) -> None:
    """Drop the origins of `path` and of everything below it."""
    for key in [key for key in origins if key[: len(path)] == path]:
        del origins[key]


def _apply_override(data: dict[str, Any], origins: dict[KeyPath, str], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not _KEY.fullmatch(key):
        message = f"{COMMAND_LINE}: {override!r} is not an override"
        raise UserError(message, "write key=value, as in optimizer.lr=1e-3")
    value = read_scalar(text, f"{COMMAND_LINE}: {key}")
    *groups, leaf = split_key(key)
    node: Any = data
    path: KeyPath = ()
    for part in groups:
        index = _index(node, part, path, override)
        path = (*path, index)
        below = node[index] if isinstance(node, list) else node.get(index)
        if not isinstance(below, (dict, list)):
            below = node[index] = {}
            forget(origins, path)
            origins[path] = COMMAND_LINE
        node = below
    index = _index(node, leaf, path, override)
    path = (*path, index)
    old = node[index] if isinstance(node, list) else node.get(index)
    if isinstance(old, dict) and isinstance(value, dict):
        merge(old, {}, value, {})
    else:
        node[index] = value
        forget(origins, path)
    _note_command_line(origins, path, value)


def _note_command_line(origins: dict[KeyPath, str], path: KeyPath, value: Any) -> None:
    """Note that `value`, and everything in a mapping that it is, stands on the command line."""
    origins[path] = COMMAND_LINE
    for inner, item in value.items() if isinstance(value, dict) else ():
        _note_command_line(origins, (*path, inner), item)


def _index(node: Any, part: str | int, path: KeyPath, override: str) -> Any:
    """`part` as a key of `node`: a number for a list, a string for a mapping."""
    if not isinstance(node, list):
        return str(part)
    if not isinstance(part, int) or part >= len(node):
        raise UserError(f"{COMMAND_LINE}: {override}: {dotted(path)} is a list of {len(node)} items, numbered from 0")
    return part
