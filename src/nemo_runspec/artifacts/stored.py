"""What a store needs to know of a version: which one it is, where it lies on this machine, and what its files are."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from nemo_runspec.artifacts.manifest import PAYLOAD_DIR


@dataclass(frozen=True)
class StoredVersion:
    """A published version as its files.

    `files` maps the payload's file names to sha256, `size_bytes` is their sum. `directory` is where the version is on
    this machine; of a registry behind a URL, where `fetch` brings it.
    """

    name: str
    version: int
    directory: Path
    files: dict[str, str] = field(repr=False)
    size_bytes: int = field(repr=False)

    @property
    def path(self) -> Path:
        """The payload directory on this machine."""
        return self.directory / PAYLOAD_DIR

    @property
    def ref(self) -> str:
        """`name:3`, the identity."""
        return f"{self.name}:{self.version}"


def human_size(size_bytes: int) -> str:
    """A size with three significant digits in decimal units: 1234567 -> '1.23 MB'."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size_bytes} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
