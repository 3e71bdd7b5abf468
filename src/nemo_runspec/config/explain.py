"""What an error about a config's key or value says: what is allowed there, and the nearest key that there is.

`allowed` puts a schema's types and limits into words: `an integer from 1 to 10`, `one of 'wsd', 'cosine'`.
"""

from __future__ import annotations

import enum
import pathlib
import types
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_runspec.config.loader import LoadedConfig
from nemo_runspec.config.schema import LISTS, is_group, item_of, leaf_keys, optional_group
from nemo_runspec.config.yaml_text import KeyPath, dotted, value_at
from nemo_runspec.errors import UserError, nearest

if TYPE_CHECKING:
    from pydantic import BaseModel


def unknown_key(path: KeyPath, group: type[BaseModel], loaded: LoadedConfig, schema: type[BaseModel]) -> UserError:
    """The error for a key that its `group` does not have."""
    value = value_at(loaded.data, path)
    text = f" = {value!r}" if not isinstance(value, (dict, list)) else ""
    return UserError(f"{loaded.origin(path)}: unknown key {dotted(path)}{text}", _nearest_key(path, group, schema))


def first_fault(faults: list[Any], data: dict[str, Any], loaded: LoadedConfig, schema: type[BaseModel]) -> UserError:
    """The error for what pydantic refused: the first of `faults`, and how many more there are."""
    fault = faults[0]
    path = data_path(data, fault["loc"])
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    if fault["type"] == "missing":
        name = fault["loc"][-1]
        key = dotted((*path, name))
        message = f"{loaded.origin(path)}: {key} is missing; it must be {allowed(schema, (*path, name)).text}{more}"
        return UserError(message, f"give it a value: {key}=…")
    value = value_at(data, path)
    at = loaded.origin_of_fault(path, _plain(fault)) if isinstance(value, dict) else loaded.origin(path)
    if not path:
        return UserError(f"{at}: {_plain(fault)}{more}")
    rule = allowed(schema, path)
    # A check written in the schema has its own words.
    reason = _plain(fault) if fault["type"] in ("value_error", "assertion_error") else f"must be {rule.text}"
    if fault["type"] == "extra_forbidden":
        reason = "unknown key"
    text = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
    text = "" if isinstance(value, dict) else f" = {text}"
    return UserError(f"{at}: {dotted(path)}{text}: {reason}{more}", rule.hint)


def data_path(data: Any, loc: tuple[str | int, ...]) -> KeyPath:
    """The part of a fault's location that leads through the data; labels of union members are skipped."""
    path: KeyPath = ()
    for part in loc:
        here = value_at(data, path)
        if (isinstance(here, dict) and part in here) or (isinstance(here, list) and isinstance(part, int)):
            path = (*path, part)
    return path


@dataclass(frozen=True)
class Allowed:
    """`text` completes "must be …"; `hint` is the field's own description, or None."""

    text: str
    hint: str | None = None


def allowed(schema: type[BaseModel], path: tuple[str | int, ...]) -> Allowed:
    """The rule for the value at `path` (names of keys, indices of lists)."""
    annotation: Any = schema
    metadata: list[Any] = []
    hint: str | None = None
    for part in path:
        group = optional_group(annotation)
        if group is None:
            annotation, metadata = item_of(annotation), []
            continue
        field = group.model_fields.get(str(part))
        if field is None:
            return Allowed("another value", None)
        annotation, metadata, hint = field.annotation, list(field.metadata), field.description
    words = _with_range(_words(annotation), metadata)
    return Allowed(words, None if not hint else f"{'.'.join(map(str, path))}: {' '.join(hint.split())}")


def _nearest_key(path: KeyPath, group: type[BaseModel], schema: type[BaseModel]) -> str | None:
    """The sibling that looks like the last part of `path`; else a key of that name elsewhere; else the siblings.

    A group may say in a class variable `other_names` how other commands call its keys: {their name: its own}.
    """
    word = str(path[-1])
    prefix = f"{dotted(path[:-1])}." if len(path) > 1 else ""
    own_name = getattr(group, "other_names", {}).get(word)
    if own_name is not None:
        return f"here it is called {prefix}{own_name}"
    siblings = list(group.model_fields)
    near = nearest(word, siblings)
    if near is not None:
        return f"did you mean {prefix}{near}?"
    elsewhere = [key for key in leaf_keys(schema) if key.rpartition(".")[2] == word]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere[:3])}?"
    all_keys = {key.rpartition(".")[2]: key for key in leaf_keys(schema)}
    near = nearest(word, all_keys)
    if near is not None:
        return f"did you mean {all_keys[near]}?"
    return f"known keys: {', '.join(prefix + name for name in siblings)}"


def _plain(fault: Any) -> str:
    """The text of a schema's own check, on one line and without pydantic's prefix."""
    text = str(fault["msg"])
    for prefix in ("Value error, ", "Assertion failed, "):
        text = text.removeprefix(prefix)
    return " ".join(text.split())


def _words(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _with_range(_words(args[0]), list(args[1:]))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(member) for member in args))
    if origin is typing.Literal:
        values = [_literal(value) for value in args]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if origin in LISTS:
        inner = [arg for arg in args if arg is not Ellipsis]
        if origin is tuple and len(args) > 1 and Ellipsis not in args:
            return f"a list of {len(args)}: {', '.join(_words(arg) for arg in args)}"
        return f"a list, each item {_words(inner[0])}" if inner else "a list"
    if origin is dict:
        return f"a mapping, each value {_words(args[1])}"
    if isinstance(annotation, type):
        if issubclass(annotation, enum.Enum):
            return f"one of {', '.join(_literal(member.value) for member in annotation)}"
        if is_group(annotation):
            return "a group of keys"
        if issubclass(annotation, pathlib.PurePath):
            return "a path"
    plain: dict[Any, str] = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
    }
    plain |= {dict: "a mapping", type(None): "null", None: "null"}
    return plain.get(annotation, f"a {getattr(annotation, '__name__', str(annotation))}")


def _literal(value: Any) -> str:
    """A value as YAML spells it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _with_range(words: str, metadata: list[Any]) -> str:
    """`words` followed by the limits that pydantic keeps in a field's metadata."""
    limits: dict[str, Any] = {}
    for entry in metadata:
        for inner in getattr(entry, "metadata", None) or [entry]:
            for name in ("ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern"):
                value = getattr(inner, name, None)
                if value is not None:
                    limits[name] = value
    parts: list[str] = []
    if "ge" in limits and "le" in limits:
        parts.append(f"from {limits['ge']} to {limits['le']}")
    else:
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        parts.append(" and ".join(f"{sign} {limits[name]}" for name, sign in signs.items() if name in limits))
    if "multiple_of" in limits:
        parts.append(f"that is a multiple of {limits['multiple_of']}")
    if "min_length" in limits:
        parts.append(f"of length >= {limits['min_length']}")
    if "max_length" in limits:
        parts.append(f"of length <= {limits['max_length']}")
    if "pattern" in limits:
        parts.append(f"that matches {limits['pattern']}")
    return " ".join([words, *(part for part in parts if part)])
