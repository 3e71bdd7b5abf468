"""Environments of the user's own, as a config names them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field

from nemo_runspec.errors import nearest
from nemo_runspec.user_files import expanded
from nemotron.kit.schemas.difficulty import FAMILIES

QUESTIONS = "questions/"
# What fingerprints follow, too: the file counts, and what it imports from its own folder (docs/runspec/v1/spec.md).
_REFERENCE = re.compile(r"(?:(?P<file>.+\.py)|[A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_]\w*")


def split_reference(reference: str) -> tuple[str, str]:
    """`FILE.py:NAME` or `package.module:NAME` as (file or module, name); ValueError if it is neither."""
    if not _REFERENCE.fullmatch(reference):
        raise ValueError(f"{reference!r} names no environment: write FILE.py:NAME or PACKAGE.MODULE:NAME")
    place, _, name = reference.rpartition(":")
    return place, name


def _check_reference(reference: str) -> str:
    place, _ = split_reference(reference)
    if place.endswith(".py") and not expanded(place).is_file():
        raise ValueError(f"no such file: {place}")
    return reference


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"{name!r}: the name of an environment is made of a-z, 0-9 and _")
    if name in FAMILIES:
        raise ValueError(f"{name} is a family that there is already: give the environment another name")
    return name


def check_known(families: Iterable[str], environments: Iterable[str]) -> None:
    """Refuse the families of `env.families` that nothing here verifies."""
    for family in families:
        if family in FAMILIES or family in environments or family.startswith(QUESTIONS):
            continue
        near = nearest(family, [*FAMILIES, *environments])
        hint = f"did you mean {near}?" if near else f"an environment of yours? {{{family}: FILE.py:NAME}} there"
        raise ValueError(f"env.families: {family} is neither a family nor one of env.environments; {hint}")


Environments: TypeAlias = Annotated[
    dict[Annotated[str, AfterValidator(_check_name)], Annotated[str, AfterValidator(_check_reference)]],
    Field(description="environments of your own: name -> the object that is it, as FILE.py:NAME; its code is run"),
]
