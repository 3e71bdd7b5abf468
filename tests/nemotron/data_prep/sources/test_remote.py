"""Files of a web server, over real HTTP on loopback; the stores are tried in tests/cluster/test_object_stores.py."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from http_server import serving
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_runspec.errors import RunFailed, UserError
from nemo_runspec.installation import install_line
from nemotron.data_prep.sources import ranges
from nemotron.data_prep.sources import web as web_module
from nemotron.data_prep.sources.files import SourceFile, redact
from nemotron.data_prep.sources.locations import find_objects, open_binary
from nemotron.data_prep.sources.ranges import range_stream
from nemotron.data_prep.sources.reader import pieces_of, read_piece
from nemotron.data_prep.sources.reading import Reading, ReadReport


@dataclass
class Web:
    """A web server, its files and its moods."""

    base: str
    files: dict[str, bytes] = field(default_factory=dict)
    log: list[tuple[int, int]] = field(default_factory=list)  # ranges served
    failing: list[int] = field(default_factory=list)  # status codes of the next answers; 0 closes the connection
    headers: tuple[str, ...] = ("ETag", "Last-Modified")
    ranges: bool = True

    def served(self) -> int:
        """Bytes of files that were sent, and forget them."""
        total = sum(end - begin for begin, end in self.log)
        self.log.clear()
        return total


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        web: Web = self.server.web  # type: ignore[attr-defined]
        path = unquote(self.path.partition("?")[0])
        if web.failing:
            status = web.failing.pop(0)
            if status:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
            return
        if path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", "http://elsewhere.example/x" if path.endswith("out") else path[6:])
            self.end_headers()
            return
        if path not in web.files:
            self.send_error(403 if path.startswith("/secret") else 404)
            return
        data = web.files[path]
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if web.ranges else None
        begin, end = (int(found[1]), min(int(found[2]) + 1, len(data))) if found else (0, len(data))
        self.send_response(416 if found and begin >= len(data) else 206 if found else 200)
        if found:
            inside = f"{begin}-{end - 1}" if begin < len(data) else "*"
            self.send_header("Content-Range", f"bytes {inside}/{len(data)}")
        if "ETag" in web.headers:
            self.send_header("ETag", f'"{hash(data):x}"')
        if "Last-Modified" in web.headers:
            self.send_header("Last-Modified", f"Sun, 22 Nov 2026 00:00:{len(data) % 60:02d} GMT")
        self.send_header("Content-Length", str(max(0, end - begin)))
        self.end_headers()
        web.log.append((begin, end))
        with contextlib.suppress(OSError):
            self.wfile.write(data[begin:end])


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(ranges, "_FIRST_WAIT", 0.01)
    files = Web("")
    with serving(_Handler, web=files) as files.base:
        yield files


def source(web: Web, path: str, query: str = "") -> SourceFile:
    """A file of the server as it is listed now."""
    (found,) = find_objects(f"{web.base}{path}{query}")
    return SourceFile(found.uri, found.size, found.version, "jsonl", "none")


def test_a_file_is_listed_with_size_and_version_and_read_back(web: Web) -> None:
    web.files["/data/a b.jsonl"] = data = random.Random(0).randbytes(300_000)
    (found,) = find_objects(f"{web.base}/data/a%20b.jsonl?token=s3cr3t")
    assert (found.uri, found.size) == (f"{web.base}/data/a%20b.jsonl?token=s3cr3t", 300_000)
    assert web.served() == 1, "listing must not download"
    with open_binary(SourceFile(found.uri, found.size, found.version, "jsonl", "none")) as stream:
        assert stream.read() == data


@settings(max_examples=60)
@given(
    size=st.integers(0, 5000),
    steps=st.lists(st.tuples(st.sampled_from(("seek", "read", "line")), st.integers(0, 6000)), max_size=30),
    end=st.none() | st.integers(0, 6000),
    step=st.integers(1, 700),
)
def test_reads_and_seeks_are_those_of_bytes_io(
    size: int, steps: list[tuple[str, int]], end: int | None, step: int
) -> None:
    data = random.Random(size).randbytes(size)
    least, greatest, buffer = ranges._LEAST_FETCH, ranges._GREATEST_FETCH, ranges._BUFFER
    ranges._LEAST_FETCH, ranges._GREATEST_FETCH, ranges._BUFFER = step, 4 * step, 1 + step // 2
    try:
        file = SourceFile("https://h/x", size, "v", "jsonl", "none")
        asked: list[tuple[int, int]] = []

        def fetch(begin: int, end: int) -> bytes:
            asked.append((begin, end))
            return data[begin:end]

        ours, plain = range_stream(file, fetch, end), io.BytesIO(data)
        for what, number in steps:
            if what == "seek":
                assert ours.seek(number) == plain.seek(number)
            elif what == "read":
                assert ours.read(number) == plain.read(number)
            else:
                assert ours.readline() == plain.readline()
            assert ours.tell() == plain.tell()
        assert all(0 <= begin < end <= size for begin, end in asked)
    finally:
        ranges._LEAST_FETCH, ranges._GREATEST_FETCH, ranges._BUFFER = least, greatest, buffer


def test_one_row_group_does_not_download_the_file(web: Web) -> None:
    table = pa.table({"id": range(40_000), "text": [random.Random(i).randbytes(40).hex() for i in range(40_000)]})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=1000, compression="none")
    web.files["/x.parquet"] = sink.getvalue()
    file = source(web, "/x.parquet")
    web.served()
    with open_binary(file) as stream:
        part = pq.ParquetFile(stream).read_row_group(17)
    assert part.equals(table.slice(17_000, 1000))
    # A row group is a fortieth; footer and read-ahead come on top.
    assert web.served() < file.size / 8


def test_a_range_of_lines_reads_little_behind_its_end(web: Web) -> None:
    lines = [json.dumps({"text": "x" * 100, "n": n}).encode() + b"\n" for n in range(100_000)]
    web.files["/x.jsonl"] = b"".join(lines)
    file = source(web, "/x.jsonl")
    web.served()
    begin, end = len(b"".join(lines[:20_000])), len(b"".join(lines[:60_000]))
    with open_binary(file, end) as stream:
        stream.seek(begin)
        read = []
        while stream.tell() < end:
            read.append(stream.readline())
    assert read == lines[20_000:60_000]
    requests = len(web.log)
    assert end - begin <= web.served() <= end - begin + 2 * (1 << 16)
    assert requests < 12, "read-ahead must grow"


def test_what_passes_is_tried_again_and_what_does_not_is_one_line(web: Web) -> None:
    web.files["/x.jsonl"] = data = b"a\n" * 1000
    file = source(web, "/x.jsonl")
    web.failing[:] = [503, 0, 500]
    with open_binary(file) as stream:
        assert stream.read() == data
    web.failing[:] = [503] * 9
    with open_binary(file) as stream, pytest.raises(RunFailed, match=r"/x\.jsonl: the server answered 503"):
        stream.read()
    assert len(web.failing) == 9 - 5, "retries are bounded"
    web.failing[:] = [400] * 2
    with open_binary(file) as stream, pytest.raises(RunFailed, match="the server answered 400"):
        stream.read()
    assert len(web.failing) == 1, "what will not pass is not tried again"


@pytest.mark.parametrize("headers", [("ETag", "Last-Modified"), ("Last-Modified",), ()])
def test_a_file_that_changes_is_noticed(web: Web, headers: tuple[str, ...]) -> None:
    web.headers = headers
    web.files["/x.jsonl"] = b"a" * 200_000
    file = source(web, "/x.jsonl")
    stream = open_binary(file)
    assert stream.read(10) == b"a" * 10
    # Without headers only another length tells; Last-Modified of this server follows the length, too.
    web.files["/x.jsonl"] = b"b" * (200_000 if "ETag" in headers else 200_001)
    with pytest.raises(RunFailed, match=r"/x\.jsonl changed after it was listed"):
        stream.seek(150_000)
        stream.read(10)


def test_an_empty_file_is_empty(web: Web) -> None:
    web.files["/x.jsonl"] = b""
    file = source(web, "/x.jsonl")
    assert file.size == 0
    assert open_binary(file).read() == b""


def test_a_signed_address_is_not_shown(web: Web) -> None:
    query = "?X-Amz-Credential=AKIA&X-Amz-Signature=s3cr3t"
    web.files["/x.jsonl"] = b"a" * 200_000
    file = source(web, "/x.jsonl", query)
    assert file.uri.endswith(query), "it is needed to read"
    assert file.name == f"{web.base}/x.jsonl"
    piece = pieces_of(file, 1 << 20)[0]
    with pytest.raises(UserError, match=r"/x\.jsonl:1") as wrong:
        next(read_piece(piece, Reading(), ReadReport()))
    messages = [str(wrong.value)]
    del web.files["/x.jsonl"]
    for location in (f"/x.jsonl{query}", f"/secret.jsonl{query}", f"/moved/out{query}"):
        with pytest.raises(UserError) as caught:
            find_objects(web.base + location)
        messages.append(str(caught.value))
    with pytest.raises(RunFailed) as failed:
        open_binary(file).read()
    messages.append(str(failed.value))
    with pytest.raises(UserError, match="credentials have no place") as caught:
        find_objects("https://somebody:s3cr3t@host.example/x.jsonl")
    messages.append(str(caught.value))
    assert "no such file" in messages[1] and "access denied" in messages[2]
    assert "only https://" in messages[3], "a redirect may not leave TLS"
    assert not any("s3cr3t" in message or "AKIA" in message for message in messages)
    assert all(message.count("\n") <= 1 for message in messages)


def test_errors_name_what_is_wrong(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    web.files["/x.jsonl"] = b"a" * 10
    web.ranges = False
    with pytest.raises(UserError, match="serves no ranges of bytes"):
        find_objects(f"{web.base}/x.jsonl")
    with pytest.raises(UserError, match=r"cannot be listed\nname each file"):
        find_objects("https://host.example/data/*.jsonl")
    with pytest.raises(UserError, match="only https://"):
        find_objects("http://host.example/x.jsonl")
    monkeypatch.setattr(web_module, "_ATTEMPTS", 2)
    with pytest.raises(UserError, match=r"127\.0\.0\.1 was not reached: Connection refused"):
        find_objects("http://127.0.0.1:1/x.jsonl")
    with pytest.raises(UserError, match=r"cannot read from htps://\ndid you mean https://\?"):
        find_objects("htps://bucket/x")


@pytest.mark.parametrize("address", ["example.invalid/ä", "..example.com/x", f"{'a' * 70}.example/x", "[::1/x"])
def test_what_is_no_address_is_one_line(address: str) -> None:
    with pytest.raises(UserError, match="not an address: "):
        find_objects(f"https://{address}")


def test_a_redirect_is_followed(web: Web) -> None:
    web.files["/x.jsonl"] = b"a\n" * 10
    with open_binary(source(web, "/moved/x.jsonl")) as stream:
        assert stream.read() == b"a\n" * 10


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("https://h/a.jsonl?sig=1#x", "https://h/a.jsonl"),
        ("https://u:p@h/a.jsonl", "https://h/a.jsonl"),
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("s3://bucket/what?.jsonl", "s3://bucket/what?.jsonl"),
        ("hf://datasets/o/n@main/a", "hf://datasets/o/n@main/a"),
        ("GET https://h/a?sig=1 failed", "GET https://h/a failed"),
    ],
)
def test_what_is_shown_of_an_address(address: str, text: str) -> None:
    assert redact(address) == text


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("gs", "gs")])
def test_a_missing_client_is_one_line_with_the_command(
    scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError) as caught:
        find_objects(f"{scheme}://bucket/x.jsonl")
    assert caught.value.hint == install_line(extra)
    assert "\n" not in caught.value.message


def test_a_short_answer_is_not_taken_for_the_end() -> None:
    file = SourceFile("s3://b/x", 100, "v", "jsonl", "none")
    answers = iter([b"", b"a" * 50, b"a" * 100])
    assert range_stream(file, lambda begin, end: next(answers)).read() == b"a" * 100
    with pytest.raises(RunFailed, match="1 of 100 bytes came"):
        range_stream(file, lambda begin, end: b"a").read()
