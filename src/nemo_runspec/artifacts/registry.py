"""The artifact registry: names, numbered versions, each immutable, with a record and a sha256 of every file.

The registry is the same wherever it lies; how versions get there and are read is the business of its store:
`local_store` for a folder, `fsspec_store` for a URL, `wandb_store` for a W&B project. `latest` is the highest number.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_runspec.artifacts.build import OWN_KEYS, RECORD_SCHEMA, Draft, check_source
from nemo_runspec.artifacts.local_store import LocalStore, unreadable
from nemo_runspec.artifacts.manifest import (
    MANIFEST_FILE,
    PAYLOAD_DIR,
    RECORD_FILE,
    RUN_DIR,
    StoredVersion,
    parse_manifest,
    payload_digest,
    sha256_file,
)
from nemo_runspec.artifacts.naming import SCHEME, Reference, check_name, decode_path, parse_reference
from nemo_runspec.artifacts.pins import leave_published
from nemo_runspec.env.roots import artifacts_root, cache_folder, parse_root
from nemo_runspec.errors import ArtifactError, RunFailed, UserError, nearest

if TYPE_CHECKING:
    from nemo_runspec.artifacts.fsspec_store import FsspecStore


@dataclass(frozen=True)
class Version(StoredVersion):
    """One published, immutable version.

    `record` is its `artifact.json`, with the paths in `record["fields"]` made absolute.
    """

    record: dict[str, Any] = field(repr=False)
    registry: Registry = field(repr=False, compare=False)

    @property
    def location(self) -> str:
        """Where the payload is published: a path, or a URL."""
        return self.registry.store.location(self.name, self.version, PAYLOAD_DIR)

    def fetch(self, inside: str = "") -> Path:
        """Bring the payload, or what of it begins with `inside`, to this machine; the payload directory.

        What is here already is neither fetched nor read again (see `Registry.resolve_verified` for that). Raises
        UserError for an object that is missing or not what was published.
        """
        self.registry.store.fetch(self, inside)
        if not inside:
            self.registry.fetch_others(self)
        return self.path

    def run_file(self, name: str) -> str | None:
        """What was published with it of the run that made it (`config.yaml`, `metrics.jsonl`); None where it was not.

        UserError for a file that is not as it was published.
        """
        if name not in self.run_files:
            return None
        store, file = self.registry.store, f"{RUN_DIR}/{name}"
        where = store.location(self.name, self.version, file)
        try:
            content = store.read(self.name, self.version, file)
        except OSError as error:
            raise unreadable(where, error) from None
        if hashlib.sha256(content).hexdigest() != self.run_files[name]:
            raise UserError(f"{where}: content differs from its sha256")
        return content.decode()

    @property
    def digest(self) -> str:
        """The payload digest, 64 hex digits: relative file names and contents only."""
        return str(self.record["digest"])

    @property
    def uri(self) -> str:
        """`art://name:3`."""
        return SCHEME + self.ref

    @property
    def pinned(self) -> str:
        """`name:3@<payload digest>`, what a record lists as an input."""
        return f"{self.ref}@{self.digest}"


class Registry:
    """The artifacts under one root: a directory, or a URL. Nothing is created before the first publish.

    `local_root` is where versions lie on this machine: the root itself, or the mirror of a registry behind a URL.
    """

    def __init__(self, root: Path | str) -> None:
        """Raises UserError for a URL with a password in it, of an unknown kind, or whose client is not installed."""
        place = parse_root(root)
        self.root = place
        self.store: LocalStore | FsspecStore
        if isinstance(place, Path):
            self.store = LocalStore(place)
        elif place.startswith("wandb://"):
            from nemo_runspec.artifacts.wandb_store import WandbStore

            self.store = WandbStore(place, cache_folder())
        else:
            from nemo_runspec.artifacts.fsspec_store import FsspecStore

            self.store = FsspecStore(place, cache_folder())
        self.local_root = self.store.local_root

    @classmethod
    def default(cls) -> Registry:
        """RUNSPEC_ARTIFACTS_ROOT, else `[artifacts] root` of env.toml, else `artifacts` in the output root."""
        return cls(artifacts_root())

    @property
    def is_remote(self) -> bool:
        """Whether payloads have to be fetched."""
        return not isinstance(self.root, Path)

    def names(self) -> list[str]:
        """The names that have at least one version, or whose folder may not be read, sorted.

        UserError where the registry's own folder may not be read.
        """
        return self.store.names()

    def versions(self, name: str) -> list[int]:
        """The version numbers of `name`, ascending; empty for an unknown name. UserError for an unreadable folder."""
        return self.store.versions(name)

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
        """As `resolve`, and every byte of the payload is read and compared; UserError names the first bad file.

        A payload behind a URL is fetched first.
        """
        version = self.resolve(ref)
        self._refuse(version, self.store.check_payload(version))
        self.fetch_others(version)
        return version

    def check_present(self, version: Version) -> None:
        """UserError where a file of the payload is gone or the sizes differ, as published; no byte of it is read."""
        self._refuse(version, self.store.check_sizes(version))

    def check_read(self, version: Version) -> None:
        """As `check_present`, and on this machine every byte is compared; behind a URL that takes fetching it."""
        self._refuse(version, self.store.check_sizes(version) if self.is_remote else self.store.check_payload(version))

    def version_at(self, path: Path) -> Version:
        """The version in whose directory, under `local_root`, `path` lies; UserError when it lies in none."""
        parts = path.relative_to(self.local_root).parts
        if len(parts) < 2:
            raise UserError(f"{path} is not in a published artifact")
        return self.resolve(f"{parts[0]}:{parts[1]}")

    def check_known(self, ref: str) -> None:
        """UserError where there is no such name or version; nothing of it is read."""
        self._locate(ref)

    def verify(self, ref: str) -> list[str]:
        """Read every byte of a version and list what is not as it was published; an empty list means sound.

        What is read is what others would get: behind a URL the objects, not the copy of them on this machine.

        Raises UserError only when there is no such name or version.
        """
        reference, number = self._locate(ref)
        try:
            version = self.resolve(f"{reference.name}:{number}" + (f"@{reference.digest}" if reference.digest else ""))
        except UserError as error:
            return [error.message]
        problems = self.store.audit(version)
        for name in version.run_files:
            try:
                version.run_file(name)
            except UserError as error:
                problems.append(error.message)
        return problems

    def remove(self, ref: str) -> None:
        """Remove the version `name:3`; its number is never given again. RunFailed where that is refused."""
        reference, number = self._locate(ref)
        try:
            self.store.remove(reference.name, number)
        except OSError as error:
            raise RunFailed(f"{ref} was not removed: {error.strerror or error}") from error

    def find_published(self, name: str, fingerprint: str) -> Version | None:
        """The newest version of `name` whose producer had this fingerprint, or None; unreadable ones are passed."""
        return self._newest_by(name, "fingerprint", fingerprint)

    def _newest_by(self, name: str, key: str, value: str) -> Version | None:
        """The newest version of `name` whose record has `value` under this key of its producer."""
        for version in self.readable(name):
            producer = version.record.get("producer")
            if isinstance(producer, dict) and producer.get(key) == value:
                return version
        return None

    def readable(self, name: str) -> Iterator[Version]:
        """The versions of `name` whose record can be read, the newest first."""
        for number in reversed(self.versions(name)):
            with contextlib.suppress(UserError):
                yield self._read(name, number)

    def publish(
        self,
        name: str,
        source: Path | str,
        record: Mapping[str, Any],
        *,
        move: bool = False,
        run_files: Mapping[str, bytes] | None = None,
        once: bool = False,
    ) -> Version:
        """Publish a file or a directory as the next version of `name`, and return that version.

        Args:
            source: what becomes the payload. Links to files become files, links to folders are refused, and empty
                folders are dropped.
            record: JSON content of the record (type, fields, metrics, producer, inputs, …), without the keys OWN_KEYS.
            move: hard-link the files instead of copying them and remove `source` after the version stands.
            run_files: what is to stand beside the payload of the run that makes it, by file name.
            once: for a run that goes on: return the version that it published before it was stopped, if there is one:
                that of the same `record["producer"]["run"]` with the same payload, and sound.

        Safe beside other publishers of the same name and under kill -9: a version is there whole or not at all. Raises
        UserError for a bad name, record or source, RunFailed when the disk is full or not writable, or the store does
        not answer; then nothing is published, and on this machine nothing left aside.
        """
        check_name(name)
        source = Path(source).absolute()
        names = check_source(source, self.local_root, move)
        if clash := sorted(set(record) & set(OWN_KEYS)):
            raise UserError(f"the record of {name} has the key '{clash[0]}', which the registry itself writes")
        draft = Draft(source, names, record, run_files or {}, move)
        version = self._published_before(name, draft) if once else None
        if version is None:
            try:
                version = self._read(name, self.store.publish(name, draft))
            except OSError as error:
                raise _publish_failure(name, str(self.root), error) from error
        if move and source.is_dir():
            shutil.rmtree(source, ignore_errors=True)
        elif move:
            source.unlink(missing_ok=True)
        leave_published(name, version.pinned)
        return version

    def _published_before(self, name: str, draft: Draft) -> Version | None:
        run = draft.record.get("producer", {}).get("run")
        version = self._newest_by(name, "run", run) if run else None
        if version is None or set(version.files) != set(draft.names):
            return None
        if any(sha256_file(draft.origin(file)) != sha256 for file, sha256 in version.files.items()):
            return None
        with contextlib.suppress(UserError):
            return self.resolve_verified(version.ref)
        return None

    def check_writable(self, names: Iterable[str] = ()) -> None:
        """UserError where nothing can be published, or no version of `names`: better before the work than after it."""
        try:
            self.store.check_writable(names)
        except OSError as error:
            raise UserError(f"{self.root}: artifacts cannot be published there: {error.strerror or error}") from error
        except RunFailed as error:
            message = error.message.removeprefix(f"{self.root}: ")
            raise UserError(f"{self.root}: artifacts cannot be published there: {message}", error.hint) from error

    @staticmethod
    def _refuse(version: Version, problems: list[str]) -> None:
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise _corrupt(version.name, f"artifact {version.ref} is corrupt: {problems[0]}{more}")

    def _locate(self, ref: str) -> tuple[Reference, int]:
        reference = parse_reference(ref)
        if reference.version is None:
            latest = self.store.latest(reference.name)
            if latest is None:
                raise self._unknown(reference.name)
            return reference, latest
        if not self.store.has(reference.name, reference.version):
            versions = self.versions(reference.name)
            if not versions:
                raise self._unknown(reference.name)
            whole = len(versions) == versions[-1] > 1
            span = f"1 to {versions[-1]}" if whole else ", ".join(map(str, versions[-10:]))
            raise UserError(f"artifact {reference.name} has no version {reference.version}", f"there is {span}")
        return reference, reference.version

    def _unknown(self, name: str) -> ArtifactError:
        near = nearest(name, self.names())
        return ArtifactError(f"no artifact '{name}' in {self.root}", f"did you mean {near}?" if near else None, name)

    def _read(self, name: str, number: int) -> Version:
        """Read record and manifest of a version, and refuse with an explanation what was not written by `publish`."""
        store, bad = self.store, MANIFEST_FILE
        try:
            manifest = parse_manifest(store.read(name, number, MANIFEST_FILE).decode())
            bad = RECORD_FILE
            data = store.read(name, number, RECORD_FILE)
            if hashlib.sha256(data).hexdigest() != manifest.record:
                raise ValueError(f"its sha256 is not the one in {MANIFEST_FILE}")
            record = json.loads(data)
            bad = MANIFEST_FILE
            if not isinstance(record, dict) or record.get("digest") != payload_digest(manifest.files):
                raise ValueError(f"its files do not give the digest in {RECORD_FILE}")
        except (OSError, ValueError) as error:  # JSON and unicode errors are ValueErrors
            where = store.location(name, number, bad)
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise unreadable(where, error) from None
            reason = error.strerror if isinstance(error, OSError) else error
            raise _corrupt(name, f"artifact {name}:{number} is corrupt: {where}: {reason}") from error
        if record.get("schema") != RECORD_SCHEMA or record.get("name") != name:
            where = store.location(name, number, RECORD_FILE)
            raise UserError(
                f"{where} says schema {record.get('schema')!r} and name {record.get('name')!r}",
                f"expected schema {RECORD_SCHEMA} and name '{name}'; versions are not to be renamed by hand",
            )
        directory = self.local_root / name / str(number)
        if isinstance(fields := record.get("fields"), dict):
            record["fields"] = {key: decode_path(value, directory / PAYLOAD_DIR) for key, value in fields.items()}
        size = record["size_bytes"]
        return Version(name, number, directory, manifest.files, manifest.run_files, size, record, self)

    def fetch_others(self, version: Version) -> None:
        """Fetch what the fields of a record name inside other payloads (the tokenizer that lies with the data, say).

        A whole other payload is fetched when somebody loads it: the data that a model was trained on may be large.
        """
        if not self.is_remote or not isinstance(fields := version.record.get("fields"), dict):
            return
        for value in fields.values():
            if not isinstance(value, str) or not Path(value).is_relative_to(self.local_root):
                continue
            path = Path(value)
            parts = path.relative_to(self.local_root).parts
            if len(parts) > 3 and not path.is_relative_to(version.directory):
                with contextlib.suppress(UserError):  # deleted since: who opens the path will see
                    self.store.fetch(self.resolve(f"{parts[0]}:{parts[1]}"), "/".join(parts[3:]))


def _corrupt(name: str, message: str) -> ArtifactError:
    return ArtifactError(message, "publish it again; the next version takes its place", name, corrupt=True)


def _publish_failure(name: str, root: str, error: OSError) -> RunFailed:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunFailed(
            f"no space left on device: {name} was not published to {root}", "free some space and run it again"
        )
    where = f" ({error.filename})" if error.filename else ""
    return RunFailed(f"{name} was not published to {root}: {error.strerror or error}{where}")
