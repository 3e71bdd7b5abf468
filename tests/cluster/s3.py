"""An S3 on loopback: moto's server in a process of its own, and the environment in which clients find it.

Real S3 decides atomically whether an object exists. moto looks and then writes, in many threads, so here a lock makes
every request one step. `stall` holds up requests, so that a test can kill a client in the middle of one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.errors import RunFailed

STALL = "/stall-requests"
SECONDS = 30.0


@dataclass(frozen=True)
class S3:
    """A running server with the bucket `test`."""

    endpoint: str

    def environment(self, cache: Path) -> dict[str, str]:
        """What a process on a machine with that cache needs; no profile of the user's is looked at."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test-key",
            "AWS_SECRET_ACCESS_KEY": "test-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "XDG_CACHE_HOME": str(cache),
        }

    def stall(self, mark: str) -> None:
        """From now on writing requests with `mark` in their URL wait; an empty mark lets everything pass."""
        self._post(f"{STALL}?{mark}")

    def wait_until_stalled(self) -> None:
        """Wait until a request does wait."""
        deadline = time.monotonic() + SECONDS
        while not int(self._post(f"{STALL}-count")):
            assert time.monotonic() < deadline, "no request came to be stalled"
            time.sleep(0.02)

    def requests(self) -> list[str]:
        """`METHOD /bucket/key` of the requests since the last call."""
        return self._post(f"{STALL}-log").splitlines()

    def _post(self, path: str) -> str:
        request = urllib.request.Request(self.endpoint + path, method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())


def missing() -> str | None:
    """Why there can be no S3 here, or None."""
    absent = [name for name in ("moto", "flask", "s3fs") if importlib.util.find_spec(name) is None]
    return f"pip install 'moto[s3,server]' s3fs: no {', '.join(absent)}" if absent else None


@contextlib.contextmanager
def running(log: Path) -> Iterator[S3]:
    """A server for as long as the context lasts."""
    with log.open("w") as stream:
        process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, stderr=stream, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise RunFailed(f"the S3 server did not start: {log.read_text()[-500:]}")
        server = S3(f"http://127.0.0.1:{port}")
        request = urllib.request.Request(f"{server.endpoint}/test", method="PUT")
        urllib.request.urlopen(request, timeout=10).close()
        yield server
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session", name="s3_server")
def s3_server_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    if reason := missing():
        pytest.skip(f"S3: {reason}")
    with running(tmp_path_factory.mktemp("s3") / "server.log") as server:
        yield server


@pytest.fixture(name="s3")
def s3_fixture(s3_server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The server, with this process as one of its clients, and an environment without anybody's own credentials."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "RUNSPEC_ARTIFACTS_ROOT", "RUNSPEC_ENV_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.environment(tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    s3_server.stall("")
    s3_server.requests()
    return s3_server


class _OneAtATime:
    """WSGI middleware: requests one by one, and the controls of a test."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self.app = app
        self.lock = threading.Lock()
        self.mark, self.stalled = "", 0
        self.log: list[str] = []

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, query = environ["PATH_INFO"], environ["QUERY_STRING"]
        if path.startswith(STALL):
            text = ""
            if path == STALL:
                self.mark, self.stalled = query, 0
            elif path.endswith("-count"):
                text = str(self.stalled)
            else:
                text, self.log = "\n".join(self.log), []
            start_response("200 OK", [("Content-Type", "text/plain")])
            return [text.encode()]
        mark = self.mark
        self.log.append(f"{environ['REQUEST_METHOD']} {path}")
        if mark and mark in f"{path}?{query}" and environ["REQUEST_METHOD"] in ("PUT", "POST"):
            self.stalled += 1
            while self.mark == mark:
                time.sleep(0.02)
        with self.lock:
            return list(self.app(environ, start_response))


def main() -> None:
    """Serve on a free port, which is the first line of the output."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    app = _OneAtATime(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
