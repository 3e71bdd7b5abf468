"""`env.toml`: where jobs run and where things are kept, per user or per project, outside the recipes.

A table is a profile (`--run NAME`), except the reserved ones. Secrets stand here by name, never by value::

    [artifacts]
    root = "~/artifacts"              # RUNSPEC_ARTIFACTS_ROOT goes before it

    [cpu]
    executor = "local"
    env = { OMP_NUM_THREADS = "2" }
    secrets = ["HF_TOKEN"]

    [debug]
    extends = "cpu"

The file is looked for from the current directory upwards; NEMOTRON_ENV_FILE names another one.
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_runspec.errors import UserError, did_you_mean
from nemo_runspec.secrets import public

ENV_FILE = "NEMOTRON_ENV_FILE"
ARTIFACTS_ROOT = "RUNSPEC_ARTIFACTS_ROOT"
OUTPUT_ROOT = "RUNSPEC_OUTPUT_ROOT"
# Set by `--force`: a run starts afresh where an unfinished one of the same fingerprint lies.
FRESH = "RUNSPEC_FRESH"

# Executors that a test really runs. A cluster executor is added here, and to the command files, by the change that
# brings its engine.
EXECUTORS = ("local",)

# The keys of each reserved table and of a profile, with their types.
RESERVED: dict[str, dict[str, type]] = {
    "wandb": {"project": str, "entity": str, "mode": str},
    "artifacts": {"root": str},
    "cache": {"dir": str},
    "cli": {"color": bool},
}
PROFILE: dict[str, type] = {"executor": str, "extends": str, "env": dict, "secrets": list}
_DESCRIBED: dict[type, str] = {
    str: "a string",
    bool: "true or false",
    dict: "a table of strings",
    list: "a list of strings",
}


@dataclass(frozen=True)
class Env:
    """One profile with everything it extends, beside the reserved tables that a job needs.

    `variables` are set for the job; `secrets` are names of variables that the job needs and that must be set.
    """

    profile: str | None = None
    executor: str = "local"
    variables: dict[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    cache_dir: Path | None = None
    color: bool = True
    file: Path | None = None


def find_env_file() -> Path | None:
    """The env.toml in force: NEMOTRON_ENV_FILE, else the first one from the current directory upwards, else None."""
    named = os.environ.get(ENV_FILE)
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise UserError(f"{ENV_FILE}={named}: no such file")
        return path
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "env.toml").is_file():
            return folder / "env.toml"
    return None


def load_tables() -> tuple[Path | None, dict[str, dict[str, Any]]]:
    """The env.toml in force and its tables, checked: known keys, right types. (None, {}) when there is none."""
    path = find_env_file()
    if path is None:
        return None, {}
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: bad TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            at = f"{path}: {name} = {public(name, repr(table))}"
            raise UserError(f"{at} stands outside a table", "a profile is a table, as in [local]")
        _check_table(path, name, table, RESERVED.get(name, PROFILE))
    return path, tables


def _check_table(path: Path, name: str, table: dict[str, Any], allowed: dict[str, type]) -> None:
    for key, value in table.items():
        where = f"{path}: [{name}]"
        if key not in allowed:
            raise UserError(f"{where} unknown key {key!r}", did_you_mean(key, allowed, "known keys"))
        wanted = allowed[key]
        items: list[Any] = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
        if isinstance(value, dict) and wanted is dict:
            for variable, text in value.items():
                if not isinstance(text, str):
                    at = f"{where} {key}.{variable} = {public(variable, repr(text))}"
                    raise UserError(f"{at}: must be a string", f'in quotes, as in {key} = {{ {variable} = "…" }}')
        if not isinstance(value, wanted) or not all(isinstance(item, str) for item in items):
            shown = "" if key in ("env", "secrets") else f" = {value!r}"
            raise UserError(f"{where} {key}{shown}: must be {_DESCRIBED[wanted]}")
        for secret in items if key == "secrets" else []:
            # A value pasted where a name belongs must not reach a log: it is not repeated here either.
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", secret):
                raise UserError(f"{where} secrets: an entry is not the name of an environment variable")


def parse_env(profile: str | None = None) -> Env:
    """The profile called `profile`, or the plain local one when it is None.

    Raises:
        UserError: no such profile, a circle of `extends`, an executor that this version does not have, a secret that
            is not set in the environment, or a fault in env.toml itself.
    """
    path, tables = load_tables()
    profiles = {name: table for name, table in tables.items() if name not in RESERVED}
    merged: dict[str, Any] = {}
    # `local` exists without being written down.
    if profile is not None and not (profile == "local" and profile not in profiles):
        merged = _extended(path, profiles, profile, ())
    executor = merged.get("executor", "local")
    if executor not in EXECUTORS:
        raise UserError(
            f"{path}: [{profile}] executor = {executor!r}: this version has no such executor",
            f"executors: {', '.join(EXECUTORS)}",
        )
    missing = [name for name in merged.get("secrets", []) if not os.environ.get(name)]
    if missing:
        raise UserError(f"profile {profile}: the environment does not set {', '.join(missing)}", f"named in {path}")
    cache = tables.get("cache", {}).get("dir")
    return Env(
        profile=profile,
        executor=executor,
        variables=merged.get("env", {}),
        secrets=tuple(merged.get("secrets", [])),
        cache_dir=None if cache is None else _path(path, cache),
        color=tables.get("cli", {}).get("color", True),
        file=path,
    )


def _extended(path: Path | None, profiles: dict[str, Any], name: str, seen: tuple[str, ...]) -> dict[str, Any]:
    """Profile `name` over the one it extends: `env` merges, `secrets` add up, the rest is replaced."""
    if name not in profiles:
        where = "there is no env.toml" if path is None else f"{path} has no such profile"
        if seen:
            where = f"{path}: [{seen[-1]}] extends it"
        raise UserError(f"unknown profile {name!r}: {where}", did_you_mean(name, ["local", *profiles], "profiles"))
    if name in seen:
        raise UserError(f"{path}: profiles extend each other: {' -> '.join((*seen, name))}")
    own = dict(profiles[name])
    parent = own.pop("extends", None)
    if parent is None or (parent == "local" and "local" not in profiles):
        return own
    base = _extended(path, profiles, parent, (*seen, name))
    return {
        **base,
        **own,
        "env": {**base.get("env", {}), **own.get("env", {})},
        "secrets": list(dict.fromkeys([*base.get("secrets", []), *own.get("secrets", [])])),
    }


def _path(file: Path | None, text: str) -> Path:
    """A path of env.toml: `~` and paths relative to the file are allowed."""
    base = Path.cwd() if file is None else file.absolute().parent
    return base / Path(text).expanduser()


def wandb_settings() -> dict[str, str] | None:
    """The table [wandb] of env.toml (`project`, `entity`, `mode`); None where there is none."""
    return load_tables()[1].get("wandb")


def artifacts_root() -> Path:
    """Where the artifact registry lies: RUNSPEC_ARTIFACTS_ROOT, else [artifacts] root, else ./output/artifacts."""
    named = os.environ.get(ARTIFACTS_ROOT)
    if named:
        return Path(named).expanduser().absolute()
    path, tables = load_tables()
    root = tables.get("artifacts", {}).get("root")
    return output_root() / "artifacts" if root is None else _path(path, root)


def output_root() -> Path:
    """Where runs live: RUNSPEC_OUTPUT_ROOT, else ./output."""
    return Path(os.environ.get(OUTPUT_ROOT) or "output").expanduser().absolute()
