"""env.toml as a file: where it is, and whether every table in it says what it may say."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_runspec.env.keys import EXECUTOR_KEYS, EXECUTORS, GENERAL, PROFILE, RESERVED, TOOL
from nemo_runspec.errors import UserError, did_you_mean, nearest
from nemo_runspec.rules import VARIABLE, Rule, near_choice, shown_value
from nemo_runspec.secrets import has_password, looks_secret, public, without_login
from nemo_runspec.toml_text import TomlPath, TomlText, read_toml
from nemo_runspec.user_files import expanded
from nemo_runspec.variables import CODE_DIGEST, ENV_FILE, TOOL_TABLES

# NAME=VALUE in a command, where VALUE is no other variable, what a command prints, or empty.
_PASTED = re.compile(r"""(?:^|[\s;&(])(\w+)=(?!"?(?:\$[\w({]|`)|""|'')\S""")

# Another variable, or what a command prints.
_REFERENCE = re.compile(r"\$\{[^}]*\}|\$\([^)]*\)|\$\w+|`[^`]*`")


def find_env_file() -> Path | None:
    """The env.toml in force: RUNSPEC_ENV_FILE, else the first one from the current directory upwards, else None.

    A job on a cluster has none, though it may start in the folder that it was submitted from: what it needs of env.toml
    travels as variables, and what is written there later is not its own.
    """
    if CODE_DIGEST in os.environ:
        return None
    file = os.environ.get(ENV_FILE)
    if file:
        path = expanded(file, f"{ENV_FILE}=")
        if not path.is_file():
            raise UserError(f"{ENV_FILE}={file}: no such file")
        return path
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "env.toml").is_file():
            return folder / "env.toml"
    return None


def load_tables() -> tuple[Path | None, TomlText]:
    """The env.toml in force, checked whole: every table, also those of profiles that nobody asked for.

    Returns:
        Its path and what it says; None and an empty document where there is none.

    Raises:
        UserError: bad TOML, an unknown key, a value of the wrong type or out of range, a key of another executor, an
            unknown parent, a circle of `extends`; with file and line. In the table of an executor that this toolkit
            does not know, only the keys that every profile may have are checked.
    """
    path = find_env_file()
    if path is None:
        return None, TomlText("", {})
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    toml = read_toml(text, str(path))
    for name, table in toml.data.items():
        if not isinstance(table, dict):
            at = f"{toml.where(name)}: {name} = {public(name, shown_value(table))}"
            raise UserError(f"{at} stands outside a table", "a profile is a table, as in [local]")
        if name == TOOL:
            _check_tools(toml, table)
            continue
        unread = name not in RESERVED and executor_named(toml, name) not in (None, *EXECUTORS)
        for key, value in table.items():
            if not unread or key in GENERAL:
                _check_key(toml, (name,), key, value, RESERVED.get(name, PROFILE))
    profiles = profiles_of(toml)
    for name in profiles:
        check_executor(toml, name, None)
    return path, toml


def profiles_of(toml: TomlText) -> dict[str, dict[str, Any]]:
    """The tables of env.toml that are profiles."""
    return {name: table for name, table in toml.data.items() if name not in (TOOL, *RESERVED)}


def _check_tools(toml: TomlText, tools: dict[str, Any]) -> None:
    """Refuse what is no table of a program; its keys are unread here, but they travel, so none may be a secret."""
    for name, table in tools.items():
        if not isinstance(table, dict):
            raise UserError(f"{toml.where(TOOL, name)}: [{TOOL}] {name}: must be a table, as in [{TOOL}.{name}]")
        for path in _paths_of_keys(table, ()):
            variable = _variable_of(name, *path)
            if looks_secret(variable):
                at = f"{toml.where(TOOL, name, *path)}: [{TOOL}.{name}] {'.'.join(path)}"
                raise UserError(
                    f"{at}: looks like a secret, which has no value here",
                    f'secrets = ["{variable}"] in a profile passes it on',
                )


def _paths_of_keys(value: object, path: TomlPath) -> Iterator[TomlPath]:
    """The paths of all keys in a table, those of the tables and lists in it included."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key)
            yield from _paths_of_keys(item, (*path, key))
    elif isinstance(value, list):
        for item in value:
            yield from _paths_of_keys(item, path)


def _check_key(toml: TomlText, path: tuple[str, ...], key: str, value: object, rules: Mapping[str, Rule]) -> None:
    name = ".".join(path)
    where = f"{toml.where(*path, key)}: [{name}]"
    if key not in rules:
        tables = [table for table, keys in RESERVED.items() if key in keys and table != name]
        hint = f"{key} is a key of [{tables[0]}]" if tables else did_you_mean(key, rules, "known keys")
        if rules is PROFILE and nearest(key, rules) is None and PROFILE.keys().isdisjoint(toml.data[name]):
            hint = f"{hint}; a table for another program is called [{TOOL}.{name}]"
        raise UserError(f"{where} unknown key {key!r}", hint)
    if key == "env" and isinstance(value, dict):
        for variable, text in value.items():
            at = f"{toml.where(*path, key, variable)}: [{name}] env.{variable}"
            if not isinstance(text, str):
                hint = f'in quotes, as in env = {{ {variable} = "…" }}'
                raise UserError(f"{at} = {public(variable, shown_value(text))}: must be a string", hint)
            if not re.fullmatch(VARIABLE, variable):
                raise UserError(f"{at}: is not a name of an environment variable")
    if key == "secrets" and isinstance(value, list):
        for secret in value:
            # A value pasted where a name belongs must not reach a log: it is not repeated here either.
            if isinstance(secret, str) and not re.fullmatch(VARIABLE, secret):
                raise UserError(f"{where} secrets: an entry is not the name of an environment variable")
    if key == "startup_commands" and isinstance(value, list):
        commands = "\n".join(map(str, value))
        for variable in _PASTED.findall(commands):
            if looks_secret(variable) and not variable.endswith(("_FILE", "_PATH")):  # its value is not repeated here
                at = f"{where} startup_commands: {variable} looks like a secret, which has no value here"
                raise UserError(at, f'secrets = ["{variable}"] passes it on')
        if has_password(_REFERENCE.sub("", commands)):
            at = f"{where} startup_commands: an address with a password, which has no place here"
            raise UserError(at, 'secrets = ["NAME"] passes a variable on: write $NAME in the place of the password')
    if not rules[key].allows(value):
        raise UserError(f"{where} {_fault(key, value, rules[key])}", near_choice(value, rules[key]))


def _fault(key: str, value: object, rule: Rule) -> str:
    # These three may hold a secret, pasted into the wrong place.
    shown = "" if key in ("env", "secrets", "startup_commands") else f" = {without_login(shown_value(value))}"
    return f"{key}{shown}: must be {rule.text}"


def chain_of(toml: TomlText, name: str) -> list[str]:
    """The profile `name` and those it extends, the most basic one first."""
    profiles, chain = profiles_of(toml), [name]
    while (parent := profiles[chain[0]].get("extends")) is not None:
        where = f"{toml.where(chain[0], 'extends')}: [{chain[0]}] extends = {parent!r}"
        if parent == "local" and "local" not in profiles:
            break  # which exists without being written down, and says nothing
        if parent in chain:
            circle = " -> ".join([name, *reversed(chain[:-1]), parent])
            raise UserError(f"{where}: profiles extend each other: {circle}")
        if parent not in profiles:
            reserved = f": [{parent}] is a reserved table, not a profile" if parent in (TOOL, *RESERVED) else ""
            others = [other for other in ("local", *profiles) if other not in chain]
            raise UserError(f"{where}: unknown profile {parent!r}{reserved}", did_you_mean(parent, others, "profiles"))
        chain.insert(0, parent)
    return chain


def executor_named(toml: TomlText, name: str) -> str | None:
    """The executor that profile `name`, or the nearest one that it extends, names; None where none does."""
    seen: set[str] = set()
    while isinstance(table := toml.data.get(name), dict) and name not in seen:
        if isinstance(executor := table.get("executor"), str):
            return executor
        seen.add(name)
        name = str(table.get("extends"))
    return None


def check_executor(toml: TomlText, name: str, default: str | None) -> None:
    """Refuse keys in profile `name`, or in one that it extends, that belong to another executor than its own.

    `default` is the executor of a profile that names none; None: such a profile is a part of others, and may have the
    keys of any.
    """
    profiles, chain = profiles_of(toml), chain_of(toml, name)
    named = executor_named(toml, name)
    executor = named or default
    if executor is None or executor not in EXECUTORS:
        return
    for part in reversed(chain):
        for key in profiles[part]:
            owner = owner_of(key)
            if key in GENERAL or owner == executor:
                continue
            at = f"{toml.where(part, key)}: [{part}] {key}: a key of executor {owner}"
            whose = f"[{name}] has executor {executor}" if named else f"[{name}] names no executor, so it is local"
            what = f"keys of {executor}"
            hint = did_you_mean(key, EXECUTOR_KEYS[executor], what) or f"{what}: none"
            raise UserError(f"{at}, and {whose}", hint if named else f'write executor = "{owner}"')


def owner_of(key: str) -> str:
    return next((executor for executor, keys in EXECUTOR_KEYS.items() if key in keys), "")


def tool_table(name: str, rules: Mapping[str, Rule]) -> dict[str, Any] | None:
    """The table [tool.NAME], which belongs to another program, checked against `rules`; None where there is none.

    In a job on a cluster, which has no env.toml, it is made of the variables that `tool_variables` has sent, all text.

    Raises:
        UserError: an unknown key or a wrong value, with file and line.
    """
    _, toml = load_tables()
    table: dict[str, Any] | None = toml.data.get(TOOL, {}).get(name)
    for key, value in (table or {}).items():
        _check_key(toml, (TOOL, name), key, value, rules)
    if table is None and name in os.environ.get(TOOL_TABLES, "").split(","):
        return {key: os.environ[variable] for key in rules if (variable := _variable_of(name, key)) in os.environ}
    return table


def tool_variables() -> dict[str, str]:
    """What a job elsewhere, which has no env.toml, gets of [tool]: `project` of [tool.tracker] as TRACKER_PROJECT.

    Raises:
        UserError: a value holds an address with a password, which would be written into what is submitted.
    """
    toml = load_tables()[1]
    tables = toml.data.get(TOOL, {})
    values = {}
    for name, table in tables.items():
        for key, value in table.items():
            values[variable := _variable_of(name, key)] = str(value)
            if has_password(str(value)):
                at = f"{toml.where(TOOL, name, key)}: [{TOOL}.{name}] {key}"
                raise UserError(
                    f"{at}: an address with a password, which has no place in what is submitted",
                    f'take it out and set {variable}; secrets = ["{variable}"] in the profile passes it on',
                )
    return {**values, TOOL_TABLES: ",".join(tables)} if tables else values


def _variable_of(*path: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", "_".join(path).upper())
