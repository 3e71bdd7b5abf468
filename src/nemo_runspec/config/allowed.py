"""What a schema allows at a key, in words: `an integer from 1 to 10`, `one of 'wsd', 'cosine'`, `a list of strings`."""

from __future__ import annotations

import enum
import pathlib
import types
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

_LISTS = (list, tuple, set, frozenset)


@dataclass(frozen=True)
class Rule:
    """`text` completes "must be …"; `hint` is the field's own description, or None."""

    text: str
    hint: str | None = None


def allowed(schema: type[BaseModel], path: tuple[str | int, ...]) -> Rule:
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
            return Rule("another value", None)
        annotation, metadata, hint = field.annotation, list(field.metadata), field.description
    words = _with_range(_words(annotation), metadata)
    return Rule(words, None if not hint else f"{'.'.join(map(str, path))}: {' '.join(hint.split())}")


def is_group(annotation: Any) -> bool:
    """Whether an annotation is a pydantic class."""
    from pydantic import BaseModel

    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def optional_group(annotation: Any) -> type[BaseModel] | None:
    """The pydantic class in `Group`, `Group | None` or `Annotated[Group, …]`, else None."""
    groups = [member for member in _members(annotation) if is_group(member)]
    return groups[0] if len(groups) == 1 else None


def group_of(annotation: Any) -> Any:
    """The pydantic class of the items in `list[Group]` or `dict[str, Group]`, else None."""
    for member in _members(annotation):
        group = optional_group(item_of(member))
        if group is not None:
            return group
    return None


def item_of(annotation: Any) -> Any:
    """The annotation of an item of a list or of a value of a mapping; None where there is none."""
    for member in _members(annotation):
        origin, args = typing.get_origin(member), typing.get_args(member)
        if origin in _LISTS and args:
            return args[0]
        if origin is dict and len(args) == 2:
            return args[1]
    return None


def _members(annotation: Any) -> list[Any]:
    """The members of a union, with Annotated opened; the annotation itself otherwise."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [inner for member in typing.get_args(annotation) for inner in _members(member)]
    return [annotation]


def _words(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _with_range(_words(args[0]), list(args[1:]))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(member) for member in args))
    if origin is typing.Literal:
        values = [_literal(value) for value in args]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if origin in _LISTS:
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
