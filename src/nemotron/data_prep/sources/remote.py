"""Files on object stores and web servers: listed, and read in ranges of bytes without a copy on this machine.

    s3://BUCKET/KEY       a file, a glob (`*`, `**`, `?`, `[ab]`) or a folder, through s3fs (pip install -e '.[s3]')
    gs://BUCKET/KEY       the same through gcsfs (pip install -e '.[gs]')
    https://HOST/PATH     one file of a web server, with the standard library; http:// only for this machine
    hf://ORG/NAME         a dataset of the Hugging Face Hub: hub.py

Credentials come from where the client libraries look for them: environment, their own files, the machine's role. An
address that holds some (`https://user:password@…`) is refused. A signed one stands in plans as it was given, since it
is needed to read; messages, row ids and lineage show an address without its query string.

What tells a file from its later self (`SourceFile.version`): the ETag of S3, the generation of Google Cloud Storage,
on the web the ETag, else Last-Modified; a server that sends neither says nothing of a file that changes without
changing its length. All of them are compared with every range that is read.
"""

from __future__ import annotations

import contextlib
import email.message
import http.client
import io
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from nemo_runspec.errors import RunFailed, RunspecError, UserError, nearest
from nemotron.data_prep.sources.files import SourceFile

SCHEMES = ("s3", "gs", "https", "http", "hf")
_EXTRAS = {"s3": "s3", "gs": "gs"}
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; FSSPEC_S3_ANON=1 for a public bucket",
    "gs": "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS; FSSPEC_GS_TOKEN=anon for a public "
    "bucket",
}
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")

# Read-ahead: a read that goes on where the last one ended fetches twice as much as that one did, up to the greatest.
_LEAST_FETCH, _GREATEST_FETCH = 1 << 16, 16 << 20
_BUFFER = 1 << 16

_TIMEOUT = 60.0  # seconds without a byte
_ATTEMPTS = 5  # of a request to a web server, 7.5 s of waiting in all
_FIRST_WAIT = 0.5  # seconds, doubled every time
_LONGEST_WAIT = 30.0  # seconds, of what a server asks for (Retry-After)
_TRANSIENT_STATUS = (408, 425, 429, 500, 502, 503, 504)
# Bugs of ours, not troubles of a store.
_BUGS = (TypeError, AttributeError, LookupError, AssertionError)


class StoredObject(NamedTuple):
    """A file as its store lists it. `name`: its path without what an address may add, for the suffix."""

    uri: str
    name: str
    size: int
    version: str


def is_remote(location: str) -> bool:
    """Whether a location is an address rather than a path of this machine. UserError: of an unknown kind."""
    scheme, separator, _ = location.partition("://")
    if not separator:
        return False
    if scheme not in SCHEMES:
        near = nearest(scheme, SCHEMES)
        raise UserError(
            f"{shown(location)}: cannot read from {scheme}://",
            f"did you mean {near}://?" if near else f"known: {', '.join(f'{name}://' for name in SCHEMES)}",
        )
    return True


def shown(uri: str) -> str:
    """An address as messages show it: no credentials, no query string (where signatures are)."""
    return re.sub(r"(https?://[^?#\s]*)\?[^\s'\"]*", r"\1", re.sub(r"://[^/@\s]*@", "://", uri))


def find_objects(location: str) -> list[StoredObject]:
    """What an address stands for, in the order of the names: one file, those that a glob matches, or all in a folder.

    UserError, in one line: nothing there, access denied, no credentials, no such host, a missing client library.
    """
    scheme, _, rest = location.partition("://")
    if scheme != "hf" and "@" in rest.split("/", 1)[0]:
        raise UserError(f"{shown(location)}: credentials have no place in an address", _CREDENTIALS.get(scheme))
    if scheme == "hf":
        from nemotron.data_prep.sources.hub import find_hub_objects

        return find_hub_objects(location)
    if scheme in ("https", "http"):
        return [_find_on_web(location)]
    with _answering(location, UserError):
        return sorted(_find_in_store(location))


def open_remote(file: SourceFile, end: int | None = None) -> BinaryIO:
    """A seekable stream of a remote file's stored bytes, fetched in ranges.

    `end`: the byte before which the reader will probably stop; no more than that is read ahead.
    RunFailed: the file changed since it was listed, or cannot be read (any more).
    """
    if file.uri.startswith("hf://"):
        from nemotron.data_prep.sources.hub import open_hub_file

        return open_hub_file(file, end)
    if file.uri.startswith(("https://", "http://")):
        return range_stream(file, _web_fetch(file), end)
    with _answering(file.uri, RunFailed):
        return range_stream(file, _store_fetch(file), end)


class _RangeFile(io.RawIOBase):
    """A file of known size over `fetch(begin, end)`, with read-ahead while it is read in order."""

    def __init__(self, name: str, size: int, fetch: Callable[[int, int], bytes], end: int | None) -> None:
        super().__init__()
        self.name = name
        self._size, self._fetch = size, fetch
        self._ahead_to = size if end is None else min(end, size)
        self._position = 0
        self._chunk, self._chunk_begin = b"", 0
        self._next_fetch = _LEAST_FETCH

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(22, "a position before the file's beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), self._size - self._position)
        if wanted <= 0:
            return 0
        offset = self._position - self._chunk_begin
        if not 0 <= offset < len(self._chunk):
            self._fetch_at(self._position, wanted)
            offset = 0
        part = self._chunk[offset : offset + wanted]
        view[: len(part)] = part
        self._position += len(part)
        return len(part)

    def _fetch_at(self, begin: int, wanted: int) -> None:
        goes_on = begin == self._chunk_begin + len(self._chunk)
        # Behind the reader's `end` it begins anew with small steps: the rest of one line, mostly.
        self._next_fetch = (
            min(2 * self._next_fetch, _GREATEST_FETCH) if goes_on and begin != self._ahead_to else _LEAST_FETCH
        )
        ahead = min(begin + self._next_fetch, self._ahead_to if begin < self._ahead_to else self._size)
        self._chunk, self._chunk_begin = b"", begin  # at most one in memory
        self._chunk = self._fetch(begin, max(begin + wanted, ahead))


def range_stream(file: SourceFile, fetch: Callable[[int, int], bytes], end: int | None = None) -> BinaryIO:
    """A buffered, seekable stream over `fetch(begin, end)`. RunFailed: fewer bytes came than asked for, three times."""

    def whole(begin: int, end: int) -> bytes:
        for _ in range(3):
            data = fetch(begin, end)
            if len(data) == end - begin:
                return data
        raise RunFailed(f"{shown(file.uri)}: {len(data)} of {end - begin} bytes came from position {begin} on")

    return cast(BinaryIO, io.BufferedReader(_RangeFile(shown(file.uri), file.size, whole, end), _BUFFER))


def changed(file: SourceFile) -> RunFailed:
    """The error for a file that is no longer what was listed."""
    return RunFailed(f"{shown(file.uri)} changed after it was listed", "--force starts anew, with what is there now")


# --- S3 and Google Cloud Storage, through fsspec ----------------------------------------------------------------------


def _file_system(uri: str) -> tuple[Any, str]:
    """The file system of an address, without a cache of listings, and the path in it."""
    import fsspec

    scheme = uri.partition("://")[0]
    try:
        file_system = fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        raise UserError(
            f"{shown(uri)}: {_first_line(error)}", f"pip install -e '.[{_EXTRAS[scheme]}]' in the project's folder"
        ) from error
    return file_system, uri.partition("://")[2]


def _find_in_store(location: str) -> list[StoredObject]:
    from glob import has_magic

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
        StoredObject(f"{scheme}://{entry['name']}", entry["name"], int(entry["size"]), _store_version(scheme, entry))
        for entry in files
    ]


def _store_version(scheme: str, entry: dict[str, Any]) -> str:
    return str(entry["ETag"]).strip('"') if scheme == "s3" else str(entry["generation"])


def _near(file_system: Any, path: str, scheme: str) -> str | None:
    """The hint for a path that is not there: the nearest name beside it, as far as that can be listed."""
    folder, _, name = path.rstrip("/").rpartition("/")
    try:
        siblings = [str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in file_system.ls(folder, detail=False)]
    except Exception:  # a hint is not worth an error of its own
        return None
    near = nearest(name, siblings)
    return f"did you mean {scheme}://{folder}/{near}?" if near else None


def _store_fetch(file: SourceFile) -> Callable[[int, int], bytes]:
    file_system, path = _file_system(file.uri)
    if file.uri.startswith("gs://"):

        def fetch_generation(begin: int, end: int) -> bytes:
            with _answering(file.uri, RunFailed):
                try:
                    return bytes(file_system.cat_file(path, start=begin, end=end, generation=file.version))
                except FileNotFoundError:  # a generation is there until another one replaces it
                    raise changed(file) from None

        return fetch_generation
    try:
        stream = file_system.open(path, "rb", cache_type="none")  # whose requests carry If-Match with its ETag
    except FileNotFoundError:
        raise changed(file) from None
    if (_store_version("s3", stream.details), stream.size) != (file.version, file.size):
        raise changed(file)

    def fetch(begin: int, end: int) -> bytes:
        from s3fs.utils import FileExpired

        with _answering(file.uri, RunFailed):
            try:
                stream.seek(begin)
                return bytes(stream.read(end - begin))
            except (FileExpired, FileNotFoundError):
                raise changed(file) from None

    return fetch


@contextlib.contextmanager
def _answering(uri: str, kind: type[RunspecError]) -> Iterator[None]:
    """Make one line of what a client library raises."""
    try:
        yield
    except (RunspecError, *_BUGS):
        raise
    except FileNotFoundError as error:  # of a bucket, mostly
        raise kind(f"{shown(uri)}: {_first_line(error)}") from error
    except Exception as error:
        denied = isinstance(error, PermissionError) or str(error).startswith("Forbidden")  # s3fs, gcsfs
        unknown = "credential" in str(error).lower()
        hint = _CREDENTIALS.get(uri.partition("://")[0]) if denied or unknown else None
        raise kind(f"{shown(uri)}: {'access denied' if denied else _first_line(error)}", hint) from error


def _first_line(error: BaseException) -> str:
    return shown((str(error).strip().splitlines() or [type(error).__name__])[0])


# --- Web servers, with the standard library ---------------------------------------------------------------------------


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect unless it leaves TLS."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: http.client.HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        _check_web_address(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_web_address(url: str) -> None:
    parts = urlsplit(url)
    if not parts.hostname:
        raise UserError(f"{shown(url)}: no host is named", "https://HOST/PATH")
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _THIS_MACHINE):
        raise UserError(f"{shown(url)}: only https:// is read from other machines")


def _find_on_web(url: str) -> StoredObject:
    _check_web_address(url)
    path = urlsplit(url).path
    if "*" in path:
        raise UserError(f"{shown(url)}: a web server cannot be listed", "name each file")
    try:
        # Not HEAD, which addresses that are signed for GET refuse.
        _, headers, size = _get_range(url, 0, 1)
    except RunFailed as error:
        raise UserError(error.message, error.hint) from error
    return StoredObject(url, unquote(path), size, _web_version(headers, size))


def _web_version(headers: email.message.Message, size: int) -> str:
    return headers.get("ETag") or headers.get("Last-Modified") or f"{size} bytes"


def _web_fetch(file: SourceFile) -> Callable[[int, int], bytes]:
    def fetch(begin: int, end: int) -> bytes:
        data, headers, size = _get_range(file.uri, begin, end)
        if (_web_version(headers, size), size) != (file.version, file.size):
            raise changed(file)
        return data

    return fetch


def _get_range(url: str, begin: int, end: int) -> tuple[bytes, email.message.Message, int]:
    """The bytes from begin to end (or to the end of the file), the headers, and the size of the whole.

    What may pass is tried again. RunFailed: it did not pass. UserError: the server serves no ranges.
    """
    headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity", "User-Agent": "nemotron"}
    opener = urllib.request.build_opener(_Redirects)
    wait = _FIRST_WAIT
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with opener.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT) as answer:
                size = _whole_size(answer, begin)
                if size is None:
                    raise UserError(f"{shown(url)}: the server serves no ranges of bytes", "download the file first")
                return (answer.read() if size else b""), answer.headers, size
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 416 and (
                    total := re.fullmatch(r"bytes \*/(\d+)", error.headers["Content-Range"] or "")
                ):
                    return b"", error.headers, int(total[1])
                if error.code not in _TRANSIENT_STATUS or attempt == _ATTEMPTS:
                    raise _web_failure(url, error.code, error.reason) from error
                asked = error.headers.get("Retry-After") or ""
                wait = max(wait, min(float(asked), _LONGEST_WAIT)) if asked.isdecimal() else wait
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError) or attempt == _ATTEMPTS:
                raise RunFailed(f"{shown(url)}: {urlsplit(url).hostname} was not reached: {_reason(reason)}") from error
        except (ValueError, http.client.InvalidURL) as error:
            raise UserError(f"{shown(url)}: not an address: {_first_line(error)}") from error
        time.sleep(wait)
        wait *= 2
    raise AssertionError("the last attempt returns or raises")


def _whole_size(answer: http.client.HTTPResponse, begin: int) -> int | None:
    """Bytes of the whole file of which `answer` is a range; None where it is something else."""
    if answer.status == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        return int(found[2]) if found and int(found[1]) == begin else None
    return 0 if answer.headers.get("Content-Length") == "0" else None  # of nothing there are no ranges


def _web_failure(url: str, code: int, reason: str) -> RunFailed:
    if code in (404, 410):
        return RunFailed(f"no such file: {shown(url)}")
    if code in (401, 403):
        expired = " (a signed address may have expired)" if urlsplit(url).query else ""
        return RunFailed(f"{shown(url)}: access denied{expired}")
    return RunFailed(f"{shown(url)}: the server answered {code} {reason}")


def _reason(error: object) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return shown(str(text).splitlines()[0])
