"""Strict validation of config values against a script's pydantic class; `explain` words what is refused.

After it: the user's files behind a config exist, and their digest is noted in it, since changed files make another run
although the config reads the same.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_runspec.config.explain import data_path, first_fault, unknown_key
from nemo_runspec.config.interpolate import is_to_come
from nemo_runspec.config.loader import LoadedConfig
from nemo_runspec.config.schema import group_of, is_group, item_of, optional_group
from nemo_runspec.config.yaml_text import KeyPath, dotted, read_scalar, value_at
from nemo_runspec.errors import UserError
from nemo_runspec.user_files import UserFiles, digest, files_of, in_artifact, is_elsewhere, local_path

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


def check_keys(loaded: LoadedConfig, schema: type[BaseModel]) -> None:
    """Refuse a key that the schema does not have, naming the nearest one that it has."""
    for path, group in _unknown(loaded.data, schema, ()):
        raise unknown_key(path, group, loaded, schema)


def _unknown(data: Any, annotation: Any, path: KeyPath) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    """Paths of the keys in `data` that their group does not have; groups in lists and mappings are entered too."""
    if isinstance(data, dict):
        group = optional_group(annotation)
        if group is not None:
            for key, value in data.items():
                field = _field(group, key)
                if field is not None:
                    yield from _unknown(value, field.annotation, (*path, key))
                elif group.model_config.get("extra") != "allow":
                    yield (*path, key), group
            return
    below = group_of(annotation)
    if below is not None and below is not annotation:
        items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
        for key, value in items:
            yield from _unknown(value, below, (*path, key))


def _field(group: type[BaseModel], key: str) -> FieldInfo | None:
    for name, field in group.model_fields.items():
        if key in (name, field.alias):
            return field
    return None


def validate(data: dict[str, Any], loaded: LoadedConfig, schema: type[BaseModel]) -> BaseModel | None:
    """An instance of `schema` from resolved values; None where a value is to come from an artifact not made yet.

    Types are strict: a string is no number and true is no 1. Two readings are allowed: a whole float for an integer
    (`1e6`), and the text of an environment variable or another interpolation for the number that it spells.

    Raises:
        UserError: the first fault, with its origin, value and what is allowed; how many more there are.
    """
    from pydantic import ValidationError

    for attempt in range(2):
        try:
            return schema.model_validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            faults = [
                fault
                for fault in error.errors(include_url=False)
                if not is_to_come(value_at(data, data_path(data, fault["loc"])))
            ]
            if not faults:
                return None
            if attempt or not _reread(data, loaded, faults):
                raise first_fault(faults, data, loaded, schema) from None
    raise AssertionError("unreachable")


def check_defaults(model: BaseModel, schema: type[BaseModel], loaded: LoadedConfig, file: Path) -> None:
    """Refuse a default of the schema in `file` that the schema itself does not allow.

    Pydantic takes defaults as they are. The job reads them from train.yaml, where they are values like any others, and
    would be refused there: on the cluster, after the dry run has found nothing.
    """
    from pydantic import ValidationError

    data = model.model_dump(mode="json", warnings=False)  # of a default of another type, which is refused below
    try:
        schema.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        written = replace(loaded, path=file, origins={})
        raise first_fault(error.errors(include_url=False), data, written, schema).at("wrong default") from None


def _reread(data: dict[str, Any], loaded: LoadedConfig, faults: list[Any]) -> bool:
    """Apply the two readings that `validate` allows, in place; False if there is nothing to apply."""
    changed = False
    for fault in faults:
        path = data_path(data, fault["loc"])
        value = value_at(data, path)
        new: Any = value
        if fault["type"] == "int_type" and isinstance(value, float) and value.is_integer():
            new = int(value)
        elif isinstance(value, str) and fault["type"] in ("int_type", "float_type", "bool_type"):
            raw = value_at(loaded.data, path)
            if isinstance(raw, str) and "${" in raw:
                new = read_scalar(value, dotted(path))
        if new is not value and path:
            value_at(data, path[:-1])[path[-1]] = new
            changed = True
    return changed


@dataclass(frozen=True)
class UserLocation:
    """A location of the user's files in a config, with the mark of its field. `at` says where it was written."""

    location: str
    at: str
    mark: UserFiles


def user_locations(model: BaseModel, loaded: LoadedConfig) -> list[UserLocation]:
    """The files, folders and globs that fields marked as `UserFiles` name, in the order of the config.

    Those behind an address are not among them: it is not asked here.
    """
    return [
        UserLocation(location, f"{loaded.origin(path)}: {dotted(path)}", mark)
        for path, location, mark in _locations(model, type(model), (), ())
        if location not in mark.names and not is_elsewhere(location)
    ]


def digest_user_files(locations: Iterable[UserLocation]) -> str | None:
    """The digest over the files of this machine behind `locations`; None where there are none.

    Files in a published artifact do not count: it does not change, its digest is in the run's identity already, and its
    payload may not be on this machine yet.

    Raises:
        UserError: there is no such file, or it is not of the kind that the field needs; the message says where the
            location was written.
    """
    files: set[str] = set()
    for each in locations:
        file = local_path(each.location)
        if each.mark.check is not None and file.exists() and (fault := each.mark.check(file)):
            raise UserError(f"{each.at}: {fault}")
        if in_artifact(each.location):
            continue
        try:
            files.update(files_of(each.location))
        except UserError as error:
            raise UserError(f"{each.at}: {error.message}", error.hint or each.mark.hint(each.location)) from None
    return digest(files)


def _locations(
    value: Any, annotation: Any, metadata: tuple[Any, ...], path: KeyPath
) -> Iterator[tuple[KeyPath, str, UserFiles]]:
    """The values below `value` whose annotation is marked, with the path of each and its mark."""
    if is_group(type(value)):
        for name, field in type(value).model_fields.items():
            yield from _locations(getattr(value, name), field.annotation, tuple(field.metadata), (*path, name))
    elif isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _locations(item, item_of(annotation), (), (*path, key))
    elif isinstance(value, str | Path):
        marks = [mark for mark in (*metadata, *_metadata(annotation)) if isinstance(mark, UserFiles)]
        if marks:
            yield path, str(value), marks[-1]


def _metadata(annotation: Any) -> Iterator[Any]:
    """What stands beside the type in `Annotated[…]`, also within a union."""
    if typing.get_origin(annotation) is typing.Annotated:
        yield from typing.get_args(annotation)[1:]
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _metadata(member)
