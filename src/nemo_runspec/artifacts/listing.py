"""What `artifacts list` and `artifacts show` say: plain rows and lines; how they look is the command's business."""

from __future__ import annotations

import json
from dataclasses import dataclass

from nemo_runspec.artifacts.build import OWN_KEYS
from nemo_runspec.artifacts.registry import Registry, Version
from nemo_runspec.artifacts.stored import human_size
from nemo_runspec.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Entry:
    """One version in a listing. `problem` is set, and all after `ref` empty, when its record cannot be read."""

    ref: str
    type: str = ""
    created_at: str = ""
    digest: str = ""
    num_files: int = 0
    size_bytes: int = 0
    problem: str | None = None


def list_entries(registry: Registry, name: str | None = None, *, all_versions: bool = False) -> list[Entry]:
    """The latest version of every artifact, or of `name` all versions; a corrupt one is listed with its problem.

    Raises UserError for an unknown `name`.
    """
    names = registry.names()
    if name is not None and name not in names:
        raise UserError(f"no artifact '{name}' in {registry.root}", did_you_mean(name, names, "there is"))
    refs = []
    for each in [name] if name is not None else names:
        numbers = registry.versions(each)
        refs += [f"{each}:{n}" for n in (numbers if all_versions or name is not None else numbers[-1:])]
    return [_entry(registry, ref) for ref in refs]


def describe(version: Version) -> list[tuple[str, str]]:
    """The record of a version as (label, text) rows, in the order to show them; files with their sha256 last."""
    record = version.record
    rows = [
        ("artifact", version.ref),
        ("type", str(record.get("type", ""))),
        ("created", str(record.get("created_at", ""))),
        ("digest", version.digest),
        ("path", version.location),
        ("size", f"{human_size(version.size_bytes)} in {record['num_files']} files"),
    ]
    for section in (key for key in record if key not in (*OWN_KEYS, "type", "types", "created_at")):
        content = record[section]
        if isinstance(content, dict):
            rows += [(f"{section}.{key}", _text(value)) for key, value in content.items() if value is not None]
        elif isinstance(content, list):
            rows += [(section, _text(value)) for value in content]
        elif content is not None:
            rows.append((section, _text(content)))
    return rows + [("file", f"{sha256}  {name}") for name, sha256 in version.files.items()]


def _entry(registry: Registry, ref: str) -> Entry:
    try:
        version = registry.resolve(ref)
    except UserError as error:
        return Entry(ref, problem=error.message)
    record = version.record
    return Entry(
        ref=ref,
        type=str(record.get("type", "")),
        created_at=str(record.get("created_at", "")),
        digest=version.digest,
        num_files=int(record["num_files"]),
        size_bytes=version.size_bytes,
    )


def _text(value: object) -> str:
    if isinstance(value, dict) and set(value) <= {"name", "sha256", "detail"}:  # a source
        return "  ".join(str(part) for part in value.values() if part)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
