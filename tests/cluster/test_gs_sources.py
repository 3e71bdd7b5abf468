"""Sources on Google Cloud Storage: real gcsfs against a small server of the storage's JSON interface."""

from __future__ import annotations

import importlib.util
import io
import json
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_runspec.errors import RunFailed, UserError
from nemotron.data_prep.sources.locations import list_files, open_binary

pytestmark = pytest.mark.cluster


@dataclass
class Bucket:
    """What is stored, `name -> (generation, content)`, and how much of it was sent."""

    objects: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    sent: int = 0
    last: int = 1_700_000_000_000_000
    denied: bool = False

    def put(self, name: str, data: bytes) -> None:
        self.last += 1
        self.objects[name] = (self.last, data)

    def describe(self, name: str) -> dict[str, Any]:
        generation, data = self.objects[name]
        common = {"kind": "storage#object", "name": name, "bucket": "test", "size": str(len(data))}
        return {**common, "generation": str(generation), "metageneration": "1", "etag": f"e{generation}"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        bucket: Bucket = self.server.bucket  # type: ignore[attr-defined]
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        found = re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)/o(?:/(.+))?", url.path)
        if bucket.denied:
            self._answer(403, b'{"error": {"code": 403, "message": "caller does not have access"}}')
        elif found is None or found[1] != "test":
            self._answer(404, b'{"error": {"code": 404, "message": "not found"}}')
        elif found[2] is None:
            self._list(bucket, query)
        else:
            self._get(bucket, unquote(found[2]), query)

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
            body = data[int(part[1]) : int(part[2]) + 1] if part else data
            bucket.sent += len(body)
            self._answer(206 if part else 200, body)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    if importlib.util.find_spec("gcsfs") is None:
        pytest.skip("pip install gcsfs")
    # Else gcsfs first asks over gRPC what kind of bucket it is, a minute long where nobody answers.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.bucket = Bucket()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setitem(fsspec.config.conf, "gs", {"endpoint_url": endpoint, "token": "anon"})
    fsspec.filesystem("gs").clear_instance_cache()
    yield server.bucket  # type: ignore[attr-defined]
    fsspec.filesystem("gs").clear_instance_cache()
    server.shutdown()
    thread.join()
    server.server_close()


def test_files_globs_and_folders(bucket: Bucket) -> None:
    for name in ("a.jsonl", "deep/b.jsonl", "deep/er/c.jsonl", "deep/notes.xyz", "deep/"):
        bucket.put(name, b"{}\n" if not name.endswith("/") else b"")

    def names(location: str) -> list[str]:
        return [file.uri.removeprefix("gs://test/") for file in list_files([location])]

    assert names("gs://test/a.jsonl") == ["a.jsonl"]
    assert names("gs://test/deep/*.jsonl") == ["deep/b.jsonl"]
    assert names("gs://test/**/*.jsonl") == ["a.jsonl", "deep/b.jsonl", "deep/er/c.jsonl"]
    assert names("gs://test/deep") == ["deep/b.jsonl", "deep/er/c.jsonl"]
    with pytest.raises(
        UserError, match=r"no such file: gs://test/deep/bb\.jsonl\ndid you mean gs://test/deep/b\.jsonl\?"
    ):
        names("gs://test/deep/bb.jsonl")
    bucket.denied = True
    with pytest.raises(UserError, match="gcloud auth application-default login"):
        names("gs://test/a.jsonl")


def test_one_row_group_is_read_without_the_rest(bucket: Bucket) -> None:
    sink = io.BytesIO()
    table = pa.table({"text": [random.Random(i).randbytes(40).hex() for i in range(40_000)]})
    pq.write_table(table, sink, row_group_size=1000, compression="none")
    bucket.put("x.parquet", sink.getvalue())
    (file,) = list_files(["gs://test/x.parquet"])
    assert file.version == str(bucket.last)
    with open_binary(file) as stream:
        assert pq.ParquetFile(stream).read_row_group(17).equals(table.slice(17_000, 1000))
    assert bucket.sent < file.size / 8


def test_an_object_that_changes_is_noticed(bucket: Bucket) -> None:
    bucket.put("x.jsonl", b"a" * 300_000)
    (file,) = list_files(["gs://test/x.jsonl"])
    stream = open_binary(file)
    assert stream.read(10) == b"a" * 10
    bucket.put("x.jsonl", b"b" * 300_000)
    with pytest.raises(RunFailed, match=r"gs://test/x\.jsonl changed after it was listed"):
        stream.seek(200_000)
        stream.read(10)
