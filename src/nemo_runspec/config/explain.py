"""What an error about a config's key or value says: what is allowed there, and the nearest key that there is.

`allowed` puts a schema's types and limits into words: `an integer from 1 to 10`, `one of 'wsd', 'cosine'`.
"""

from __future__ import annotations

import copy
import json
import types
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_runspec.config.loader import LoadedConfig
from nemo_runspec.config.schema import RESERVED_RUN_KEYS, item_of, leaf_keys, optional_group
from nemo_runspec.config.yaml_text import KeyPath, dotted, value_at
from nemo_runspec.errors import UserError, nearest
from nemo_runspec.secrets import HIDDEN, has_login, looks_secret, without_login

if TYPE_CHECKING:
    from pydantic import BaseModel


def unknown_key(path: KeyPath, group: type[BaseModel], loaded: LoadedConfig, schema: type[BaseModel]) -> UserError:
    """The error for a key that its `group` does not have."""
    value = value_at(loaded.data, path)
    text = "" if isinstance(value, (dict, list)) else f" = {_shown(value, hide=looks_secret(str(path[-1])))}"
    return UserError(f"{loaded.origin(path)}: unknown key {dotted(path)}{text}", _nearest_key(path, group, schema))


def first_fault(faults: list[Any], data: dict[str, Any], loaded: LoadedConfig, schema: type[BaseModel]) -> UserError:
    """The error for what pydantic refused: the first of `faults`, and how many more there are."""
    fault = faults[0]
    path = data_path(data, fault["loc"])
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    if fault["type"] == "missing" and isinstance(fault["loc"][-1], int):  # of a list of a fixed length
        path = path[:-1]
    elif fault["type"] == "missing":
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
    elif fault["type"] == "finite_number":
        reason = "must be a finite number"
    # Where the name of a variable belongs that holds a secret, the secret itself may have been pasted.
    name = str(path[-1])
    text = _shown(value, hide=reason == "unknown key" or name.endswith("_env")) if looks_secret(name) else _shown(value)
    text = "" if isinstance(value, dict) else f" = {text}"
    hint = rule.hint
    if fault["type"] == "list_type" and isinstance(value, str) and _accepts_list_of(value, data, path, schema):
        hint = "; ".join(filter(None, [f"a list of one: {dotted(path)}=[{value}]", hint]))
    return UserError(f"{at}: {dotted(path)}{text}: {reason}{more}", hint)


def _shown(value: Any, *, hide: bool = False) -> str:
    """A value as errors show it, which may be kept in a log: without the user and password of an address."""
    if hide and isinstance(value, str):
        return HIDDEN
    text = without_login(repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _accepts_list_of(item: str, data: dict[str, Any], path: KeyPath, schema: type[BaseModel]) -> bool:
    """Whether `[item]`, written so, would be right at `path`."""
    from pydantic import ValidationError

    corrected = copy.deepcopy(data)
    value_at(corrected, path[:-1])[path[-1]] = [item]
    try:
        schema.model_validate_json(json.dumps(corrected), strict=True)
    except ValidationError as error:
        if any(data_path(corrected, fault["loc"])[: len(path)] == path for fault in error.errors()):
            return False
    return not set(item) & set(",[]{}'\"#") and not has_login(item)


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
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticInvalidForJsonSchema

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
    try:
        # Pydantic's own account of a type, limits included, is its JSON schema.
        rule = TypeAdapter(typing.Annotated[(annotation, *metadata)] if metadata else annotation).json_schema()
        words = _words(rule, rule.get("$defs", {}))
    except PydanticInvalidForJsonSchema:  # JSON has nothing for a function or a class
        words = _type_names(annotation)
    if annotation is complex:  # of which JSON says no more than that it is a text
        words = _type_names(annotation)
    return Allowed(words, None if not hint else f"{'.'.join(map(str, path))}: {' '.join(hint.split())}")


def _type_names(annotation: Any) -> str:
    """A type, or each member of a union, as Python calls it."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
    return " or ".join(
        "null" if member is type(None) else f"a {getattr(member, '__name__', member)}" for member in members
    )


def _nearest_key(path: KeyPath, group: type[BaseModel], schema: type[BaseModel]) -> str | None:
    """The sibling that looks like the last part of `path`; else a key of that name elsewhere; else the siblings.

    A group may say in a class variable `other_names` how other commands call its keys: {their name: its own}.
    """
    word = str(path[-1])
    if "." in word:  # in a file, as if on the command line
        return f"in YAML a group stands around its keys: {word.replace('.', ': {')}: …{'}' * word.count('.')}"
    prefix = f"{dotted(path[:-1])}." if len(path) > 1 else ""
    own_name = getattr(group, "other_names", {}).get(word)
    if own_name is not None:
        return f"here it is called {prefix}{own_name}"
    siblings = list(group.model_fields)
    near = nearest(word, siblings)
    if near is not None:
        return f"did you mean {prefix}{near}?"
    if path[:-1] == ("run",):
        inputs = [name for name in siblings if name not in RESERVED_RUN_KEYS]
        declare = f"an input artifact is a field of the schema's run group: {word}: str | None = None"
        return f"input artifacts: {', '.join(prefix + name for name in inputs)}" if inputs else declare
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


_PLAIN = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "null": "null",
}
# What a string has to spell.
_FORMATS = {
    "path": "a path",
    "date": "a date",
    "time": "a time of day",
    "date-time": "a date and time",
    "duration": "a duration",
    "uuid": "a UUID",
}
_LIMITS = {
    "minimum": ">= {}",
    "exclusiveMinimum": "> {}",
    "maximum": "<= {}",
    "exclusiveMaximum": "< {}",
    "multipleOf": "a multiple of {}",
    "minLength": "of length >= {}",
    "minItems": "of length >= {}",
    "maxLength": "of length <= {}",
    "maxItems": "of length <= {}",
    "pattern": "that matches {}",
}


def _words(rule: dict[str, Any], named: dict[str, Any]) -> str:
    """A JSON schema in words. `named`: the definitions that it refers to."""
    if "$ref" in rule:
        rule = named[rule["$ref"].rpartition("/")[2]]
    if members := rule.get("anyOf") or rule.get("oneOf"):
        return " or ".join(dict.fromkeys(_words(member, named) for member in members))
    if "const" in rule:
        return _literal(rule["const"])
    if "enum" in rule:
        return f"one of {', '.join(map(_literal, rule['enum']))}"
    kind = rule.get("type")
    if kind == "object" and "properties" in rule:
        return "a group of keys"
    if kind == "array" and "prefixItems" in rule:
        items = [_words(item, named) for item in rule["prefixItems"]]
        return f"a list of {len(items)}: {', '.join(items)}"
    if kind == "array":
        words = f"a list, each item {_words(rule['items'], named)}" if rule.get("items") else "a list"
    elif kind == "object":
        value = rule.get("additionalProperties")
        words = f"a mapping, each value {_words(value, named)}" if isinstance(value, dict) else "a mapping"
    else:
        words = _FORMATS.get(rule.get("format", "")) or _PLAIN.get(str(kind), "another value")
    if "minimum" in rule and "maximum" in rule:
        return f"{words} from {rule['minimum']} to {rule['maximum']}"
    limits = [text.format(rule[name]) for name, text in _LIMITS.items() if name in rule]
    return " ".join([words, " and ".join(limits)]) if limits else words


def _literal(value: Any) -> str:
    """A value as YAML spells it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)
