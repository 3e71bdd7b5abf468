"""Versions on an object store, through fsspec: `<root>/<name>/<N>/{artifact.json, manifest.sha256, …}`.

An object store has no rename, but it can refuse to create an object that exists. A publisher therefore claims a number
by creating `<root>/.claims/<name>/<N>`, then uploads the payload, the run's files, the record, and last the manifest: a
version exists if and only if its manifest does. A claim is never given back, so a publisher that is killed leaves a
number without a version, and objects that nobody reads.

On this machine a registry has a mirror, laid out like a local one. A payload is fetched into it once; every file is
compared with its sha256 before it gets its final name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nemo_runspec.artifacts.aside import aside_directory
from nemo_runspec.artifacts.build import Draft, build_version
from nemo_runspec.artifacts.local_store import NUMBER
from nemo_runspec.artifacts.manifest import (
    MANIFEST_FILE,
    PAYLOAD_DIR,
    RECORD_FILE,
    StoredVersion,
    human_size,
    list_files,
    parse_manifest,
    sha256_file,
    size_problems,
)
from nemo_runspec.errors import RunFailed, RunspecError, UserError, first_line, nearest
from nemo_runspec.installation import STORE_CLIENTS, install_line
from nemo_runspec.words import counted

CLAIMS_DIR = ".claims"
_CREDENTIALS = "the client library looks for credentials in the environment and in its own files"
_THREADS = 8  # transfers at once
_LARGE = 64 << 20  # bytes; larger files are uploaded one at a time, since a client holds the parts under way in memory
# Error codes of S3 and its like where an object exists already, or another request is creating it.
_REFUSED = ("PreconditionFailed", "ConditionalRequestConflict")
# Raised by bugs in this code, not by a store.
_BUGS = (TypeError, AttributeError, LookupError, AssertionError)


class FsspecStore:
    """A folder of versions behind a URL, and its mirror on this machine."""

    def __init__(self, root: str, cache: Path, place: tuple[Any, str] | None = None) -> None:
        """`root` as `parse_root` gives it; `cache` is the folder of the mirrors.

        `place`: the file system and the path in it, where fsspec does not know the URL.
        """
        self.root = root
        self.local_root = cache / hashlib.sha256(root.encode()).hexdigest()[:16]
        self.fs, self.path = place or _file_system(root)

    def names(self) -> list[str]:
        """The names that have at least one version, sorted."""
        names = sorted(name for name in self._list("") if not name.startswith("."))
        return [name for name, latest in zip(names, _in_threads(self.latest, names), strict=True) if latest]

    def versions(self, name: str) -> list[int]:
        """The version numbers of `name`, ascending; empty for an unknown name. One that is only claimed is none."""
        numbers = self._numbers(name)
        exist = _in_threads(lambda number: self.has(name, number), numbers)
        return [number for number, exists in zip(numbers, exist, strict=True) if exists]

    def latest(self, name: str) -> int | None:
        """The highest version number, None for an unknown name."""
        return next((number for number in reversed(self._numbers(name)) if self.has(name, number)), None)

    def has(self, name: str, number: int) -> bool:
        """Whether there is such a version."""
        with self._answering():
            try:
                self.fs.info(self._at(name, number, MANIFEST_FILE))
            except FileNotFoundError:
                return False
            return True

    def location(self, name: str, number: int, file: str = "") -> str:
        """The URL of a version, or of a file of it."""
        return f"{self.root}/{name}/{number}" + (f"/{file}" if file else "")

    def read(self, name: str, number: int, file: str) -> bytes:
        """The record or the manifest of a version; FileNotFoundError where it is missing."""
        with self._answering():
            try:
                return bytes(self.fs.cat_file(self._at(name, number, file)))
            except FileNotFoundError as error:
                raise FileNotFoundError(2, "no such object") from error

    def check_writable(self, names: Iterable[str] = ()) -> None:
        """Write a small object; RunFailed where that is refused."""
        with self._answering(missing="there is no such bucket"):
            self.fs.pipe_file(f"{self.path}/{CLAIMS_DIR}/.writable", f"{publisher_line()}\n".encode())

    def publish(self, name: str, draft: Draft) -> int:
        """Publish a version; its number. The mirror has it then, too."""
        with aside_directory(self.local_root) as directory:
            build_version(directory, name, draft)
            with self._answering(missing="there is no such bucket"):
                number = self._claim(name)
                self._upload(directory, name, number)
            self._keep(directory, name, number)
        return number

    def remove(self, name: str, number: int) -> None:
        """Remove a version: without its manifest there is none. Its claim stays, so its number is never given again."""
        with self._answering():
            self.fs.rm_file(self._at(name, number, MANIFEST_FILE))
            self.fs.rm(f"{self.path}/{name}/{number}", recursive=True)
        shutil.rmtree(self.local_root / name / str(number), ignore_errors=True)

    def fetch(self, version: StoredVersion, inside: str = "") -> None:
        """Bring the payload, or the files whose names begin with `inside`, to this machine; nothing that is here.

        Processes that fetch the same version at once wait for each other where the file system has locks. Where it has
        none they fetch it twice, and take nothing from each other unless they all find the version of another registry
        in its place. Raises UserError for an object that is missing or not what was published.
        """
        wanted = [name for name in version.files if name.startswith(inside)]
        if not self._missing(version, wanted):
            return
        try:
            with self._answering(missing=f"{version.ref} is no longer there"):
                self._fetch(version, wanted)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise RunFailed(f"{version.ref} was not fetched: {error.strerror or error}{where}") from error

    def _fetch(self, version: StoredVersion, wanted: list[str]) -> None:
        with self._lock(version.name, version.version):
            missing = self._missing(version, wanted)
            if not missing:
                return
            size = f", {human_size(version.size_bytes)}" if len(missing) == len(version.files) else ""
            files = counted(len(missing), "file")
            print(f"fetching {version.ref} ({files}{size}) from {self.root}", file=sys.stderr, flush=True)
            with aside_directory(self.local_root) as aside:
                self._mirror_record(version, aside)
                _in_threads(lambda name: self._fetch_file(version, name, aside), missing)

    def check_payload(self, version: StoredVersion) -> list[str]:
        """Bring the payload to this machine, read every byte of it there, and list what is not as it was published.

        What was damaged in the mirror is fetched again.
        """
        try:
            for _ in range(2):
                before = set(self._missing(version, list(version.files)))
                self.fetch(version)  # which compares what it fetches
                here = [name for name in version.files if name not in before]
                bad = [name for name, good in zip(here, _in_threads(_is_good(version), here), strict=True) if not good]
                if not bad:
                    break
                for name in bad:
                    (version.path / name).unlink(missing_ok=True)
        except UserError as error:
            return [error.message]
        for name in set(list_files(version.path)) - set(version.files):
            (version.path / name).unlink(missing_ok=True)  # a mirror holds what was published and nothing else
        return []

    def check_sizes(self, version: StoredVersion) -> list[str]:
        """List the objects of the payload that are gone, or the sizes that differ; one listing, nothing is read."""
        with self._answering():
            sizes = self._sizes(version)
        where = self.location(version.name, version.version, PAYLOAD_DIR)
        problems = [f"{where}/{name}: no such object" for name in version.files if name not in sizes]
        return problems or size_problems(where, sum(sizes[name] for name in version.files), version)

    def audit(self, version: StoredVersion) -> list[str]:
        """Read every byte of the payload where it is published, and list what is not as it was."""

        def problem(name: str) -> str | None:
            url = self.location(version.name, version.version, f"{PAYLOAD_DIR}/{name}")
            try:
                good = self._remote_sha256(self._payload(version, name)) == version.files[name]
            except FileNotFoundError:
                return f"{url}: no such object"
            return None if good else f"{url}: content differs from its sha256"

        with self._answering():
            problems = [line for line in _in_threads(problem, list(version.files)) if line]
            extra = sorted(self._sizes(version).keys() - version.files.keys())
        return problems + [
            f"{self.location(version.name, version.version, f'{PAYLOAD_DIR}/{name}')}: was not published with it"
            for name in extra
        ]

    def _sizes(self, version: StoredVersion) -> dict[str, int]:
        """Bytes of the payload's objects, by the names of the files."""
        folder = self._at(version.name, version.version, PAYLOAD_DIR)
        found = self.fs.find(folder, detail=True).items()
        return {str(path).split(f"{folder.lstrip('/')}/", 1)[-1]: int(info["size"]) for path, info in found}

    def _at(self, name: str, number: int, file: str) -> str:
        return f"{self.path}/{name}/{number}/{file}"

    def _payload(self, version: StoredVersion, name: str) -> str:
        return self._at(version.name, version.version, f"{PAYLOAD_DIR}/{name}")

    def _list(self, folder: str) -> list[str]:
        with self._answering():
            try:
                entries = self.fs.ls(f"{self.path}/{folder}".rstrip("/"), detail=True)
            except FileNotFoundError:
                return []
            return [str(entry["name"]).rstrip("/").rsplit("/", 1)[-1] for entry in entries]

    def _numbers(self, folder: str) -> list[int]:
        return sorted(int(entry) for entry in self._list(folder) if NUMBER.fullmatch(entry))

    def _claim(self, name: str) -> int:
        """A number for `name` that no other publisher has or will have."""
        taken = [*self._numbers(name), *self._numbers(f"{CLAIMS_DIR}/{name}")]
        number = max(taken, default=0) + 1
        while not self._create(f"{CLAIMS_DIR}/{name}/{number}"):
            number += 1
        # Stores that speak S3 are many, and some of them pass over the condition.
        if self._create(f"{CLAIMS_DIR}/{name}/{number}"):
            raise RunFailed(
                f"{self.root} creates an object that exists already: publishing there is not safe",
                "it takes a store with conditional writes (S3's If-None-Match)",
            )
        return number

    def _create(self, file: str) -> bool:
        """Create a small object; False where there is one of that name."""
        path, data = f"{self.path}/{file}", f"{publisher_line()}\n".encode()
        try:
            stream = self.fs.open(path, "xb")
        except FileExistsError:
            return False
        except (ValueError, NotImplementedError) as error:
            raise RunFailed(f"{self.root}: cannot publish there: {first_line(error)}") from error
        try:
            stream.write(data)
            stream.close()
        except Exception as error:
            stream.closed = True  # or its finalizer tries once more
            response = getattr(error.__cause__, "response", None) or {}
            if isinstance(error, FileExistsError) or response.get("Error", {}).get("Code") in _REFUSED:
                return False
            raise
        return True

    def _upload(self, directory: Path, name: str, number: int) -> None:
        def put(file: str) -> None:
            self.fs.put_file(str(directory / file), self._at(name, number, file))

        last = (RECORD_FILE, MANIFEST_FILE)
        sizes = {file: (directory / file).stat().st_size for file in list_files(directory) if file not in last}
        _in_threads(put, [file for file, size in sizes.items() if size < _LARGE])
        for file in (file for file, size in sizes.items() if size >= _LARGE):
            put(file)  # in parts, several at once
        for file in last:
            put(file)

    def _keep(self, directory: Path, name: str, number: int) -> None:
        """What was published from this machine need not be fetched."""
        with contextlib.suppress(OSError), self._lock(name, number):  # no room: it can be fetched
            self._put_in_place(directory, self.local_root / name / str(number))

    def _put_in_place(self, directory: Path, home: Path) -> None:
        """Rename a version that was built aside to its place in the mirror, unless that very version is there.

        A process that fetches it, or reads it, keeps its files. A version of the same number, of another registry that
        had this root before, is taken away.
        """
        files = _files_listed_in(directory)
        home.parent.mkdir(parents=True, exist_ok=True)
        if home.exists() and _files_listed_in(home) != files:
            with aside_directory(self.local_root) as old, contextlib.suppress(FileNotFoundError):
                home.rename(old / home.name)
        try:
            directory.rename(home)
        except OSError:  # a directory that holds something is not replaced
            if _files_listed_in(home) != files:
                raise

    def _mirrored(self, version: StoredVersion) -> bool:
        """Whether the mirror knows this very version: not none, and not one of the same number, of another registry."""
        return _files_listed_in(version.directory) == version.files

    def _missing(self, version: StoredVersion, wanted: list[str]) -> list[str]:
        """Those of the files `wanted` that the mirror lacks."""
        if not self._mirrored(version):
            return wanted
        return [name for name in wanted if not (version.path / name).is_file()]

    def _mirror_record(self, version: StoredVersion, aside: Path) -> None:
        """Bring record and manifest into the mirror, both at once, unless it has them."""
        if self._mirrored(version):
            return
        directory = aside / str(version.version)
        directory.mkdir()
        for file in (RECORD_FILE, MANIFEST_FILE):
            (directory / file).write_bytes(self.read(version.name, version.version, file))
        self._put_in_place(directory, version.directory)

    def _fetch_file(self, version: StoredVersion, name: str, aside: Path) -> None:
        url = self.location(version.name, version.version, f"{PAYLOAD_DIR}/{name}")
        for _ in range(2):  # once more for what was cut off on its way
            temporary = aside / secrets.token_hex(8)
            try:
                self.fs.get_file(self._payload(version, name), str(temporary))
            except FileNotFoundError:
                raise UserError(f"{url}: no such object") from None
            if sha256_file(temporary) == version.files[name]:
                (version.path / name).parent.mkdir(parents=True, exist_ok=True)
                temporary.replace(version.path / name)
                return
        raise UserError(f"{url}: content differs from its sha256")

    def _remote_sha256(self, path: str) -> str:
        with self.fs.open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    @contextlib.contextmanager
    def _lock(self, name: str, number: int) -> Iterator[None]:
        path = self.local_root / ".locks" / f"{name}.{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with contextlib.suppress(OSError):  # a file system without flock
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _answering(self, missing: str | None = None) -> Iterator[None]:
        """Make one line of what a client library raises. `missing`: what a FileNotFoundError means, where it is one."""
        try:
            yield
        except (RunspecError, *_BUGS):
            raise
        except FileNotFoundError as error:
            if missing is None:
                raise
            raise RunFailed(f"{self.root}: {missing}") from error
        except OSError as error:
            if error.filename is not None:  # of this machine: a full disk, a cache that cannot be written
                raise
            raise self._failure(error) from error
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> RunFailed:
        denied = isinstance(error, PermissionError) or "credential" in str(error).lower()
        return RunFailed(f"{self.root}: {first_line(error)}", _CREDENTIALS if denied else None)


def _file_system(root: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, without a cache of listings, and the path in it."""
    import fsspec

    scheme = root.partition("://")[0]
    try:
        file_system, path = fsspec.url_to_fs(root, use_listings_cache=False)
    except ImportError as error:
        client = STORE_CLIENTS.get(scheme)
        raise UserError(f"{root}: {first_line(error)}", install_line(client.extra) if client else None) from error
    except OSError as error:  # some connect at once
        raise UserError(f"{root}: {first_line(error)}") from error
    except ValueError as error:
        near = nearest(scheme, fsspec.available_protocols())
        raise UserError(f"{root}: {first_line(error)}", f"did you mean {near}://?" if near else None) from error
    return file_system, str(path).rstrip("/")


def _files_listed_in(directory: Path) -> dict[str, str] | None:
    """Payload file -> sha256, as the manifest in `directory` says; None where there is none that can be read."""
    try:
        return parse_manifest((directory / MANIFEST_FILE).read_text(encoding="utf-8")).files
    except (OSError, ValueError):
        return None


def _in_threads(do: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """`do` of every item, several at once, in order; the first error is raised when all that began have ended."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="artifacts") as pool:
        return list(pool.map(do, items))


def _is_good(version: StoredVersion) -> Callable[[str], bool]:
    def is_good(name: str) -> bool:
        try:
            return sha256_file(version.path / name) == version.files[name]
        except OSError:
            return False

    return is_good


def publisher_line() -> str:
    """A line that no other process writes."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return f"{socket.gethostname()} {os.getpid()} {now} {secrets.token_hex(8)}"
