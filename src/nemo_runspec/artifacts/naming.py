"""Names and references of artifacts: `name`, `name:latest`, `name:3`, `name:3@digest`, each also after `art://`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nemo_runspec.errors import UserError

SCHEME = "art://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION = re.compile(r"[1-9][0-9]*")
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
