"""A small Hugging Face Hub on loopback: the endpoints that huggingface_hub calls to list and read datasets, or models.

    GET  /api/datasets?author=A                         the names of its datasets
    GET  /api/datasets/O/N[/revision/R]                 a repository, and the commit that a revision is
    GET  /api/datasets/O/N/refs                         branches and tags
    GET  /api/datasets/O/N/auth-check                   whether the token opens a gated one
    GET  /api/datasets/O/N/tree/R[/P]?recursive=        its files, a few on a page, the next one in a Link header
    POST /api/datasets/O/N/paths-info/R                 some of its files
    HEAD, GET /datasets/O/N/resolve/R/P                 a file: ETag, X-Repo-Commit, ranges; a large one is a redirect
    GET  /cdn/SHA?signature=…                           to here, another host: a token that comes along is a failure

Errors carry X-Error-Code. A folder on disk is what a commit holds; `commit()` makes another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from http_server import serving

TOKEN = "hf_good"
SIGNATURE = "signature=not-for-logs"
PAGE = 3  # files on a page of a tree
LARGE = 4096  # bytes from which a file is stored beside the repository (LFS)


@dataclass
class Repository:
    """A dataset. `commits`: commit -> path -> content. `refs`: branch or tag -> commit."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Make a commit that holds these files; its hash."""
        text = json.dumps({path: hashlib.sha1(data).hexdigest() for path, data in files.items()}) + str(
            len(self.commits)
        )
        commit = hashlib.sha1(text.encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.refs[ref] = commit
        return commit


@dataclass
class Hub:
    """The running server and what it was asked."""

    endpoint: str
    cdn: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    bytes_sent: int = 0
    failures: int = 0  # so many requests are answered with 503
    cut: int = 0  # so many answers end in the middle
    leaked: bool = False  # a token came to the other host

    def add(self, name: str, files: dict[str, bytes], gated: bool = False) -> str:
        """A new dataset; its commit."""
        repository = self.repositories[name] = Repository(gated=gated)
        return repository.commit(files)


def blob_id(data: bytes) -> str:
    """What git calls the content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """A server for as long as the context lasts."""
    hub = Hub("", "")
    with serving(_Handler, hub=hub) as address:
        hub.endpoint, hub.cdn = address, address.replace("127.0.0.1", "localhost")
        yield hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.do_GET(body)

    def do_GET(self, body: dict[str, list[str]] | None = None) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        url = urlsplit(self.path)
        hub.requests.append(f"{self.command} {url.path}")
        self.token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if self.token:
            hub.tokens.add(self.token)
        if hub.failures:
            hub.failures -= 1
            self._answer(503, b"busy")
        elif url.path.startswith("/cdn/"):
            self._cdn(hub, url.path, url.query)
        elif url.path == "/api/datasets":
            author = parse_qs(url.query).get("author", [""])[0]
            self._json([{"id": name} for name in hub.repositories if name.startswith(f"{author}/")])
        elif found := re.fullmatch(
            r"/api/(?:datasets|models)/([^/]+/[^/]+)(?:/(revision|tree|paths-info|refs|auth-check)(?:/(.*))?)?",
            url.path,
        ):
            self._api(hub, unquote(found[1]), found[2], found[3] or "", parse_qs(url.query), body or {})
        elif found := re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path):
            self._resolve(hub, unquote(found[1]), unquote(found[2]), unquote(found[3]))
        else:
            self._answer(404, b"no such endpoint")

    def _repository(self, hub: Hub, name: str, listing: bool = False) -> Repository | None:
        repository = hub.repositories.get(name)
        if repository is None:  # the Hub does not say whether one is there that the asker may not see
            self._error(404 if self.token else 401, "RepoNotFound")
            return None
        if repository.gated and not listing and self.token != TOKEN:
            self._error(403 if self.token else 401, "GatedRepo")
            return None
        return repository

    def _commit(self, repository: Repository, revision: str) -> str | None:
        commit = revision if revision in repository.commits else repository.refs.get(revision)
        if commit is None:
            self._error(404, "RevisionNotFound")
        return commit

    def _api(
        self, hub: Hub, name: str, verb: str | None, rest: str, query: dict[str, list[str]], body: dict[str, list[str]]
    ) -> None:
        # What a gated repository holds is told to everybody; its files are not.
        repository = self._repository(hub, name, listing=verb != "auth-check")
        if repository is None:
            return
        if verb == "auth-check":
            self._json({})
            return
        if verb == "refs":
            branches = [
                {"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": c} for ref, c in repository.refs.items()
            ]
            self._json({"branches": branches, "tags": [], "converts": []})
            return
        revision, _, path = rest.partition("/")
        commit = self._commit(repository, unquote(revision) or "main")
        if commit is None:
            return
        files = repository.commits[commit]
        if verb in (None, "revision"):
            siblings = [{"rfilename": path} for path in files]
            gated = "manual" if repository.gated else False
            self._json({"id": name, "sha": commit, "private": False, "gated": gated, "siblings": siblings})
        elif verb == "paths-info":
            self._json([_entry(path, files[path]) for path in body["paths"] if path in files])
        else:
            self._tree(files, unquote(path), query)

    def _tree(self, files: dict[str, bytes], folder: str, query: dict[str, list[str]]) -> None:
        inside = f"{folder}/" if folder else ""
        names = [path for path in sorted(files) if path.startswith(inside)]
        if folder and not names:
            self._error(404, "EntryNotFound")
            return
        folders = sorted(
            {path[: i + len(inside)] for path in names for i, c in enumerate(path[len(inside) :]) if c == "/"}
        )
        entries = [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]
        entries += [_entry(path, files[path]) for path in names]
        if query.get("recursive", ["false"])[0].lower() != "true":
            entries = [entry for entry in entries if "/" not in entry["path"][len(inside) :]]
        begin = int(query.get("cursor", ["0"])[0])
        headers = {}
        if begin + PAGE < len(entries):
            here = self.path.partition("?")[0]
            recursive = query.get("recursive", ["false"])[0]
            host = self.headers["Host"]
            headers["Link"] = f'<http://{host}{here}?recursive={recursive}&cursor={begin + PAGE}>; rel="next"'
        self._json(entries[begin : begin + PAGE], headers)

    def _resolve(self, hub: Hub, name: str, revision: str, path: str) -> None:
        repository = self._repository(hub, name)
        commit = self._commit(repository, revision) if repository else None
        if repository is None or commit is None:
            return
        data = repository.commits[commit].get(path)
        headers = {"X-Repo-Commit": commit}
        if data is None:
            self._error(404, "EntryNotFound", headers)
        elif len(data) >= LARGE:
            sha = hashlib.sha256(data).hexdigest()
            headers |= {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(data)), "ETag": f'"{blob_id(data)}"'}
            self._answer(302, b"", {**headers, "Location": f"{hub.cdn}/cdn/{sha}?{SIGNATURE}"})
        else:
            self._range(hub, data, {**headers, "ETag": f'"{blob_id(data)}"'})

    def _cdn(self, hub: Hub, path: str, query: str) -> None:
        hub.leaked = hub.leaked or bool(self.token)
        for repository in hub.repositories.values():
            for data in (data for files in repository.commits.values() for data in files.values()):
                if path == f"/cdn/{hashlib.sha256(data).hexdigest()}" and query == SIGNATURE:
                    self._range(hub, data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"'})
                    return
        self._answer(403, b"")

    def _range(self, hub: Hub, data: bytes, headers: dict[str, str]) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        status, part = 200, data
        if found and self.command == "GET":
            begin, end = int(found[1]), min(int(found[2]) + 1, len(data))
            status, part = 206, data[begin:end]
            headers = {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
        headers = {**headers, "Accept-Ranges": "bytes"}
        if self.command == "GET":
            hub.bytes_sent += len(part)
        if hub.cut and self.command == "GET" and len(part) > 1:
            hub.cut -= 1
            self._answer(status, part, headers, cut=True)
        else:
            self._answer(status, part, headers)

    def _json(self, value: Any, headers: dict[str, str] | None = None) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _error(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        message = {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})}
        self._answer(status, json.dumps({"error": code}).encode(), message)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob_id(data)}
    if len(data) >= LARGE:
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry
