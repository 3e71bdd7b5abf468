"""The file-backed artifact registry: `<root>/<name>/<N>/{artifact.json, manifest.sha256, payload/}`.

A version is built aside and renamed into its place in one step. The directory `<N>` is never empty, and renaming onto a
directory that is not empty fails, so the rename itself decides between processes that want the same number: no lock is
held over a publish, and one that is killed leaves either a whole version or none. `latest` is the highest number.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_runspec.artifacts.aside import ASIDE_DIR, aside_directory, fsync_directory
from nemo_runspec.artifacts.manifest import (
    MANIFEST_FILE,
    PAYLOAD_DIR,
    RECORD_FILE,
    copy_and_hash,
    list_files,
    parse_manifest,
    payload_digest,
    render_manifest,
    sha256_file,
)
from nemo_runspec.artifacts.naming import SCHEME, Reference, check_name, hint_for, parse_reference
from nemo_runspec.artifacts.paths import decode_path
from nemo_runspec.errors import RunFailed, UserError, nearest

RECORD_SCHEMA = 1
# What the registry itself writes into a record; a publisher's record may not have these keys.
OWN_KEYS = ("schema", "name", "digest", "num_files", "size_bytes")
_NUMBER = re.compile(r"[1-9][0-9]*")
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@dataclass(frozen=True)
class Version:
    """One published, immutable version.

    `record` is its `artifact.json`, with the paths in `record["fields"]` made absolute; `files` maps the payload's file
    names to sha256.
    """

    name: str
    version: int
    directory: Path
    record: dict[str, Any] = field(repr=False)
    files: dict[str, str] = field(repr=False)

    @property
    def path(self) -> Path:
        """The payload directory."""
        return self.directory / PAYLOAD_DIR

    @property
    def digest(self) -> str:
        """The payload digest, 64 hex digits: relative file names and contents only."""
        return str(self.record["digest"])

    @property
    def ref(self) -> str:
        """`name:3`, the identity."""
        return f"{self.name}:{self.version}"

    @property
    def uri(self) -> str:
        """`art://name:3`."""
        return SCHEME + self.ref

    @property
    def pinned(self) -> str:
        """`name:3@<payload digest>`, what a record lists as an input."""
        return f"{self.ref}@{self.digest}"


class Registry:
    """The artifacts under one root directory. Nothing is created before the first publish."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).expanduser().absolute()

    @classmethod
    def default(cls) -> Registry:
        """RUNSPEC_ARTIFACTS_ROOT, else `[artifacts] root` of env.toml, else `artifacts` in the output root."""
        from nemo_runspec.env import artifacts_root

        return cls(artifacts_root())

    def names(self) -> list[str]:
        """The names that have at least one version, sorted."""
        if not self.root.is_dir():
            return []
        names = (entry.name for entry in self.root.iterdir() if entry.name != ASIDE_DIR)
        return sorted(name for name in names if self.versions(name))

    def versions(self, name: str) -> list[int]:
        """The version numbers of `name`, ascending; empty for an unknown name."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(int(n) for n in os.listdir(self.root / name) if _NUMBER.fullmatch(n))  # noqa: PTH208
        return []

    def resolve(self, ref: str) -> Version:
        """The version that `ref` means, its record read and checked against the manifest (payload files are not read).

        Raises UserError for an unknown name or version (hint: the nearest name, the command that makes it), a digest
        that is not the version's, and a record or manifest that is not the one that was published.
        """
        reference, number = self._locate(ref)
        version = self._read(reference.name, number)
        if reference.digest and not version.digest.startswith(reference.digest):
            raise UserError(
                f"{version.ref} has digest {version.digest[:12]}, not {reference.digest[:12]} as '{ref}' says",
                "the version was replaced after the reference was written; refer to what is there now or make it again",
            )
        return version

    def resolve_verified(self, ref: str) -> Version:
        """As `resolve`, and every byte of the payload is read and compared; UserError names the first bad file."""
        version = self.resolve(ref)
        if problems := self._payload_problems(version):
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise UserError(f"artifact {version.ref} is corrupt: {problems[0]}{more}", _corrupt_hint(version.name))
        return version

    def verify(self, ref: str) -> list[str]:
        """Read every byte of a version and list what is not as it was published; an empty list means sound.

        Raises UserError only when there is no such name or version.
        """
        reference, number = self._locate(ref)
        try:
            version = self.resolve(f"{reference.name}:{number}" + (f"@{reference.digest}" if reference.digest else ""))
        except UserError as error:
            return [error.message]
        return self._payload_problems(version)

    def find_published(self, name: str, fingerprint: str) -> Version | None:
        """The newest version of `name` whose producer had this fingerprint, or None; unreadable ones are passed."""
        for number in reversed(self.versions(name)):
            with contextlib.suppress(UserError):
                version = self._read(name, number)
                producer = version.record.get("producer")
                if isinstance(producer, dict) and producer.get("fingerprint") == fingerprint:
                    return version
        return None

    def publish(self, name: str, source: Path | str, record: Mapping[str, Any], *, move: bool = False) -> Version:
        """Publish a file or a directory as the next version of `name`, and return that version.

        Args:
            source: what becomes the payload. Links to files become files, links to folders are refused, and empty
                folders are dropped.
            record: JSON content of the record (type, fields, metrics, producer, inputs, …), without the keys OWN_KEYS.
            move: hard-link the files instead of copying them and remove `source` after the version stands.

        Safe beside other publishers of the same name and under kill -9: a version is there whole or not at all. Raises
        UserError for a bad name, record or source, RunFailed when the disk is full or not writable; then nothing is
        published, and nothing left aside.
        """
        check_name(name)
        source = Path(source).absolute()
        names = self._check_source(source, move)
        if clash := sorted(set(record) & set(OWN_KEYS)):
            raise UserError(f"the record of {name} has the key '{clash[0]}', which the registry itself writes")
        try:
            with aside_directory(self.root) as directory:
                self._build(directory, name, source, names, record, move)
                number = self._rename_to_next(directory, self.root / name)
        except OSError as error:
            raise _publish_failure(name, self.root, error) from error
        if move and source.is_dir():
            shutil.rmtree(source, ignore_errors=True)
        elif move:
            source.unlink(missing_ok=True)
        return self._read(name, number)

    def _check_source(self, source: Path, move: bool) -> list[str]:
        if not source.exists():
            raise UserError(f"nothing to publish: {source} does not exist")
        if move and (source.is_relative_to(self.root) or self.root.is_relative_to(source)):
            raise UserError(f"cannot move {source} into the registry at {self.root}: one lies in the other; copy it")
        if self.root.is_relative_to(source):
            raise UserError(f"cannot publish {source}: the registry {self.root} lies in it")
        names = [source.name] if source.is_file() else list_files(source)
        if not names:
            raise UserError(f"nothing to publish: {source} holds no file")
        for name in names:
            if not name.isprintable() or "\\" in name:
                raise UserError(f"cannot publish a file called {name!r}", "no control characters, no backslashes")
            if not (source if source.is_file() else source / name).is_file():
                raise UserError(f"cannot publish {source / name}: it is not a file, nor a link to one")
        return names

    def _build(
        self, directory: Path, name: str, source: Path, names: list[str], record: Mapping[str, Any], move: bool
    ) -> None:
        """Fill `directory` with payload, record and manifest, all on disk when this returns."""
        payload = directory / PAYLOAD_DIR
        payload.mkdir()
        files: dict[str, str] = {}
        for file_name in names:
            origin = source if source.is_file() else source / file_name
            target = payload / file_name
            target.parent.mkdir(parents=True, exist_ok=True)
            files[file_name] = _link_and_hash(origin, target) if move else copy_and_hash(origin, target)
        full = {"schema": RECORD_SCHEMA, "name": name, "digest": payload_digest(files), "num_files": len(files)}
        full["size_bytes"] = sum((payload / file_name).stat().st_size for file_name in files)
        try:
            text = json.dumps({**full, **record}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise UserError(f"the record of {name} is not JSON: {error}") from error
        record_sha256 = hashlib.sha256(text.encode()).hexdigest()
        _write_synced(directory / RECORD_FILE, text)
        _write_synced(directory / MANIFEST_FILE, render_manifest(record_sha256, files))
        for folder, _, _ in os.walk(directory):
            fsync_directory(Path(folder))

    def _rename_to_next(self, directory: Path, home: Path) -> int:
        """Give the finished `directory` the next free number under `home`; the rename fails where a number is taken."""
        home.mkdir(parents=True, exist_ok=True)
        while True:
            number = max(self.versions(home.name), default=0) + 1
            try:
                directory.rename(home / str(number))
            except OSError as error:
                if error.errno not in _OCCUPIED:
                    raise
                continue
            # The version stands, whatever the disk says about remembering the rename.
            with contextlib.suppress(OSError):
                fsync_directory(home)
                fsync_directory(self.root)
            return number

    def _locate(self, ref: str) -> tuple[Reference, int]:
        reference = parse_reference(ref)
        versions = self.versions(reference.name)
        if not versions:
            raise self._unknown(reference.name)
        if reference.version is not None and reference.version not in versions:
            span = f"1 to {versions[-1]}" if len(versions) == versions[-1] else ", ".join(map(str, versions[-10:]))
            raise UserError(f"artifact {reference.name} has no version {reference.version}", f"there is {span}")
        return reference, reference.version or versions[-1]

    def _unknown(self, name: str) -> UserError:
        near = nearest(name, self.names())
        command = hint_for(name)
        hints = [f"did you mean {near}?"] if near else []
        hints += [f"{'if not, ' if near else ''}make it: {command}"] if command else []
        return UserError(f"no artifact '{name}' in {self.root}", " ".join(hints) or None)

    def _read(self, name: str, number: int) -> Version:
        """Read record and manifest of a version, and refuse with an explanation what was not written by `publish`."""
        directory = self.root / name / str(number)
        record_path, manifest_path = directory / RECORD_FILE, directory / MANIFEST_FILE
        bad = manifest_path
        try:
            record_sha256, files = parse_manifest(manifest_path.read_text(encoding="utf-8"))
            bad = record_path
            data = record_path.read_bytes()
            if hashlib.sha256(data).hexdigest() != record_sha256:
                raise ValueError(f"its sha256 is not the one in {MANIFEST_FILE}")
            record = json.loads(data)
            bad = manifest_path
            if not isinstance(record, dict) or record.get("digest") != payload_digest(files):
                raise ValueError(f"its files do not give the digest in {RECORD_FILE}")
        except (OSError, ValueError) as error:  # JSON and unicode errors are ValueErrors
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"artifact {name}:{number} is corrupt: {bad}: {reason}", _corrupt_hint(name)) from error
        if record.get("schema") != RECORD_SCHEMA or record.get("name") != name:
            raise UserError(
                f"{record_path} says schema {record.get('schema')!r} and name {record.get('name')!r}",
                f"expected schema {RECORD_SCHEMA} and name '{name}'; versions are not to be renamed by hand",
            )
        if isinstance(fields := record.get("fields"), dict):
            record["fields"] = {key: decode_path(value, directory / PAYLOAD_DIR) for key, value in fields.items()}
        return Version(name, number, directory, record, files)

    def _payload_problems(self, version: Version) -> list[str]:
        problems = []
        for name, sha256 in version.files.items():
            path = version.path / name
            try:
                if sha256_file(path) != sha256:
                    problems.append(f"{path}: content differs from its sha256")
            except OSError as error:
                problems.append(f"{path}: {error.strerror}")
        extra = set(list_files(version.path)) - set(version.files)
        return problems + [f"{version.path / name}: was not published with it" for name in sorted(extra)]


def _corrupt_hint(name: str) -> str:
    command = hint_for(name)
    return f"make it again: {command} --force" if command else "publish it again; the next version takes its place"


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


def _write_synced(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8", newline="") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _publish_failure(name: str, root: Path, error: OSError) -> RunFailed:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunFailed(
            f"no space left on device: {name} was not published to {root}", "free some space and run it again"
        )
    where = f" ({error.filename})" if error.filename else ""
    return RunFailed(f"{name} was not published to {root}: {error.strerror or error}{where}")
