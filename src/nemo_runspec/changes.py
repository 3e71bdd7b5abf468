"""What differs between two runs of a script in config, code, inputs: why one does not go on, or a step runs again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from nemo_runspec.config.yaml_text import escape_interpolation, read_yaml, spelled
from nemo_runspec.fingerprint import NOT_CONTENT_OF_RUN, content_of, run_code

if TYPE_CHECKING:
    from nemo_runspec.artifacts import Version
    from nemo_runspec.config.resolve import ResolvedConfig


def changes_since(before: Version, resolved: ResolvedConfig) -> list[str]:
    """What a run of `resolved` reads and computes otherwise than the run of another fingerprint behind `before`.

    Keys, then inputs, then modules; the script where nothing else differs. Empty where `before` was published without
    the records of its run.

    Raises:
        UserError, ValueError: these records cannot be read.
    """
    texts = [before.run_file(name) for name in ("code.json", "config.yaml")]
    if None in texts:
        return []
    code, then = json.loads(texts[0] or ""), read_yaml(texts[1] or "", "config.yaml")[0]
    if not isinstance(code, dict) or not isinstance(then, dict):
        return []
    config = resolved.model or resolved.data
    pinned = before.record.get("inputs")
    pinned = pinned if isinstance(pinned, dict) else {}
    changes: list[str] = []
    for line in differing_keys(content_of(config, then), escape_interpolation(content_of(config))):
        key = line.partition(":")[0]
        if key.startswith("run."):
            name = key.split(".")[1]
            if name in NOT_CONTENT_OF_RUN or name in pinned or name in resolved.inputs:
                continue
            line = "your files" if name == "files" else line
        if line not in changes and not _reads_an_input(resolved.loaded.data, key):
            changes.append(line)
    run = then.get("run")
    changes += _inputs(pinned, run if isinstance(run, dict) else {}, resolved.inputs)
    changes += differing_modules(code, run_code(config, resolved.spec))
    return changes or [resolved.spec.script_path.name]


def _inputs(pinned: Mapping[str, str], run: Mapping[str, Any], inputs: Mapping[str, Version | None]) -> Iterator[str]:
    for role, version in inputs.items():
        if role not in pinned:
            yield f"run.{role} (new)"
        elif version is None or version.digest != str(pinned[role]).rpartition("@")[2]:
            yield f"run.{role} ({'made anew' if version is None else version.ref})"
    yield from (f"run.{role} (no longer)" for role in pinned if role in run and role not in inputs)


def _reads_an_input(data: Any, key: str) -> bool:
    """Whether a key's value is a place in an input (`${art:data,path}`): where that lies is no change of it."""
    for part in key.split("."):
        data = _by_number(data)
        data = data.get(part) if isinstance(data, dict) else None
    return isinstance(data, str) and "${art:" in data


def _by_number(value: Any) -> Any:
    """A list as a mapping of its items by their places, anything else as it is."""
    return {str(place): item for place, item in enumerate(value)} if isinstance(value, list) else value


def differing_modules(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The modules whose sha256 is another, in order."""
    return [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]


def differing_keys(then: Any, now: Any, key: str = "") -> list[str]:
    """`key: A -> B` for every value of a tree that is another; of lists of one length, item by item."""
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        then, now = _by_number(then), _by_number(now)
    if isinstance(then, dict) and isinstance(now, dict):
        keys = [*then, *(name for name in now if name not in then)]
        below = [differing_keys(then.get(name), now.get(name), f"{key}.{name}" if key else str(name)) for name in keys]
        return [line for lines in below for line in lines]
    return [] if then == now else [f"{key}: {spelled(then)} -> {spelled(now)}"]


def in_short(changes: Sequence[str], limit: int = 3) -> str:
    """The first few, each cut to a hundred characters, and how many more."""
    more = f" and {len(changes) - limit} more" if len(changes) > limit else ""
    return ", ".join(shorten(change, 100, placeholder=" …") for change in changes[:limit]) + more
