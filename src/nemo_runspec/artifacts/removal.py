"""Which versions others need, and which nobody does: what `artifacts rm` and `artifacts gc` go by.

A version needs its inputs and the versions that its fields point into.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from nemo_runspec.artifacts.naming import parse_reference
from nemo_runspec.artifacts.registry import Registry, Version
from nemo_runspec.errors import UserError


def chosen(registry: Registry, references: Iterable[str]) -> list[str]:
    """`name:3` of each version that is meant: of a bare `name` all there are. UserError where there is none."""
    refs: list[str] = []
    for text in references:
        reference = parse_reference(text)
        number = reference.version
        if number is None and text.removeprefix("art://") == reference.name and registry.versions(reference.name):
            refs += [f"{reference.name}:{each}" for each in registry.versions(reference.name)]
        elif number in registry.versions(reference.name) and reference.digest is None:  # its record may be damaged
            refs.append(f"{reference.name}:{number}")
        else:
            refs.append(registry.resolve(text).ref)
    return list(dict.fromkeys(refs))


def needed_by(registry: Registry, refs: Iterable[str]) -> dict[str, list[str]]:
    """Of the versions `refs` those that other versions need, each with the references of these others.

    Others whose record or folder cannot be read are taken to need nothing.
    """
    removed = set(refs)
    users: dict[str, list[str]] = {}
    for name in registry.names():
        with contextlib.suppress(UserError):
            for version in reversed([*registry.readable(name)]):
                for needed in _needs(version) & removed if version.ref not in removed else ():
                    users.setdefault(needed, []).append(version.ref)
    return users


def unneeded(registry: Registry, in_use: Iterable[str] = ()) -> list[str]:
    """The versions that are not the latest of their name, and that no latest one and none `in_use` needs, however far
    back. UserError where a record cannot be read: what it needs is not known."""
    references = _references(registry)
    versions = {ref: registry.resolve(ref) for ref in references}
    pending = [*{ref.partition(":")[0]: ref for ref in references}.values(), *in_use]
    kept: set[str] = set()
    while pending:
        ref = pending.pop()
        if ref not in kept:
            kept.add(ref)
            pending += _needs(versions[ref]) if ref in versions else ()
    return [ref for ref in references if ref not in kept]


def size_of(registry: Registry, ref: str) -> int:
    """Bytes of the payload; 0 for a version whose record cannot be read."""
    with contextlib.suppress(UserError):
        return registry.resolve(ref).size_bytes
    return 0


def _references(registry: Registry) -> list[str]:
    return [f"{name}:{number}" for name in registry.names() for number in registry.versions(name)]


def _needs(version: Version) -> set[str]:
    """The references of the versions that a version needs, not those that these need in their turn."""
    pinned = (version.record.get("inputs") or {}).values()
    refs = {str(reference).partition("@")[0] for reference in pinned}
    root = version.registry.local_root
    for value in (version.record.get("fields") or {}).values():
        if isinstance(value, str) and Path(value).is_relative_to(root):
            refs.add(":".join(Path(value).relative_to(root).parts[:2]))
    return refs - {version.ref}
