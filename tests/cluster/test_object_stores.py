"""Sources in object stores: real s3fs against moto, real gcsfs against a small server of Google's JSON interface."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import random
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_runspec.errors import RunFailed, UserError
from nemotron.data_prep.sources.files import SourceFile
from nemotron.data_prep.sources.locations import list_files, open_binary
from nemotron.data_prep.sources.reader import pieces_of, read_piece
from nemotron.data_prep.sources.reading import Reading, ReadReport

from .gcs import Bucket
from .s3 import S3


@dataclass(frozen=True)
class Folder:
    """A folder of the test's own in a bucket, at `url`. `put(url, data)` and `remove(url)` are not our code."""

    url: str
    put: Callable[[str, bytes], None]
    remove: Callable[[str], None]


@pytest.fixture
def s3_folder(s3: S3) -> Iterator[Folder]:
    def client() -> fsspec.AbstractFileSystem:
        return fsspec.filesystem("s3", use_listings_cache=False)

    fsspec.filesystem("s3").clear_instance_cache()
    url = f"s3://test/{secrets.token_hex(4)}"
    yield Folder(url, lambda url, data: client().pipe_file(url, data), lambda url: client().rm(url))
    fsspec.filesystem("s3").clear_instance_cache()


@pytest.fixture(params=["s3", "gs"])
def folder(request: pytest.FixtureRequest) -> Folder:
    """In each of the two stores."""
    if request.param == "s3":
        return request.getfixturevalue("s3_folder")
    store: Bucket = request.getfixturevalue("bucket")
    root = "gs://test/"
    return Folder(
        f"{root}mine",
        lambda url, data: store.put(url.removeprefix(root), data),
        lambda url: store.objects.__delitem__(url.removeprefix(root)),
    )


def jsonl(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def texts(location: str, target: int) -> list[str]:
    rows: list[str] = []
    for file in list_files([location]):
        for piece in pieces_of(file, target):
            rows += [row.value["text"] for row in read_piece(piece, Reading(), ReadReport())]
    return rows


def refusal(location: str) -> str:
    with pytest.raises(UserError) as caught:
        list_files([location])
    text = str(caught.value)
    assert text.count("\n") <= 1 and "test-secret" not in text and "test-key" not in text
    return text


def test_files_globs_and_folders(folder: Folder) -> None:
    def names(*locations: str) -> list[str]:
        files = list_files([f"{folder.url}/{location}" for location in locations])
        return [file.uri.removeprefix(f"{folder.url}/") for file in files]

    for name in ("a.jsonl", "b.jsonl.gz", "deep/c.jsonl", "deep/er/d.parquet", "notes.xyz", "e[1].jsonl", "deep/"):
        folder.put(f"{folder.url}/{name}", b"")
    assert names("a.jsonl") == ["a.jsonl"]
    assert names("*.jsonl") == ["a.jsonl", "e[1].jsonl"]
    assert names("**/*.jsonl") == ["a.jsonl", "deep/c.jsonl", "e[1].jsonl"]
    assert names("[ab].jsonl*") == ["a.jsonl", "b.jsonl.gz"]
    assert names("e[1].jsonl") == ["e[1].jsonl"], "a name may look like a glob"
    everything = ["a.jsonl", "b.jsonl.gz", "deep/c.jsonl", "deep/er/d.parquet", "e[1].jsonl"]
    assert names("") == everything, "folders shown by empty objects are not files"
    assert names("deep") == ["deep/c.jsonl", "deep/er/d.parquet"]
    assert names("", "*.jsonl", "deep/") == everything, "each once"
    assert refusal(f"{folder.url}/aa.jsonl") == (
        f"no such file: {folder.url}/aa.jsonl\ndid you mean {folder.url}/a.jsonl?"
    )


def test_rows_of_every_piece_are_those_of_the_file(folder: Folder) -> None:
    lines = [f"{n} " + "x" * (n % 97) for n in range(3000)]
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": lines}), sink, row_group_size=500)
    contents = {
        "plain.jsonl": jsonl(*lines),
        "packed.jsonl.gz": gzip.compress(jsonl(*lines)),
        "table.parquet": sink.getvalue(),
    }
    for name, data in contents.items():
        folder.put(f"{folder.url}/{name}", data)
        assert texts(f"{folder.url}/{name}", 10_000) == lines, name


def test_one_row_group_asks_for_ranges_only(folder: Folder) -> None:
    sink = io.BytesIO()
    table = pa.table({"text": [random.Random(i).randbytes(40).hex() for i in range(40_000)]})
    pq.write_table(table, sink, row_group_size=1000, compression="none")
    folder.put(f"{folder.url}/x.parquet", sink.getvalue())
    (file,) = list_files([f"{folder.url}/x.parquet"])
    fetched: list[int] = []
    with open_binary(file) as stream:
        raw = stream.raw  # type: ignore[attr-defined]
        fetch = raw._fetch
        raw._fetch = lambda begin, end: fetched.append(end - begin) or fetch(begin, end)
        assert pq.ParquetFile(stream).read_row_group(17).equals(table.slice(17_000, 1000))
    assert sum(fetched) < file.size / 8 and len(fetched) < 12


def size_of(file: SourceFile) -> int:
    with open_binary(file) as stream:
        return len(stream.read())


def test_forked_workers_read_what_their_parent_listed(folder: Folder) -> None:
    for n in range(4):
        folder.put(f"{folder.url}/{n}.jsonl", b"x" * (n + 1) * 100_000)
    files = list_files([folder.url])
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(size_of, files).get(timeout=60) == [100_000, 200_000, 300_000, 400_000]


def test_an_object_that_changes_is_noticed(folder: Folder) -> None:
    url = f"{folder.url}/x.jsonl"
    folder.put(url, b"a" * 300_000)
    (file,) = list_files([url])
    stream = open_binary(file)
    assert stream.read(10) == b"a" * 10
    folder.put(url, b"b" * 300_000)
    with pytest.raises(RunFailed, match=r"/x\.jsonl changed after it was listed"):
        stream.seek(200_000)
        stream.read(10)
    (again,) = list_files([url])
    assert again.version != file.version
    folder.remove(url)
    with pytest.raises(RunFailed, match="changed after it was listed"):
        open_binary(again).read(10)


def test_refusals_are_one_line(s3_folder: Folder) -> None:
    assert refusal(f"{s3_folder.url}/*.parquet") == f"no file matches {s3_folder.url}/*.parquet"
    assert "no such file: s3://no-such-bucket/x.jsonl" in refusal("s3://no-such-bucket/x.jsonl")
    assert "no bucket is named" in refusal("s3://")
    assert "credentials have no place in an address" in refusal("s3://test-key:test-secret@test/x.jsonl")


def test_without_credentials_the_hint_says_where_they_go(s3_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{s3_folder.url}/train.jsonl"
    s3_folder.put(url, jsonl("a"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.filesystem("s3").clear_instance_cache()
    assert "Unable to locate credentials\nset AWS_ACCESS_KEY_ID" in refusal(url)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"anon": True})  # FSSPEC_S3_ANON, which is read at import
    fsspec.filesystem("s3").clear_instance_cache()
    assert "access denied" in refusal(url)
    fsspec.filesystem("s3", anon=False, key="test-key", secret="test-secret").chmod(url, acl="public-read")
    assert texts(url, 100) == ["a"]


def test_without_credentials_of_google_too(bucket: Bucket) -> None:
    bucket.denied = True
    assert "gcloud auth application-default login" in refusal("gs://test/a.jsonl")


def test_a_store_out_of_reach_is_one_line(s3_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # of botocore's; the retries of s3fs stay
    fsspec.filesystem("s3").clear_instance_cache()
    assert "Could not connect to the endpoint" in refusal(f"{s3_folder.url}/train.jsonl")
    with pytest.raises(RunFailed, match="Could not connect to the endpoint"):
        open_binary(SourceFile(f"{s3_folder.url}/x.jsonl", 1, "v", "jsonl"))
