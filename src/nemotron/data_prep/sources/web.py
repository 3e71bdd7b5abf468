"""Files of web servers, with the standard library; http:// only for this machine.

fsspec's file system for HTTP follows a redirect from https:// to http://, does not retry a request that failed, and
does not notice that a file has changed between two ranges.
"""

from __future__ import annotations

import email.message
import http.client
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from nemo_runspec.errors import RunFailed, UserError
from nemotron.data_prep.sources.files import SourceFile, reason_of, redact
from nemotron.data_prep.sources.ranges import TRANSIENT_STATUS, StoredObject, changed_error, retried

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")

_TIMEOUT = 60.0  # seconds without a byte
_ATTEMPTS = 5  # of a request to a web server, 7.5 s of waiting in all
_LONGEST_WAIT = 30.0  # seconds, of what a server asks for (Retry-After)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect unless it leaves TLS."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: http.client.HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        _check_web_address(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_web_address(url: str) -> None:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise _not_an_address(url, error) from error
    if not parts.hostname:
        raise UserError(f"{redact(url)}: no host is named", "https://HOST/PATH")
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _THIS_MACHINE):
        raise UserError(f"{redact(url)}: only https:// is read from other machines")


def find_on_web(url: str) -> StoredObject:
    """The file at an address, asked for one byte."""
    _check_web_address(url)
    if "*" in urlsplit(url).path:
        raise UserError(f"{redact(url)}: a web server cannot be listed", "name each file")
    try:
        # Not HEAD, which addresses that are signed for GET refuse.
        _, headers, size = _get_range(url, 0, 1)
    except RunFailed as error:
        raise UserError(error.message, error.hint) from error
    return StoredObject(url, size, _web_version(headers, size))


def _web_version(headers: email.message.Message, size: int) -> str:
    return headers.get("ETag") or headers.get("Last-Modified") or f"{size} bytes"


def web_fetch(file: SourceFile) -> Callable[[int, int], bytes]:
    """`fetch(begin, end)` of a file, which has to be the version that was listed."""

    def fetch(begin: int, end: int) -> bytes:
        data, headers, size = _get_range(file.uri, begin, end)
        if (_web_version(headers, size), size) != (file.version, file.size):
            raise changed_error(file)
        return data

    return fetch


def _get_range(url: str, begin: int, end: int) -> tuple[bytes, email.message.Message, int]:
    """The bytes from begin to end (or to the end of the file), the headers, and the size of the file.

    A fault that may be transient is retried. RunFailed: it lasted, or is not transient. UserError: the server serves no
    ranges.
    """
    headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity", "User-Agent": "nemotron"}
    opener = urllib.request.build_opener(_Redirects)

    def request() -> tuple[bytes, email.message.Message, int]:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT) as answer:
            size = _whole_size(answer, begin)
            if size is None:
                raise UserError(f"{redact(url)}: the server serves no ranges of bytes", "download the file first")
            return (answer.read() if size else b""), answer.headers, size

    try:
        return retried(request, _pause, _ATTEMPTS)
    except urllib.error.HTTPError as error:
        error.close()
        total = re.fullmatch(r"bytes \*/(\d+)", error.headers["Content-Range"] or "")
        if error.code == 416 and total:
            return b"", error.headers, int(total[1])
        raise _web_failure(url, error.code, error.reason) from error
    except (ValueError, http.client.InvalidURL) as error:  # ValueError: what IDNA or ASCII cannot encode
        raise _not_an_address(url, error) from error
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
        reason = getattr(error, "reason", error)
        detail = getattr(reason, "strerror", None) or reason_of(reason)
        raise RunFailed(f"{redact(url)}: {urlsplit(url).hostname} was not reached: {detail}") from error


def _pause(error: Exception) -> float | None:
    """Seconds that a server asks for before the next request; None: another one would fail, too."""
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        retry_after = error.headers.get("Retry-After") or "0"
        wait = min(float(retry_after), _LONGEST_WAIT) if retry_after.isdecimal() else 0.0
        return wait if error.code in TRANSIENT_STATUS else None
    lasts = isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError)
    may_pass = isinstance(error, OSError | http.client.HTTPException) and not isinstance(error, http.client.InvalidURL)
    return 0.0 if may_pass and not lasts else None


def _whole_size(answer: http.client.HTTPResponse, begin: int) -> int | None:
    """Bytes of the whole file of which `answer` is a range; None where it is something else."""
    if answer.status == 206:
        content_range = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        return int(content_range[2]) if content_range and int(content_range[1]) == begin else None
    return 0 if answer.headers.get("Content-Length") == "0" else None  # of nothing there are no ranges


def _not_an_address(url: str, error: Exception) -> UserError:
    return UserError(f"{redact(url)}: not an address: {reason_of(error)}")


def _web_failure(url: str, code: int, reason: str) -> RunFailed:
    if code in (404, 410):
        return RunFailed(f"no such file: {redact(url)}")
    if code in (401, 403):
        expired = " (a signed address may have expired)" if urlsplit(url).query else ""
        return RunFailed(f"{redact(url)}: access denied{expired}")
    return RunFailed(f"{redact(url)}: the server answered {code} {reason}")
