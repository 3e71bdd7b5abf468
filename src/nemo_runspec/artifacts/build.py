"""A version as a directory on this machine, built aside before anybody else can see it: payload, run, record, manifest.

Both kinds of store begin with it: the local one renames it into its place, the other one uploads it. What is published
is this copy, so that a source that changes meanwhile changes nothing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_runspec.artifacts.aside import fsync_directory
from nemo_runspec.artifacts.manifest import (
    MANIFEST_FILE,
    PAYLOAD_DIR,
    RECORD_FILE,
    RUN_DIR,
    copy_and_hash,
    list_files,
    payload_digest,
    render_manifest,
    sha256_file,
)
from nemo_runspec.errors import UserError

RECORD_SCHEMA = 1
# What the registry itself writes into a record; a publisher's record may not have these keys.
OWN_KEYS = ("schema", "name", "digest", "num_files", "size_bytes")


def check_source(source: Path, root: Path, move: bool) -> list[str]:
    """The names of the files that `source` would bring into the registry whose files lie under `root`.

    Raises UserError for what cannot be published: nothing, a pipe, a link to a folder, the registry itself.
    """
    if not source.exists():
        raise UserError(f"nothing to publish: {source} does not exist")
    if move and (source.is_relative_to(root) or root.is_relative_to(source)):
        raise UserError(f"cannot move {source} into the registry at {root}: one lies in the other; copy it")
    if root.is_relative_to(source):
        raise UserError(f"cannot publish {source}: the registry {root} lies in it")
    names = [source.name] if source.is_file() else list_files(source)
    if not names:
        raise UserError(f"nothing to publish: {source} holds no file")
    for name in names:
        if not name.isprintable() or "\\" in name:
            raise UserError(f"cannot publish a file called {name!r}", "no control characters, no backslashes")
        if not (source if source.is_file() else source / name).is_file():
            raise UserError(f"cannot publish {source / name}: it is not a file, nor a link to one")
    return names


@dataclass(frozen=True)
class Draft:
    """What is to become a version: the files `names` of `source`, the record, and what is known of the run.

    `move`: hard-link the files instead of copying them. `run_files`: contents by file name.
    """

    source: Path
    names: list[str]
    record: Mapping[str, Any]
    run_files: Mapping[str, bytes]
    move: bool = False

    def origin(self, name: str) -> Path:
        """Where a file of the payload is now."""
        return self.source if self.source.is_file() else self.source / name


def build_version(directory: Path, name: str, draft: Draft) -> None:
    """Fill `directory` with payload, run, record and manifest, all on disk when this returns."""
    payload = directory / PAYLOAD_DIR
    payload.mkdir()
    files: dict[str, str] = {}
    for file_name in draft.names:
        origin, target = draft.origin(file_name), payload / file_name
        target.parent.mkdir(parents=True, exist_ok=True)
        files[file_name] = _link_and_hash(origin, target) if draft.move else copy_and_hash(origin, target)
    full = {"schema": RECORD_SCHEMA, "name": name, "digest": payload_digest(files), "num_files": len(files)}
    full["size_bytes"] = sum((payload / file_name).stat().st_size for file_name in files)
    try:
        text = json.dumps({**full, **draft.record}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        if not _is_utf8(text):  # the name of a file that is not, which JSON can spell
            text = json.dumps({**full, **draft.record}, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise UserError(f"the record of {name} is not JSON: {error}") from error
    if draft.run_files:
        (directory / RUN_DIR).mkdir()
    run_files = {
        file_name: _write_synced(directory / RUN_DIR / file_name, content)
        for file_name, content in draft.run_files.items()
    }
    record_sha256 = _write_synced(directory / RECORD_FILE, text.encode())
    _write_synced(directory / MANIFEST_FILE, render_manifest(record_sha256, files, run_files).encode())
    for folder, _, _ in os.walk(directory):
        fsync_directory(Path(folder))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _link_and_hash(source: Path, target: Path) -> str:
    """Hard-link a regular file and return its sha256; copy where that is not possible (other disk, symbolic link)."""
    if source.is_symlink():
        return copy_and_hash(source, target)
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        return copy_and_hash(source, target)
    with target.open("rb") as stream:
        os.fsync(stream.fileno())
    return sha256_file(target)


def _write_synced(path: Path, content: bytes) -> str:
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return hashlib.sha256(content).hexdigest()
