"""Records of crawls: a damaged one is counted and costs none of its neighbours; pages are decoded as browsers do."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.warc import WarcRecord, decode_page, read_records

from .written import page, response, warc, warc_records

LIMIT = 100_000


def responses(path: Path) -> list[WarcRecord]:
    records = read_records(list_files([str(path)])[0], LIMIT)
    return [record for record in records if record.kind in ("response", "")]


def whole(path: Path) -> list[str]:
    return [response.url for response in responses(path) if not response.problem]


def damaged(path: Path) -> int:
    return sum(bool(response.problem) for response in responses(path))


@pytest.mark.parametrize("compressed", [True, False])
def test_a_file_that_ends_anywhere_gives_its_whole_records_and_one_damaged(tmp_path: Path, compressed: bool) -> None:
    records = warc_records([page(0), page(1), page(2)], gz=compressed)
    data, borders = b"".join(records), {0}
    for record in records:
        borders.add(max(borders) + len(record))
    path = tmp_path / "a.warc.gz"
    for end in range(0, len(data) + 1, 7):
        path.write_bytes(data[:end])
        before = sum(border <= end for border in borders if border)
        assert whole(path)[:before] == [f"https://a.example/{n}" for n in range(before)]
        # The last four bytes of a plain record are the blank lines after it; its content is whole without them.
        complete = end in borders or (not compressed and any(0 < border - end <= 4 for border in borders))
        assert damaged(path) == (not complete), end


def test_a_flipped_byte_costs_at_most_the_record_that_it_is_in(tmp_path: Path) -> None:
    records = warc_records([page(n) for n in range(6)])
    data, path, rng = b"".join(records), tmp_path / "a.warc.gz", random.Random(1)
    for _ in range(60):
        spot = rng.randrange(len(data))
        path.write_bytes(data[:spot] + bytes([data[spot] ^ rng.randrange(1, 256)]) + data[spot + 1 :])
        begin, hit = 0, 0
        for hit, record in enumerate(records):  # noqa: B007
            if begin + len(record) > spot:
                break
            begin += len(record)
        others = {f"https://a.example/{n}" for n in range(6) if n != hit}
        assert others <= set(whole(path)), (spot - begin, len(records[hit]))
        assert damaged(path) or len(whole(path)) == 6  # the gzip header has bytes that nothing depends on


def test_offsets_are_where_the_records_begin(tmp_path: Path) -> None:
    records = warc_records([page(n) for n in range(3)])
    path = tmp_path / "a.warc.gz"
    path.write_bytes(b"".join(records))
    offsets = [response.offset for response in responses(path)]
    assert offsets == [0, len(records[0]), len(records[0]) + len(records[1])]
    with path.open("rb") as file:
        file.seek(offsets[1])
        assert b"https://a.example/1" in gzip.decompress(file.read(len(records[1])))


@pytest.mark.parametrize(
    ("body", "content_type", "text", "encoding"),
    [
        ("<p>für".encode("cp1252"), "text/html; charset=ISO-8859-1", "<p>für", "cp1252"),
        ("<p>für".encode(), "text/html; charset=utf-8", "<p>für", "utf-8"),
        (
            '<meta charset="koi8-r"><p>привет'.encode("koi8-r"),
            "text/html",
            '<meta charset="koi8-r"><p>привет',
            "koi8-r",
        ),
        ("<p>für".encode("cp1252"), "text/html", "<p>für", "cp1252"),
        ("<p>für".encode(), "", "<p>für", "utf-8"),
        (b"\xff\xfe" + "<p>für".encode("utf-16-le"), "text/html; charset=utf-8", "<p>für", "utf-16-le"),
        ("<p>für".encode(), "text/html; charset=no-such-thing", "<p>für", "utf-8"),
        ("<p>für".encode(), "text/html; charset=hex", "<p>für", "utf-8"),
        # Python has codecs of these names that cannot replace, or that no browser knows.
        ("<p>für".encode(), "text/html; charset=undefined", "<p>für", "utf-8"),
        ("<p>für".encode(), "text/html; charset=idna", "<p>für", "utf-8"),
        ("<p>für\\n".encode(), "text/html; charset=unicode_escape", "<p>für\\n", "utf-8"),
        # Characters that Python's codec of the declared name lacks and browsers read.
        ("<p>镕".encode("gbk"), "text/html; charset=gb2312", "<p>镕", "gb18030"),
        ("<p>①".encode("cp932"), "text/html; charset=Shift_JIS", "<p>①", "cp932"),
        ('<meta charset="utf-16"><p>für'.encode(), "text/html", '<meta charset="utf-16"><p>für', "utf-8"),
    ],
)
def test_encodings(body: bytes, content_type: str, text: str, encoding: str) -> None:
    assert decode_page(body, content_type) == (text, encoding)


def test_a_content_encoding_that_is_not_taken_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.warc"
    bodies = [("zstd", b"\x28\xb5\x2f\xfd" + bytes(range(200))), ("zstd", page(1)), ("identity", page(2))]
    records = [response("https://a.example/", body, Content_Encoding=name) for name, body in bodies]
    path.write_bytes(warc(records, gz=False))
    found = responses(path)
    assert [record.encoding for record in found] == ["zstd", "", ""], "the second one is text already"
    assert [record.body for record in found] == [body for _, body in bodies]


def test_of_a_page_beyond_the_limit_only_the_beginning_is_held(tmp_path: Path) -> None:
    path = tmp_path / "a.warc.gz"
    path.write_bytes(b"".join(warc_records([b"<p>" + b"a" * 10_000_000, page(1)])))
    first, second = responses(path)
    assert LIMIT < len(first.body) <= LIMIT + 1
    assert second.body == page(1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"WARC-Target-URI: https://a.example/0\r\n", b""),
        (b"HTTP/1.1 200 OK", b"HTTP/1.1 20\xb9 OK"),
        (b"HTTP/1.1 200 OK", b"\x00"),
        (b"WARC/1.0", b"WARC/9.\xff"),
    ],
)
def test_a_header_of_any_kind_costs_at_most_its_record(tmp_path: Path, old: bytes, new: bytes) -> None:
    first, second = warc_records([page(0), page(1)], gz=False)
    assert old in first
    header, line, rest = first.replace(old, new).partition(b"Content-Length: ")
    number, _, rest = rest.partition(b"\r\n")
    if old.startswith(b"HTTP"):
        number = str(int(number) + len(new) - len(old)).encode()
    path = tmp_path / "a.warc"
    path.write_bytes(header + line + number + b"\r\n" + rest + second)
    assert "https://a.example/1" in whole(path)
    assert len(responses(path)) == 2


@pytest.mark.parametrize("status_line", [b"HTTP/1.0 200", b"HTTP/2 200", b"HTTP/2.0 200 OK", b"HTTP/3 200"])
def test_responses_of_every_version_of_http(tmp_path: Path, status_line: bytes) -> None:
    (record,) = warc_records([page(0)], gz=False)
    header, _, content = record.partition(b"\r\n\r\n")
    content = content.replace(b"HTTP/1.1 200 OK", status_line).rstrip(b"\r\n")
    lines = [line for line in header.split(b"\r\n") if not line.startswith(b"Content-Length")]
    path = tmp_path / "a.warc"
    path.write_bytes(b"\r\n".join([*lines, b"Content-Length: %d" % len(content), b"", content, b"", b""]))
    assert [(response.status, response.body) for response in responses(path)] == [(200, page(0))]
