"""What `artifacts list` and `artifacts show` say: plain rows and lines; how they look is the command's business."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from nemo_runspec.artifacts.build import OWN_KEYS
from nemo_runspec.artifacts.manifest import human_size
from nemo_runspec.artifacts.registry import Registry, Version
from nemo_runspec.errors import ArtifactError, UserError, did_you_mean
from nemo_runspec.words import counted


def list_entries(
    registry: Registry, name: str | None = None, *, all_versions: bool = False
) -> dict[str, Version | str]:
    """The latest version of every artifact, or of `name` all versions, by reference.

    One without a record to show has the word for it, `corrupt` or `unreadable`; so has a name whose folder may not be
    read.

    Raises UserError for an unknown `name`.
    """
    names = registry.names()
    if name is not None and name not in names:
        raise UserError(f"no artifact '{name}' in {registry.root}", did_you_mean(name, names, "there is"))
    entries: dict[str, Version | str] = {}
    for each in [name] if name is not None else names:
        try:
            numbers = registry.versions(each)
        except UserError:
            entries[each] = "unreadable"
            continue
        chosen = numbers if all_versions or name is not None else numbers[-1:]
        entries |= {ref: _readable(registry, ref) for ref in (f"{each}:{number}" for number in chosen)}
    return entries


def describe(version: Version) -> list[tuple[str, str]]:
    """The record of a version as (label, text) rows, in the order to show them; files with their sha256 last."""
    record = version.record
    rows = [
        ("artifact", version.ref),
        ("type", str(record.get("type", ""))),
        ("created", str(record.get("created_at", ""))),
        ("digest", version.digest),
        ("path", version.location),
        ("size", f"{human_size(version.size_bytes)} in {counted(record['num_files'], 'file')}"),
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


def compare(first: Version, second: Version, read_config: Callable[[str], Any]) -> list[tuple[str, str, str]]:
    """What differs between two versions as (key, of the first, of the second) rows: payload, config, metrics, inputs,
    code, environment, and who made them. Where a version lies and when it was made does not count.

    Args:
        read_config: makes plain values of the text of a `config.yaml`.
    """
    sides = [_facts(version, read_config) for version in (first, second)]
    keys = [*sides[0], *(key for key in sides[1] if key not in sides[0])]
    rows = [(key, sides[0].get(key, "-"), sides[1].get(key, "-")) for key in keys]
    return [row for row in rows if row[1] != row[2]]


def _facts(version: Version, read_config: Callable[[str], Any]) -> dict[str, str]:
    record = version.record
    facts = {"type": str(record.get("type", "")), "digest": version.digest[:12]}
    local = str(version.registry.local_root)
    fields = {key: value for key, value in (record.get("fields") or {}).items() if local not in str(value)}
    config = version.run_file("config.yaml")
    groups = {
        "fields": fields,
        "config": read_config(config) if config else {},
        "metrics": record.get("metrics"),
        "inputs": record.get("inputs"),
        "code": json.loads(version.run_file("code.json") or "{}"),
        "environment": json.loads(version.run_file("environment.json") or "{}"),
        "producer": record.get("producer"),
    }
    for group, content in groups.items():
        # 12 digits of a digest are enough to tell two apart, and `producer` has one fingerprint of all the code.
        facts |= {key: text[:12] if group == "code" else text for key, text in _flat(group, content)}
    return facts


def _flat(key: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [pair for name, item in value.items() for pair in _flat(f"{key}.{name}", item)]
    return [] if value is None else [(key, _text(value))]


def _readable(registry: Registry, ref: str) -> Version | str:
    try:
        return registry.resolve(ref)
    except ArtifactError:
        return "corrupt"
    except UserError:
        return "unreadable"


def _text(value: object) -> str:
    if isinstance(value, dict) and set(value) <= {"name", "sha256", "detail"}:  # a source
        return "  ".join(str(part) for part in value.values() if part)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
