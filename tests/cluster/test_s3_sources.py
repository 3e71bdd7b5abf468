"""Sources on an S3: real s3fs against moto."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import random
import secrets
from collections.abc import Iterator

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_runspec.errors import RunFailed, UserError
from nemotron.data_prep.sources.files import SourceFile
from nemotron.data_prep.sources.locations import list_files, open_binary
from nemotron.data_prep.sources.reader import pieces_of, read_piece
from nemotron.data_prep.sources.reading import Reading, ReadReport

from .s3 import S3, s3_fixture, s3_server_fixture  # noqa: F401

pytestmark = pytest.mark.cluster


@pytest.fixture
def folder(s3: S3) -> Iterator[str]:
    """A folder of the test's own in the bucket."""
    fsspec.filesystem("s3").clear_instance_cache()
    yield f"s3://test/{secrets.token_hex(4)}"
    fsspec.filesystem("s3").clear_instance_cache()


def put(url: str, data: bytes) -> None:
    fsspec.filesystem("s3", use_listings_cache=False).pipe_file(url, data)


def jsonl(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def names(folder: str, *locations: str) -> list[str]:
    return [file.uri.removeprefix(f"{folder}/") for file in list_files([f"{folder}/{one}" for one in locations])]


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


def test_files_globs_and_folders(folder: str) -> None:
    for name in ("a.jsonl", "b.jsonl.gz", "deep/c.jsonl", "deep/er/d.parquet", "notes.xyz", "e[1].jsonl", "deep/"):
        put(f"{folder}/{name}", b"")
    assert names(folder, "a.jsonl") == ["a.jsonl"]
    assert names(folder, "*.jsonl") == ["a.jsonl", "e[1].jsonl"]
    assert names(folder, "**/*.jsonl") == ["a.jsonl", "deep/c.jsonl", "e[1].jsonl"]
    assert names(folder, "[ab].jsonl*") == ["a.jsonl", "b.jsonl.gz"]
    assert names(folder, "e[1].jsonl") == ["e[1].jsonl"], "a name may look like a glob"
    everything = ["a.jsonl", "b.jsonl.gz", "deep/c.jsonl", "deep/er/d.parquet", "e[1].jsonl"]
    assert names(folder, "") == everything, "folders shown by empty objects are not files"
    assert names(folder, "deep") == ["deep/c.jsonl", "deep/er/d.parquet"]
    assert names(folder, "", "*.jsonl", "deep/") == everything, "each once"


def test_rows_of_every_piece_are_those_of_the_file(folder: str) -> None:
    lines = [f"{n} " + "x" * (n % 97) for n in range(3000)]
    put(f"{folder}/plain.jsonl", jsonl(*lines))
    put(f"{folder}/packed.jsonl.gz", gzip.compress(jsonl(*lines)))
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": lines}), sink, row_group_size=500)
    put(f"{folder}/table.parquet", sink.getvalue())
    for name in ("plain.jsonl", "packed.jsonl.gz", "table.parquet"):
        assert texts(f"{folder}/{name}", 10_000) == lines, name


def test_one_row_group_asks_for_ranges_only(folder: str, s3: S3) -> None:
    sink = io.BytesIO()
    table = pa.table({"text": [random.Random(i).randbytes(40).hex() for i in range(40_000)]})
    pq.write_table(table, sink, row_group_size=1000, compression="none")
    put(f"{folder}/x.parquet", sink.getvalue())
    (file,) = list_files([f"{folder}/x.parquet"])
    fetched: list[int] = []
    with open_binary(file) as stream:
        raw = stream.raw  # type: ignore[attr-defined]
        fetch = raw._fetch
        raw._fetch = lambda begin, end: fetched.append(end - begin) or fetch(begin, end)
        s3.requests()
        assert pq.ParquetFile(stream).read_row_group(17).equals(table.slice(17_000, 1000))
    assert sum(fetched) < file.size / 8
    assert len(fetched) == sum(line.startswith("GET") for line in s3.requests()) < 12


def sizes(file: SourceFile) -> int:
    with open_binary(file) as stream:
        return len(stream.read())


def test_forked_workers_read_what_their_parent_listed(folder: str) -> None:
    for n in range(4):
        put(f"{folder}/{n}.jsonl", b"x" * (n + 1) * 100_000)
    files = list_files([folder])
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(sizes, files).get(timeout=60) == [100_000, 200_000, 300_000, 400_000]


def test_an_object_that_changes_is_noticed(folder: str) -> None:
    put(f"{folder}/x.jsonl", b"a" * 300_000)
    (file,) = list_files([f"{folder}/x.jsonl"])
    stream = open_binary(file)
    assert stream.read(10) == b"a" * 10
    put(f"{folder}/x.jsonl", b"b" * 300_000)
    with pytest.raises(RunFailed, match=r"/x\.jsonl changed after it was listed"):
        stream.seek(200_000)
        stream.read(10)
    with pytest.raises(RunFailed, match="changed after it was listed"):
        open_binary(file)
    (again,) = list_files([f"{folder}/x.jsonl"])
    assert again.version != file.version
    fsspec.filesystem("s3", use_listings_cache=False).rm(f"{folder}/x.jsonl")
    with pytest.raises(RunFailed, match="changed after it was listed"):
        open_binary(again)


def test_refusals_are_one_line(folder: str) -> None:
    put(f"{folder}/train.jsonl", b"")
    assert refusal(f"{folder}/trian.jsonl") == (
        f"no such file: {folder}/trian.jsonl\ndid you mean {folder}/train.jsonl?"
    )
    assert refusal(f"{folder}/*.parquet") == f"no file matches {folder}/*.parquet"
    assert "no such file: s3://no-such-bucket/x.jsonl" in refusal("s3://no-such-bucket/x.jsonl")
    assert "no bucket is named" in refusal("s3://")
    assert "credentials have no place in an address" in refusal("s3://test-key:test-secret@test/x.jsonl")


def test_without_credentials_the_hint_says_where_they_go(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(f"{folder}/train.jsonl", jsonl("a"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.filesystem("s3").clear_instance_cache()
    text = refusal(f"{folder}/train.jsonl")
    assert "Unable to locate credentials\nset AWS_ACCESS_KEY_ID" in text
    monkeypatch.setitem(fsspec.config.conf, "s3", {"anon": True})  # FSSPEC_S3_ANON, which is read at import
    fsspec.filesystem("s3").clear_instance_cache()
    assert "access denied" in refusal(f"{folder}/train.jsonl")
    owner = fsspec.filesystem("s3", anon=False, key="test-key", secret="test-secret")
    owner.chmod(f"{folder}/train.jsonl", acl="public-read")
    assert texts(f"{folder}/train.jsonl", 100) == ["a"]


def test_a_store_out_of_reach_is_one_line(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # of botocore's; the retries of s3fs stay
    fsspec.filesystem("s3").clear_instance_cache()
    assert "Could not connect to the endpoint" in refusal(f"{folder}/train.jsonl")
    with pytest.raises(RunFailed, match="Could not connect to the endpoint"):
        open_binary(SourceFile(f"{folder}/x.jsonl", 1, "v", "jsonl"))
