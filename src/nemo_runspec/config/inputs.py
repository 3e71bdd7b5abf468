"""The artifacts that a config reads: every key of its `run` group that is not reserved names one, or a list of them.

A schema may say of which type such an artifact is, and how a directory or an address becomes one:

    model: Annotated[str | None, ArtifactInput("Checkpoint", adopt=adopt_model)] = None
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_runspec.artifacts.naming import SCHEME
from nemo_runspec.config.schema import RESERVED_RUN_KEYS, run_group
from nemo_runspec.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from nemo_runspec.artifacts.registry import Registry, Version

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

    `KEY=NAME` then means `run.KEY=NAME KEY=${art:KEY,FIELD}`, so that the artifact is pinned and an input of the run.
    """

    field: str


def name_inputs(
    data: Mapping[str, Any], schema: type[BaseModel] | None, is_artifact: Callable[[str], bool]
) -> dict[str, Any]:
    """`data` with the artifacts that its marked keys name in its `run` group; `is_artifact` knows the names."""
    data = dict(data)
    for key, field in schema.model_fields.items() if schema is not None else ():
        value = data.get(key)
        for mark in field.metadata:
            if isinstance(mark, FieldOfArtifact) and isinstance(value, str) and is_artifact(value):
                data["run"] = {**data.get("run", {}), key: value}
                data[key] = f"${{art:{key},{mark.field}}}"
    return data


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
