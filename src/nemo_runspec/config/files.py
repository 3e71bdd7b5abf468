"""The step between validation and fingerprint: the user's files behind a config exist, and their digest is noted in it.

Changed files make another run, although the config reads the same.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nemo_runspec.config.loader import LoadedConfig
from nemo_runspec.config.schema import is_group, item_of
from nemo_runspec.config.yaml_text import KeyPath, dotted
from nemo_runspec.errors import UserError
from nemo_runspec.user_files import UserFiles, digest, files_of, in_artifact, is_elsewhere

if TYPE_CHECKING:
    from pydantic import BaseModel


def digest_user_files(model: BaseModel, loaded: LoadedConfig) -> str | None:
    """The digest over the local files that fields marked as `UserFiles` name; None where they name none.

    Files in a published artifact do not count: it does not change, its digest is in the run's identity already, and its
    payload may not be on this machine yet. Nor do those behind an address, which is not asked here.

    Raises:
        UserError: there is no such file; the message says where the location was written.
    """
    files: set[str] = set()
    for path, location, mark in _locations(model, type(model), (), ()):
        if is_elsewhere(location) or in_artifact(location):
            continue
        try:
            files.update(files_of(location))
        except UserError as error:
            at = f"{loaded.origin(path)}: {dotted(path)}"
            raise UserError(f"{at}: {error.message}", error.hint or mark.hint) from None
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
    elif isinstance(value, str):
        marks = [mark for mark in (*metadata, *_metadata(annotation)) if isinstance(mark, UserFiles)]
        if marks:
            yield path, value, marks[-1]


def _metadata(annotation: Any) -> Iterator[Any]:
    """What stands beside the type in `Annotated[…]`, also within a union."""
    if typing.get_origin(annotation) is typing.Annotated:
        yield from typing.get_args(annotation)[1:]
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _metadata(member)
