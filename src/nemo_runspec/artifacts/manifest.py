"""A version as its files, and their manifest: a line a file, as `sha256sum -c manifest.sha256` reads it.

It covers the record (`artifact.json`) and every file of the payload. The *payload digest* is the sha256 over the
payload's lines alone, sorted by name: the relative names and the contents of the files, and nothing else, so that the
same content published twice, elsewhere or by another run has the same digest.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MANIFEST_FILE = "manifest.sha256"
RECORD_FILE = "artifact.json"
PAYLOAD_DIR = "payload"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)")
_CHUNK = 1 << 20


def sha256_file(path: Path) -> str:
    """The sha256 of a file's content, as 64 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def copy_and_hash(source: Path, target: Path) -> str:
    """Copy a file's content in one pass, bring it to disk (fsync), and return its sha256."""
    sha = hashlib.sha256()
    with source.open("rb") as reader, target.open("xb") as writer:
        while chunk := reader.read(_CHUNK):
            sha.update(chunk)
            writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    return sha.hexdigest()


def payload_digest(files: Mapping[str, str]) -> str:
    """The digest of a payload given `relative name -> sha256` of its files (names with `/`, without `payload/`)."""
    lines = "".join(f"{files[name]}  {name}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def render_manifest(record_sha256: str, files: Mapping[str, str]) -> str:
    """The manifest's text: the record first, then the payload's files sorted by name."""
    lines = [f"{record_sha256}  {RECORD_FILE}\n"]
    lines += [f"{files[name]}  {PAYLOAD_DIR}/{name}\n" for name in sorted(files)]
    return "".join(lines)


def parse_manifest(text: str) -> tuple[str, dict[str, str]]:
    """Split a manifest into the record's sha256 and `relative payload name -> sha256`; ValueError if it is not one."""
    record_sha256: str | None = None
    files: dict[str, str] = {}
    if not text.endswith("\n"):
        raise ValueError("the last line is cut off")
    for number, line in enumerate(text[:-1].split("\n"), start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number} is not '<sha256>  <file>'")
        sha256, name = match.groups()
        if name == RECORD_FILE and record_sha256 is None:
            record_sha256 = sha256
        elif name.startswith(f"{PAYLOAD_DIR}/") and name[len(PAYLOAD_DIR) + 1 :] not in files:
            files[name[len(PAYLOAD_DIR) + 1 :]] = sha256
        else:
            raise ValueError(f"line {number} names '{name}', which has no place here")
    if record_sha256 is None:
        raise ValueError(f"it has no line for {RECORD_FILE}")
    return record_sha256, files


def list_files(directory: Path) -> list[str]:
    """Relative names (with `/`) of all files under `directory`, sorted. A link to a folder counts as a file."""
    names = []
    for folder, folders, files in os.walk(directory):
        here = Path(folder)
        links = [name for name in folders if (here / name).is_symlink()]
        names += [(here / name).relative_to(directory).as_posix() for name in (*files, *links)]
    return sorted(names)


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


def size_problems(where: str, size_bytes: int, version: StoredVersion) -> list[str]:
    """What to say where the files of a payload, all of them there, have another size together than was published."""
    if size_bytes == version.size_bytes:
        return []
    return [f"{where}: {size_bytes} bytes, {version.size_bytes} were published"]


def human_size(size_bytes: int) -> str:
    """A size with three significant digits in decimal units: 1234567 -> '1.23 MB'."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size_bytes} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
