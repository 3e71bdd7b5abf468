"""A dataclass at the top of a script as the schema of its configs: there is no second list of its knobs.

It is taken from the script's text, with those imports and constants that it needs; the script itself is not run, since
what it imports (torch) takes seconds to load. Nor is another script of the project whose dataclass it nests or extends.
A field's description is the comment behind it.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import os
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from nemo_runspec.code import module_file
from nemo_runspec.errors import UserError, did_you_mean
from nemo_runspec.words import shown

if TYPE_CHECKING:
    from pydantic import BaseModel

_DESCRIPTIONS = "__descriptions__"  # of the fields that a dataclass itself declares


def module_for(path: Path) -> ModuleType:
    """A new, empty module for what is taken from a file. In `sys.modules`, where pydantic looks annotations up."""
    module = ModuleType(f"_runspec_schema_{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}")
    sys.modules[module.__name__] = module
    return module


def is_other_class(script: Path, name: str) -> bool:
    """Whether the class `name` of `script` is no dataclass: a pydantic class, beside what it configures."""
    tree = ast.parse(script.read_text(encoding="utf-8"), str(script))
    return any(isinstance(node, ast.ClassDef) and node.name == name and not _is_dataclass(node) for node in tree.body)


def dataclass_in(script: Path, name: str, module: ModuleType) -> type:
    """The dataclass `name` of `script`; the statements that it needs run in `module`.

    Raises:
        UserError: the script has no such dataclass.
        Exception: whatever these statements raise.
    """
    text = script.read_text(encoding="utf-8")
    tree = ast.parse(text, str(script))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef) and _is_dataclass(node)}
    if name not in classes:
        raise UserError(f"{shown(script)} has no dataclass {name!r}", did_you_mean(name, classes, "dataclasses"))
    needed = _needed(tree, classes[name])
    for statement in [each for each in needed if isinstance(each, ast.ImportFrom) and not each.level]:
        for imported in list(statement.names):
            other = module_file(script, f"{statement.module}.{imported.name}")
            if other is not None and "# /// script" in other.read_text(encoding="utf-8").splitlines():
                used = [node.attr for node in ast.walk(classes[name]) if _is_of(node, _bound(imported))]
                found = {attr: dataclass_in(other, attr, module_for(other)) for attr in dict.fromkeys(used)}
                setattr(module, _bound(imported), SimpleNamespace(**found))
                statement.names.remove(imported)
    statements = [each for each in needed if not isinstance(each, ast.ImportFrom) or each.names]
    exec(compile(ast.Module(statements, []), str(script), "exec"), vars(module))
    config_class: type = vars(module)[name]
    setattr(config_class, _DESCRIPTIONS, _comments(classes[name], text))
    return config_class


def pydantic_class(config_class: type) -> type[BaseModel]:
    """A pydantic class with the fields of a dataclass, those of dataclasses in it included."""
    from pydantic import ConfigDict, Field, create_model

    fields: dict[str, Any] = {}
    comments: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        comments |= vars(base).get(_DESCRIPTIONS, {})
    hints = typing.get_type_hints(config_class, include_extras=True)
    for field in dataclasses.fields(config_class):
        annotation, about = hints[field.name], comments.get(field.name)
        if dataclasses.is_dataclass(annotation):
            annotation = pydantic_class(typing.cast(type, annotation))
            fields[field.name] = (annotation, Field(default_factory=annotation, description=about))
        elif field.default_factory is not dataclasses.MISSING:
            fields[field.name] = (annotation, Field(default_factory=field.default_factory, description=about))
        else:
            default = ... if field.default is dataclasses.MISSING else field.default
            fields[field.name] = (annotation, Field(default, description=about))
    strict = ConfigDict(extra="forbid", allow_inf_nan=False)
    return create_model(config_class.__name__, __config__=strict, __module__=config_class.__module__, **fields)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in _names(decorator) for decorator in node.decorator_list)


def _needed(tree: ast.Module, wanted: ast.ClassDef) -> list[ast.stmt]:
    """The class, and above it the imports and definitions of the names that it uses, however indirectly."""
    kept: list[ast.stmt] = [wanted]
    names = _names(wanted)
    for statement in reversed(tree.body[: tree.body.index(wanted)]):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            used = [name for name in statement.names if _bound(name) in names or _is_future(statement)]
            if used:
                statement.names = used
                kept.append(statement)
        elif names & set(_defined(statement)):
            names |= _names(statement)
            kept.append(statement)
    return kept[::-1]


def _is_future(statement: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _is_of(node: ast.AST, name: str) -> typing.TypeGuard[ast.Attribute]:
    """Whether this is `name.attribute`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name


def _bound(name: ast.alias) -> str:
    return name.asname or name.name.partition(".")[0]


def _defined(statement: ast.stmt) -> Iterator[str]:
    """What a statement at the top defines: a constant, a class or a function."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _names(node: ast.AST) -> set[str]:
    """The names that the code of a node uses, `dataclasses` of `dataclasses.field` included."""
    loaded = (below for below in ast.walk(node) if isinstance(below, ast.Name) and isinstance(below.ctx, ast.Load))
    return {name.id for name in loaded} | {below.attr for below in ast.walk(node) if isinstance(below, ast.Attribute)}


def _comments(node: ast.ClassDef, text: str) -> dict[str, str]:
    """The comment behind each field, on its line."""
    lines = text.splitlines()
    comments = {}
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert field.end_lineno is not None
            behind = lines[field.end_lineno - 1].encode()[field.end_col_offset :].decode().strip()
            if behind.startswith("#"):
                comments[field.target.id] = behind.lstrip("# ")
    return comments
