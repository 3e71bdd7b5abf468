"""Pages from WARC files: damaged records are counted and never take their neighbours with them."""

from __future__ import annotations

import gzip
import io
import random
import time
from pathlib import Path

import pytest

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.extraction import (
    ExtractionSettings,
    Response,
    decode,
    extract_shard,
    main_text,
    plan_extraction,
    read_responses,
)
from nemotron.data_prep.curation.step import Drop, StepTable, collect, list_documents, read_documents
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.work.engines import SerialEngine

warcio = pytest.importorskip("warcio.warcwriter")
pytest.importorskip("trafilatura")

LIMIT = 100_000
PROSE = "The ferry leaves at noon and comes back before the tide turns, unless the wind says otherwise."


def page(number: int) -> bytes:
    noise = random.Random(number).randbytes(300).hex()  # so that compression does not make records tiny
    return f"<html><body><article><h1>Page {number}</h1><p>{PROSE} {noise}</p></article></body></html>".encode()


def warc_bytes(bodies: list[bytes], *, compressed: bool = True, content_type: str = "text/html") -> list[bytes]:
    """The records of a WARC file, each by itself."""
    from warcio.statusandheaders import StatusAndHeaders

    records = []
    for number, body in enumerate(bodies):
        buffer = io.BytesIO()
        writer = warcio.WARCWriter(buffer, gzip=compressed)
        headers = StatusAndHeaders("200 OK", [("Content-Type", content_type)], protocol="HTTP/1.1")
        record = writer.create_warc_record(
            f"https://a.example/{number}", "response", payload=io.BytesIO(body), http_headers=headers
        )
        writer.write_record(record)
        records.append(buffer.getvalue())
    return records


def responses(path: Path) -> list[Response]:
    return list(read_responses(list_files([str(path)])[0], LIMIT))


def whole(path: Path) -> list[str]:
    return [response.url for response in responses(path) if not response.problem]


def damaged(path: Path) -> int:
    return sum(bool(response.problem) for response in responses(path))


@pytest.mark.parametrize("compressed", [True, False])
def test_a_file_that_ends_anywhere_gives_its_whole_records_and_one_damaged(tmp_path: Path, compressed: bool) -> None:
    records = warc_bytes([page(0), page(1), page(2)], compressed=compressed)
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
    records = warc_bytes([page(n) for n in range(6)])
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
    records = warc_bytes([page(n) for n in range(3)])
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
    assert decode(body, content_type) == (text, encoding)


def html(body: bytes, **more: object) -> Response:
    return Response(**({"offset": 0, "status": 200, "content_type": "text/html", "body": body} | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (html(b"", status=200), "empty page"),
        (html(page(1), status=404), "status 4xx"),
        (html(page(1), content_type="image/png"), "not HTML"),
        (html(b"<p>" + b"a" * LIMIT), "page too large"),
        (html(b"<html><body><nav><a href=/>Home</a></nav></body></html>"), "no main text"),
        (
            html(
                b"<article><p>" + PROSE.encode() + b" \xff\xfe w\xe2\x82rd" * 20 + b"</p></article>",
                content_type="text/html; charset=utf-8",
            ),
            "undecodable bytes",
        ),
        (html(b"", problem="3 bytes missing"), "damaged record"),
        (
            html(random.Random(1).randbytes(2000), encoding="br", content_type="text/html; charset=koi8-r"),
            "content encoding that is not read",
        ),
    ],
)
def test_reasons(response: Response, reason: str) -> None:
    found = main_text(response, ExtractionSettings(max_html_bytes=LIMIT))
    assert isinstance(found, Drop)
    assert found.reason == reason


def test_the_main_text_without_what_stands_around_it() -> None:
    around = b"<nav><ul><li><a href=/>Home</a></li></ul></nav>", b"<footer><p>All rights reserved.</p></footer>"
    lines = [f"{PROSE} So it was in {year}." for year in (1901, 1902, 1903)]
    paragraphs = "".join(f"<p>{line}</p>" for line in lines).encode()
    body = b"<html><body>%s<article>%s</article>%s</body></html>" % (around[0], paragraphs, around[1])
    assert main_text(html(body), ExtractionSettings()) == ("\n".join(lines), ())


def test_nesting_without_end_is_no_end_of_the_run() -> None:
    body = b"<div>" * 50_000 + PROSE.encode() + b"</div>" * 50_000
    started = time.process_time()
    main_text(html(body), ExtractionSettings())  # whatever comes of it
    assert time.process_time() - started < 5


def test_a_slow_page_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_: str) -> str:
        while True:
            pass

    monkeypatch.setattr("nemotron.data_prep.curation.extraction._extract", slow)
    found = main_text(html(page(1)), ExtractionSettings(max_seconds=0.1))
    assert isinstance(found, Drop)
    assert found.reason == "page too slow"


def test_a_shard_has_a_document_a_page(tmp_path: Path) -> None:
    from nemotron.data_prep.curation.step import collect

    path = tmp_path / "crawl-7.warc.gz"
    path.write_bytes(b"".join(warc_bytes([page(0), b"", page(2)])))
    plan = plan_extraction(list_files([str(tmp_path)], formats=("warc",)), {})
    table = collect(plan, tmp_path / "work", extract_shard, ExtractionSettings(), SerialEngine())
    documents = [document for file in list_documents(tmp_path / "work") for document in read_documents(file)]
    assert [document["url"] for document in documents] == ["https://a.example/0", "https://a.example/2"]
    assert all(PROSE in document["text"] for document in documents)
    assert documents[0]["id"] == "crawl-7:0"
    assert (table.read.documents, table.kept.documents) == (3, 2)
    assert table.dropped["empty page"].documents == 1
    assert isinstance(table, StepTable)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.warc.gz").write_bytes(warc_bytes([page(0)])[0])
    with pytest.raises(UserError, match="two files are called a"):
        plan_extraction(list_files([str(tmp_path)], formats=("warc",)), {})


def test_bodies_are_decoded_as_their_headers_say_and_other_records_passed_over(tmp_path: Path) -> None:
    from warcio.statusandheaders import StatusAndHeaders

    packed = gzip.compress(page(1))
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (packed[:100], packed[100:])) + b"0\r\n\r\n"
    headers = [("Content-Type", "text/html"), ("Content-Encoding", "gzip"), ("Transfer-Encoding", "chunked")]
    path = tmp_path / "a.warc.gz"
    with path.open("wb") as file:
        writer = warcio.WARCWriter(file, gzip=True)
        writer.write_record(writer.create_warcinfo_record("a", {"software": "test"}))
        for kind, body, status, fields in (
            ("request", b"", "GET / HTTP/1.1", [("Host", "a.example")]),
            ("response", chunked, "200 OK", headers),
            ("metadata", b"fetchTimeMs: 3\r\n", None, None),
            ("response", page(2), "200 OK", headers[:1]),
        ):
            http = None if status is None else StatusAndHeaders(status, fields, protocol="HTTP/1.1")
            record = writer.create_warc_record("https://a.example/", kind, payload=io.BytesIO(body), http_headers=http)
            writer.write_record(record)
    assert [(response.body, response.problem) for response in responses(path)] == [(page(1), ""), (page(2), "")]


def test_a_content_encoding_that_is_not_taken_off_is_named(tmp_path: Path) -> None:
    from warcio.statusandheaders import StatusAndHeaders

    path = tmp_path / "a.warc"
    with path.open("wb") as file:
        writer = warcio.WARCWriter(file, gzip=False)
        for name, body in (("zstd", b"\x28\xb5\x2f\xfd" + bytes(range(200))), ("zstd", page(1)), ("identity", page(2))):
            fields = [("Content-Type", "text/html"), ("Content-Encoding", name)]
            http = StatusAndHeaders("200 OK", fields, protocol="HTTP/1.1")
            record = writer.create_warc_record(
                "https://a.example/", "response", payload=io.BytesIO(body), http_headers=http
            )
            writer.write_record(record)
    found = responses(path)
    assert [response.encoding for response in found] == ["zstd", "zstd", ""]
    reasons = [main_text(response, ExtractionSettings()) for response in found]
    assert reasons[0] == Drop("content encoding that is not read", "zstd")
    assert not any(isinstance(reason, Drop) for reason in reasons[1:])


def test_of_a_page_beyond_the_limit_only_the_beginning_is_held(tmp_path: Path) -> None:
    path = tmp_path / "a.warc.gz"
    path.write_bytes(b"".join(warc_bytes([b"<p>" + b"a" * 10_000_000, page(1)])))
    first, second = responses(path)
    assert LIMIT < len(first.body) <= LIMIT + 1
    assert second.body == page(1)


def test_all_records_in_one_gzip_member_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.warc.gz"
    path.write_bytes(gzip.compress(b"".join(warc_bytes([page(0), page(1), page(2)], compressed=False))))
    assert [response.body for response in responses(path)] == [page(0), page(1), page(2)]
    plan = plan_extraction(list_files([str(path)]), {})
    collect(plan, tmp_path / "work", extract_shard, ExtractionSettings(), SerialEngine())
    (shard,) = list_documents(tmp_path / "work")
    assert [document["id"] for document in read_documents(shard)] == ["a:0", "a:0+1", "a:0+2"]


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
    first, second = warc_bytes([page(0), page(1)], compressed=False)
    assert old in first
    header, line, rest = first.replace(old, new).partition(b"Content-Length: ")
    number, _, rest = rest.partition(b"\r\n")
    if old.startswith(b"HTTP"):
        number = str(int(number) + len(new) - len(old)).encode()
    path = tmp_path / "a.warc"
    path.write_bytes(header + line + number + b"\r\n" + rest + second)
    assert "https://a.example/1" in whole(path)
    assert len(responses(path)) == 2


def test_a_fault_of_the_parser_costs_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(page: str) -> str:
        raise ZeroDivisionError("in the parser")

    monkeypatch.setattr("nemotron.data_prep.curation.extraction._extract", fails)
    assert main_text(html(page(1)), ExtractionSettings()) == Drop(
        "unreadable markup", "ZeroDivisionError: in the parser"
    )


@pytest.mark.parametrize(("name", "message"), [("a.warc.wet.gz", "holds text"), ("a.warc.zst", "only \\*.gz are read")])
def test_files_that_would_give_nothing_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=message):
        plan_extraction(list_files([str(tmp_path)], formats=("warc",)), {})
