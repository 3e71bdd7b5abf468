"""How a record holds a path, so that a registry can be moved: relative to a payload, never to a machine.

`art://./train.jsonl` lies in the payload of the version whose record says so, `art://name:3/train.jsonl` in another
version's; any other path (a user's own file) stands as it is, absolute.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from nemo_runspec.artifacts.manifest import PAYLOAD_DIR
from nemo_runspec.artifacts.naming import SCHEME

_HERE = f"{SCHEME}."
_THERE = re.compile(re.escape(SCHEME) + r"([A-Za-z0-9][A-Za-z0-9._-]*):([1-9][0-9]*)(?:/(.*))?")


def encode_path(path: Path, base: Path, root: Path) -> str:
    """The text for `path` in a record: `base` is (or becomes) the record's own payload, `root` the registry's root."""
    path, base = path.absolute(), base.absolute()
    if not path.is_relative_to(base) and path.resolve().is_relative_to(base.resolve()):
        path, base = path.resolve(), base.resolve()  # one of them was written through a link
    if path.is_relative_to(base):
        inside = path.relative_to(base).as_posix()
        return _HERE if inside == "." else f"{_HERE}/{inside}"
    if path.is_relative_to(root):
        parts = path.relative_to(root).parts
        if len(parts) >= 3 and parts[2] == PAYLOAD_DIR:
            return "/".join([f"{SCHEME}{parts[0]}:{parts[1]}", *parts[3:]])
    return str(path)


def decode_path(value: Any, payload: Path) -> Any:
    """The absolute path for what `encode_path` wrote into the record of the version with this payload directory.

    Any other value comes back as it is.
    """
    if not isinstance(value, str) or not value.startswith(SCHEME):
        return value
    if value == _HERE or value.startswith(f"{_HERE}/"):
        return str(payload / value[len(_HERE) + 1 :])
    if match := _THERE.fullmatch(value):
        name, version, inside = match.groups()
        return str(payload.parents[2] / name / version / PAYLOAD_DIR / (inside or ""))
    return value
