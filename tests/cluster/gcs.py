"""A Google Cloud Storage on loopback, with the bucket `test`: what gcsfs asks of it to list and read."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
import pytest
from http_server import serving


@dataclass
class Bucket:
    """What is stored, `name -> (generation, content)`."""

    objects: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    last: int = 1_700_000_000_000_000
    denied: bool = False

    def put(self, name: str, data: bytes) -> None:
        self.last += 1
        self.objects[name] = (self.last, data)

    def describe(self, name: str) -> dict[str, Any]:
        generation, data = self.objects[name]
        common = {"kind": "storage#object", "name": name, "bucket": "test", "size": str(len(data))}
        return {**common, "generation": str(generation), "metageneration": "1", "etag": f"e{generation}"}


@pytest.fixture(name="bucket")
def bucket_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    if importlib.util.find_spec("gcsfs") is None:
        pytest.skip("pip install gcsfs")
    # Else gcsfs first asks over gRPC what kind of bucket it is, a minute long where nobody answers.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    bucket = Bucket()
    with serving(_Handler, bucket=bucket) as address:
        monkeypatch.setitem(fsspec.config.conf, "gs", {"endpoint_url": address, "token": "anon"})
        fsspec.filesystem("gs").clear_instance_cache()
        yield bucket
        fsspec.filesystem("gs").clear_instance_cache()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        bucket: Bucket = self.server.bucket  # type: ignore[attr-defined]
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        named = re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)/o(?:/(.+))?", url.path)
        if bucket.denied:
            self._answer(403, b'{"error": {"code": 403, "message": "caller does not have access"}}')
        elif named is None or named[1] != "test":
            self._answer(404, b'{"error": {"code": 404, "message": "not found"}}')
        elif named[2] is None:
            self._list(bucket, query)
        else:
            self._get(bucket, unquote(named[2]), query)

    def _list(self, bucket: Bucket, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        items, folders = [], set()
        for name in sorted(name for name in bucket.objects if name.startswith(prefix)):
            inside = name[len(prefix) :]
            if delimiter and delimiter in inside:
                folders.add(prefix + inside.split(delimiter)[0] + delimiter)
            else:
                items.append(bucket.describe(name))
        items = items[: int(query["maxResults"])] if "maxResults" in query else items
        self._answer(200, json.dumps({"items": items, "prefixes": sorted(folders)}).encode())

    def _get(self, bucket: Bucket, name: str, query: dict[str, str]) -> None:
        generation, data = bucket.objects.get(name, (0, b""))
        if not generation or query.get("generation", str(generation)) != str(generation):
            self._answer(404, b'{"error": {"code": 404, "message": "No such object"}}')
        elif query.get("alt") != "media":
            self._answer(200, json.dumps(bucket.describe(name)).encode())
        else:
            part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
            self._answer(206 if part else 200, data[int(part[1]) : int(part[2]) + 1] if part else data)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
