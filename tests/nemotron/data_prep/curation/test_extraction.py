"""Pages from WARC files: damaged records are counted and never take their neighbours with them."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.extraction import (
    extract_shard,
    main_text,
    plan_extraction,
)
from nemotron.data_prep.curation.step import Drop, StepTable, collect, list_documents, read_documents
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.warc import WarcRecord
from nemotron.data_prep.work.engines import SerialEngine
from nemotron.kit.schemas.curation import ExtractionSettings

from ..sources.written import PROSE, page, warc_records

pytest.importorskip("trafilatura")

LIMIT = 100_000


def html(body: bytes, **more: object) -> WarcRecord:
    return WarcRecord(**({"offset": 0, "status": 200, "content_type": "text/html", "body": body} | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (html(b"", status=200), "empty page"),
        (html(page(1), status=404), "HTTP status 4xx"),
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
def test_reasons(response: WarcRecord, reason: str) -> None:
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
    main_text(html(body), ExtractionSettings())  # whatever comes of it, within the time limit of a test


def test_a_slow_page_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_: str) -> str:
        try:
            while True:
                pass
        except Exception:  # so does trafilatura around readability and jusText
            return PROSE

    monkeypatch.setattr("nemotron.data_prep.curation.extraction._extract", slow)
    found = main_text(html(page(1)), ExtractionSettings(max_seconds=0.1))
    assert isinstance(found, Drop)
    assert found.reason == "page too slow"


def test_a_shard_has_a_document_a_page(tmp_path: Path) -> None:
    from nemotron.data_prep.curation.step import collect

    path = tmp_path / "crawl-7.warc.gz"
    path.write_bytes(b"".join(warc_records([page(0), b"", page(2)])))
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
        (tmp_path / name / "a.warc.gz").write_bytes(warc_records([page(0)])[0])
    with pytest.raises(UserError, match="two files are called a"):
        plan_extraction(list_files([str(tmp_path)], formats=("warc",)), {})


def test_all_records_in_one_gzip_member_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.warc.gz"
    path.write_bytes(gzip.compress(b"".join(warc_records([page(0), page(1), page(2)], gz=False))))
    plan = plan_extraction(list_files([str(path)]), {})
    collect(plan, tmp_path / "work", extract_shard, ExtractionSettings(), SerialEngine())
    (shard,) = list_documents(tmp_path / "work")
    assert [document["id"] for document in read_documents(shard)] == ["a:0", "a:0+1", "a:0+2"]


def test_a_fault_of_the_parser_costs_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(page: str) -> str:
        raise ZeroDivisionError("in the parser")

    monkeypatch.setattr("nemotron.data_prep.curation.extraction._extract", fails)
    assert main_text(html(page(1)), ExtractionSettings()) == Drop(
        "unreadable markup", "ZeroDivisionError: in the parser"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.warc.wet.gz", "holds text"), ("a.warc.zst", "only \\*.gz are read"), ("a\nb.warc", "of this name")],
)
def test_files_that_would_give_nothing_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=message):
        plan_extraction(list_files([str(tmp_path)], formats=("warc",)), {})
