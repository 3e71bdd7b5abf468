"""The artifacts that a config reads: every key of its `run` group that is not reserved names one, or a list of them.

A schema may say of which type such an artifact is, and how a directory or an address becomes one:

    model: Annotated[str | None, ArtifactInput("Checkpoint", adopt=adopt_model)] = None
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_runspec.artifacts.naming import SCHEME
from nemo_runspec.config.schema import RESERVED_RUN_KEYS, run_group
from nemo_runspec.config.yaml_text import KeyPath, dotted
from nemo_runspec.errors import UserError
from nemo_runspec.user_files import in_artifact

if TYPE_CHECKING:
    from pydantic import BaseModel

    from nemo_runspec.artifacts.registry import Registry, Version
    from nemo_runspec.config.loader import LoadedConfig

# (value, registry, whether to publish) -> the version, or None where it would have to be published first
Adopt = Callable[[str, "Registry", bool], "Version | None"]


@dataclass(frozen=True)
class ArtifactInput:
    """Marks a key of `run`. `type`: one of the types that the record of the artifact lists.

    `adopt`: publishes what lies in a directory or behind an address, or finds the version that has this content. Where
    it may not publish (a dry run) it still raises UserError for what cannot be adopted. None: only references will do.
    """

    type: str
    adopt: Adopt | None = None

    def check_type(self, version: Version) -> None:
        """UserError where a version is of another type; a record that lists no types is taken as it is."""
        types = version.record.get("types")
        if types and self.type not in types:
            raise UserError(f"{version.ref} is of type {version.record.get('type')}, not {self.type}")


@dataclass(frozen=True)
class FieldOfArtifact:
    """Marks a key KEY of a config, for a path or an address, whose value may also name an artifact.

    `KEY=NAME` then means `run.INPUT=NAME KEY=${art:INPUT,FIELD}`, so that the artifact is pinned and an input of the
    run. `input`: a key of `run` that adopts (`ArtifactInput`), and so takes any path and any address; None: a key of
    the name KEY, which takes artifacts alone.
    """

    field: str
    input: str | None = None


def name_inputs(
    loaded: LoadedConfig, schema: type[BaseModel] | None, is_artifact: Callable[[str], bool]
) -> dict[str, Any]:
    """The values of a config with the artifacts that its marked keys name in its `run` group.

    Args:
        is_artifact: whether a value is the name of one.

    Raises:
        UserError: the command line names two inputs for one.
    """
    data = copy.deepcopy(loaded.data)
    for path, mark in _fields_of_artifacts(schema, ()) if schema is not None else ():
        group: Any = data
        for key in path[:-1]:
            group = group.get(key) if isinstance(group, dict) else None
        value = group.get(path[-1]) if isinstance(group, dict) else None
        if not isinstance(value, str):
            continue
        run, name = data.setdefault("run", {}), mark.input or str(path[-1])
        if not (_is_input(value, path, loaded) if mark.input else is_artifact(value)):
            instead = mark.input is None and "${" not in value and loaded.on_command_line(path)
            if instead and f"${{art:{name}," not in str(data) and not loaded.on_command_line(("run", name)):
                run.pop(name, None)  # a path or an address instead of the artifact that the config names: not read
            continue
        if mark.input and loaded.on_command_line(("run", name)) and run[name] != value:
            raise UserError(f"command line: run.{name}={run[name]} and {dotted(path)}={value} name two", "give one")
        # A bare name that is a file is a path here; in `run` it would be the name of an artifact.
        run[name] = f"./{value}" if not is_place(value) and Path(value).exists() else value
        group[path[-1]] = f"${{art:{name},{mark.field}}}"
    return data


def _fields_of_artifacts(schema: type[BaseModel], path: KeyPath) -> Iterator[tuple[KeyPath, FieldOfArtifact]]:
    for name, field in schema.model_fields.items():
        yield from (((*path, name), mark) for mark in field.metadata if isinstance(mark, FieldOfArtifact))
        group: Any = field.annotation
        if hasattr(group, "model_fields"):
            yield from _fields_of_artifacts(group, (*path, name))


def _is_input(value: str, path: KeyPath, loaded: LoadedConfig) -> bool:
    """Whether this names what `run` is to adopt. In a job's config it is where the launcher has found it to lie."""
    return "${" not in value and (loaded.on_command_line(path) or not in_artifact(value))


def references_of(run: Mapping[str, Any]) -> dict[str, str]:
    """The references in a `run` group by key; those of a list by `key.0`, `key.1` and so on."""
    references: dict[str, str] = {}
    for key, value in run.items():
        if key in RESERVED_RUN_KEYS or not value:
            continue
        if isinstance(value, list | tuple):
            references |= {f"{key}.{index}": item for index, item in enumerate(value)}
        else:
            references[key] = value
    return references


def put_reference(run: dict[str, Any], key: str, reference: str) -> None:
    """Replace the reference that `references_of` calls `key`; a list becomes a new one."""
    name, dot, index = key.partition(".")
    if dot:
        run[name] = [reference if place == int(index) else item for place, item in enumerate(run[name])]
    else:
        run[name] = reference


def is_place(reference: str) -> bool:
    """Whether this is a directory or an address: it has a slash, or begins with a dot or a tilde."""
    return not reference.startswith(SCHEME) and ("/" in reference or reference.startswith((".", "~")))


def input_marks(schema: type[BaseModel] | None) -> dict[str, ArtifactInput]:
    """The marks of the keys of `run`; empty without a schema."""
    if schema is None:
        return {}
    marks: dict[str, ArtifactInput] = {}
    for name, field in run_group(schema).model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, ArtifactInput):
                marks[name] = mark
    return marks
