"""Names and references of artifacts: `name`, `name:latest`, `name:3`, `name:3@digest`, each also after `art://`.

A record holds a path relative to a payload, never to a machine, so that a registry can be moved: `art://./train.jsonl`
lies in the payload of the version whose record says so, `art://name:3/train.jsonl` in another version's; any other path
(a user's own file) stands as it is, absolute.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_runspec.artifacts.manifest import PAYLOAD_DIR
from nemo_runspec.errors import UserError

SCHEME = "art://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION = re.compile(r"[1-9][0-9]*")
_HERE = f"{SCHEME}."
_THERE = re.compile(re.escape(SCHEME) + r"([A-Za-z0-9][A-Za-z0-9._-]*):([1-9][0-9]*)(?:/(.*))?")
_DIGEST = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True)
class Reference:
    """A parsed artifact reference. `version` None means the latest; `digest` is a sha256 or its first 8+ digits."""

    name: str
    version: int | None = None
    digest: str | None = None

    def __str__(self) -> str:
        version = "" if self.version is None else f":{self.version}"
        return f"{self.name}{version}" + (f"@{self.digest}" if self.digest else "")


def check_name(name: str) -> str:
    """Return `name` if an artifact may be called so, else raise UserError."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"bad artifact name '{name}'",
            "a name has 1 to 128 letters, digits, '.', '_' or '-', and starts with a letter or a digit",
        )
    return name


def parse_reference(text: str) -> Reference:
    """Parse `[art://]name[:N|:latest][@digest]`; raise UserError on anything else."""
    body, _, digest = text.removeprefix(SCHEME).partition("@")
    name, _, version = body.partition(":")
    bad_version = ":" in body and version != "latest" and not _VERSION.fullmatch(version)
    bad_digest = "@" in text and not _DIGEST.fullmatch(digest)
    if not _NAME.fullmatch(name) or bad_version or bad_digest:
        raise UserError(
            f"bad artifact reference '{text}'",
            "write name, name:latest, name:3 or name:3@<sha256, 8 digits or more>, with or without art:// before it",
        )
    return Reference(name, int(version) if version and version != "latest" else None, digest or None)


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
