"""Objects of S3 and of Google Cloud Storage, through fsspec with s3fs and gcsfs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from glob import has_magic
from typing import Any

from nemo_runspec.errors import RunFailed, RunspecError, UserError, nearest
from nemo_runspec.installation import install_line
from nemotron.data_prep.sources.files import SourceFile, reason_of, redact
from nemotron.data_prep.sources.ranges import BUGS, StoredObject, changed_error

CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; FSSPEC_S3_ANON=1 for a public bucket",
    "gs": "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS; FSSPEC_GS_TOKEN=anon for a public "
    "bucket",
}


def _file_system(uri: str) -> tuple[Any, str]:
    """The file system of an address, without a cache of listings, and the path in it."""
    import fsspec

    scheme = uri.partition("://")[0]
    try:
        file_system = fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        raise UserError(f"{redact(uri)}: {reason_of(error)}", install_line(scheme)) from error
    return file_system, uri.partition("://")[2]


def find_in_store(location: str) -> list[StoredObject]:
    """The objects that an address stands for, in the order of their names."""
    with _answering(location, UserError):
        return sorted(_objects_at(location))


def _objects_at(location: str) -> list[StoredObject]:
    scheme = location.partition("://")[0]
    file_system, path = _file_system(location)
    if not path.strip("/"):
        raise UserError(f"{location}: no bucket is named", f"{scheme}://BUCKET/KEY")
    if has_magic(path.partition("/")[0]):
        raise UserError(f"{location}: the name of a bucket cannot be a glob", f"{scheme}://BUCKET/KEY")
    entries: list[dict[str, Any]] = []
    if has_magic(path):
        entries = [entry for entry in file_system.glob(path, detail=True).values() if entry["type"] == "file"]
    if not entries:
        try:
            info = file_system.info(path)
        except FileNotFoundError:
            if has_magic(path):
                raise UserError(f"no file matches {location}") from None
            raise UserError(f"no such file: {location}", _near(file_system, path, scheme)) from None
        entries = [info] if info["type"] == "file" else list(file_system.find(path, detail=True).values())
    # Browsers of object stores make empty objects whose names end with a slash, to show folders.
    files = [entry for entry in entries if entry["type"] == "file" and not entry["name"].endswith("/")]
    if not files:
        raise UserError(f"no file in {location}")
    return [
        StoredObject(f"{scheme}://{file['name']}", int(file["size"]), _store_version(scheme, file)) for file in files
    ]


def _store_version(scheme: str, entry: dict[str, Any]) -> str:
    return str(entry["ETag"]).strip('"') if scheme == "s3" else str(entry["generation"])


def _near(file_system: Any, path: str, scheme: str) -> str | None:
    """The hint for a path that does not exist: the nearest name in its folder, where that can be listed."""
    folder, _, name = path.rstrip("/").rpartition("/")
    try:
        siblings = [str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in file_system.ls(folder, detail=False)]
    except Exception:  # a hint is not worth an error of its own
        return None
    near = nearest(name, siblings)
    return f"did you mean {scheme}://{folder}/{near}?" if near else None


def store_fetch(file: SourceFile) -> Callable[[int, int], bytes]:
    """`fetch(begin, end)` of an object, which has to be the version that was listed."""
    with _answering(file.uri, RunFailed):
        return _fetch_of(file)


def _fetch_of(file: SourceFile) -> Callable[[int, int], bytes]:
    file_system, path = _file_system(file.uri)
    if file.uri.startswith("gs://"):

        def fetch_generation(begin: int, end: int) -> bytes:
            with _answering(file.uri, RunFailed):
                try:
                    return bytes(file_system.cat_file(path, start=begin, end=end, generation=file.version))
                except FileNotFoundError:  # a generation is there until another one replaces it
                    raise changed_error(file) from None

        return fetch_generation
    try:
        stream = file_system.open(path, "rb", cache_type="none")  # whose requests carry If-Match with its ETag
    except FileNotFoundError:
        raise changed_error(file) from None
    if (_store_version("s3", stream.details), stream.size) != (file.version, file.size):
        raise changed_error(file)

    def fetch(begin: int, end: int) -> bytes:
        from s3fs.utils import FileExpired

        with _answering(file.uri, RunFailed):
            try:
                stream.seek(begin)
                return bytes(stream.read(end - begin))
            except (FileExpired, FileNotFoundError):
                raise changed_error(file) from None

    return fetch


@contextlib.contextmanager
def _answering(uri: str, kind: type[RunspecError]) -> Iterator[None]:
    """Turn what a client library raises into an error of one line."""
    try:
        yield
    except (RunspecError, *BUGS):
        raise
    except FileNotFoundError as error:  # of a bucket, mostly
        raise kind(f"{redact(uri)}: {reason_of(error)}") from error
    except Exception as error:
        denied = isinstance(error, PermissionError) or str(error).startswith("Forbidden")  # s3fs, gcsfs
        unknown = "credential" in str(error).lower()
        hint = CREDENTIALS.get(uri.partition("://")[0]) if denied or unknown else None
        raise kind(f"{redact(uri)}: {'access denied' if denied else reason_of(error)}", hint) from error
