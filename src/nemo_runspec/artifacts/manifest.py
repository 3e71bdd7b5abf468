"""A version as its files, and their manifest: a line a file, as `sha256sum -c manifest.sha256` reads it.

It covers the record (`artifact.json`), what is known of the run that made the version (`run/`: its config, metrics,
environment) and every file of the payload. The *payload digest* is the sha256 over the payload's lines alone, sorted by
name: the relative names and the contents of the files, and nothing else, so that the same content published twice,
elsewhere or by another run has the same digest.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

MANIFEST_FILE = "manifest.sha256"
RECORD_FILE = "artifact.json"
PAYLOAD_DIR = "payload"
RUN_DIR = "run"
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


def render_manifest(record_sha256: str, files: Mapping[str, str], run_files: Mapping[str, str]) -> str:
    """The manifest's text: the record first, then the run's files and the payload's, each sorted by name."""
    lines = [f"{record_sha256}  {RECORD_FILE}\n"]
    lines += [f"{run_files[name]}  {RUN_DIR}/{name}\n" for name in sorted(run_files)]
    lines += [f"{files[name]}  {PAYLOAD_DIR}/{name}\n" for name in sorted(files)]
    return "".join(lines)


@dataclass(frozen=True)
class Manifest:
    """sha256 of the record, of the payload's files and of the run's, both by relative name (without their folder)."""

    record: str
    files: dict[str, str]
    run_files: dict[str, str]


def parse_manifest(text: str) -> Manifest:
    """Read a manifest; ValueError if it is not one."""
    record: str | None = None
    below: dict[str, dict[str, str]] = {PAYLOAD_DIR: {}, RUN_DIR: {}}
    if not text.endswith("\n"):
        raise ValueError("the last line is cut off")
    for number, line in enumerate(text[:-1].split("\n"), start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number} is not '<sha256>  <file>'")
        sha256, name = match.groups()
        folder, _, inside = name.partition("/")
        if name == RECORD_FILE and record is None:
            record = sha256
        elif _is_below(inside) and inside not in below.get(folder, {inside}):
            below[folder][inside] = sha256
        else:
            raise ValueError(f"line {number} names '{name}', which has no place here")
    if record is None:
        raise ValueError(f"it has no line for {RECORD_FILE}")
    return Manifest(record, below[PAYLOAD_DIR], below[RUN_DIR])


def _is_below(name: str) -> bool:
    """Whether a name leads to a file in the folder that it is relative to, and is spelled in the one way it can be."""
    path = PurePosixPath(name)
    return bool(path.parts) and str(path) == name and not path.is_absolute() and ".." not in path.parts


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

    `files` maps the payload's file names to sha256, `size_bytes` is the sum of their sizes; `run_files` maps those of
    the run that made it. `directory` is where the version is on this machine; of a registry behind a URL, where `fetch`
    brings it.
    """

    name: str
    version: int
    directory: Path
    files: dict[str, str] = field(repr=False)
    run_files: dict[str, str] = field(repr=False)
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
