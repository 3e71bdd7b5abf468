"""What differs between two runs of a script in config, code, inputs: why one does not go on, or a step runs again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from nemo_runspec.config.yaml_text import escape_interpolation, read_yaml
from nemo_runspec.fingerprint import content_of, run_code

if TYPE_CHECKING:
    from nemo_runspec.artifacts import Version
    from nemo_runspec.config.resolve import ResolvedConfig


def changes_since(before: Version, resolved: ResolvedConfig) -> list[str]:
    """What a run of `resolved` reads and computes otherwise than the run of another fingerprint behind `before`.

    Empty where `before` was published without the records of its run.
    """
    code, text = (before.run_file(name) for name in ("code.json", "config.yaml"))
    if code is None or text is None:
        return []
    config = resolved.model or resolved.data
    changes = [*_inputs(before, resolved.inputs)]
    then, now = content_of(config, read_yaml(text, "config.yaml")[0] or {}), escape_interpolation(content_of(config))
    changes += [
        line
        for line in differing_keys(then, now)
        if not line.startswith("run.") and not _reads_an_input(resolved.loaded.data, line.partition(":")[0])
    ]
    changes += differing_modules(json.loads(code), run_code(config, resolved.spec))
    return changes or [resolved.spec.script_path.name]


def _inputs(before: Version, inputs: Mapping[str, Version | None]) -> Iterator[str]:
    pinned = before.record.get("inputs") or {}
    for role, version in inputs.items():
        if role in pinned and (version is None or version.digest != pinned[role].rpartition("@")[2]):
            yield f"run.{role} ({'made anew' if version is None else version.ref})"


def _reads_an_input(data: Any, key: str) -> bool:
    """Whether a key's value is a place in an input (`${art:data,path}`): where that lies is no change of it."""
    for part in key.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return isinstance(data, str) and "${art:" in data


def differing_modules(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The modules whose sha256 is another, in order."""
    return [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]


def differing_keys(then: Any, now: Any, key: str = "") -> list[str]:
    """`key: A -> B` for every value of a tree of mappings that is another."""
    if isinstance(then, dict) and isinstance(now, dict):
        keys = [*then, *(name for name in now if name not in then)]
        below = [differing_keys(then.get(name), now.get(name), f"{key}.{name}" if key else str(name)) for name in keys]
        return [line for lines in below for line in lines]
    return [] if then == now else [f"{key}: {then} -> {now}"]


def in_short(changes: Sequence[str], limit: int = 3) -> str:
    """The first few, each cut to a hundred characters, and how many more."""
    more = f" and {len(changes) - limit} more" if len(changes) > limit else ""
    return ", ".join(shorten(change, 100, placeholder=" …") for change in changes[:limit]) + more
