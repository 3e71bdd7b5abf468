"""A user's source: documents of mixed files in parts, the same ones whoever reads them; limits; what is skipped."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.corpus import curate
from nemotron.data_prep.sources import user
from nemotron.data_prep.sources.documents import Document, Part, Skipped
from nemotron.data_prep.sources.locations import file_digests, list_files
from nemotron.data_prep.sources.user import UserSource, user_documents
from nemotron.data_prep.work.engines import PoolEngine

from .written import every_format, json_lines, response, warc

PARAGRAPH = (
    "This page tells of the harbour, of the boats that leave it before the sun is up, and of the people who mend the "
    "nets on the quay while they wait for them to come back with the catch of the night. "
)


def documents(*paths: Path, **settings: Any) -> tuple[list[Document], list[Skipped]]:
    source = UserSource("mine", tuple(map(str, paths)), **settings)
    items = [
        item
        for part in user_documents(source, source.files(), seed=0)
        for item in (part.documents() if isinstance(part, Part) else [part])
    ]
    found = [item for item in items if isinstance(item, Document)]
    return found, [item for item in items if isinstance(item, Skipped)]


def test_documents_have_names_of_their_own_and_are_split_by_their_text(tmp_path: Path) -> None:
    paths = every_format(tmp_path, [{"body": f"text {i}"} for i in range(200)])
    found, skipped = documents(tmp_path, text_field="body", valid_fraction=0.2)
    assert len({document.id for document in found}) == len(found) == 200 * len(paths)
    assert skipped == []
    splits: dict[str, set[str]] = {}
    for document in found:
        splits.setdefault(document.text, set()).add(document.split)
    assert all(len(split) == 1 for split in splits.values())
    assert 20 < sum(split == {"valid"} for split in splits.values()) < 60  # 40 expected, standard deviation 5.7


def test_large_files_that_cannot_be_cut_give_the_same_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"text {i}"} for i in range(500)] + [{"txt": "x"}]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json_lines(rows)))
    expected = documents(tmp_path, on_error="skip")
    monkeypatch.setattr(user, "_LARGE_BYTES", 100)
    monkeypatch.setattr(user, "_BATCH_CHARS", 100)
    assert documents(tmp_path, on_error="skip") == expected
    assert [(item.reason, item.count) for item in expected[1]] == [("field is missing", 1)]


def test_main_text_is_taken_out_of_pages(tmp_path: Path) -> None:
    pytest.importorskip("trafilatura", exc_type=ImportError)
    menu = "<nav><ul><li><a href='/'>Home</a><li><a href='/a'>About us</a></ul></nav>"
    page = f"<html><body>{menu}<article><h1>Harbour</h1>{f'<p>{PARAGRAPH}</p>' * 4}</article></body></html>"
    records = [response("http://e.org/1", page.encode()), response("http://e.org/2", b"<html></html>")]
    (tmp_path / "a.warc.gz").write_bytes(warc([*records, ("conversion", "http://e.org/1", b"of a WET file", None)]))
    found, skipped = documents(tmp_path)
    assert [document.id.rsplit("/", 1)[-1] for document in found] == ["a.warc.gz:2", "a.warc.gz:4"]
    assert PARAGRAPH.strip() in found[0].text
    assert "About us" not in found[0].text
    assert found[1].text == "of a WET file"
    assert sorted(item.count for item in skipped) == [1, 1]  # warcinfo, the page without text


def test_curation_takes_parts_counts_skips_and_keeps_to_limits(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": f"{i} {PARAGRAPH} {i * 7919} {PARAGRAPH[i:]}"} for i in range(60)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(json_lines(rows[:30]) + b"{\n")
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(rows[30:])))
    source = UserSource("mine", (str(tmp_path / "in"),), on_error="skip")

    def curated(name: str, engine: PoolEngine | None, limit: int | None) -> list[dict[str, str | int]]:
        parts = user_documents(source, source.files(), 0)
        limits = {"mine": limit} if limit else None
        return curate(parts, tmp_path / name, engine=engine, limits=limits).table.rows()

    rows_of = {(row["outcome"]): row["documents"] for row in curated("serial", None, None)}
    assert rows_of["read"] == 60
    assert rows_of["not read: malformed JSON"] == 1
    with PoolEngine(2) as engine:
        assert curated("pool", engine, None) == curated("serial", None, None)
        assert curated("pool", engine, 37) == curated("serial", None, 37)
    few = {row["outcome"]: row["documents"] for row in curated("few", None, 37)}
    assert few["read"] == few["the first only (max_documents)"] == 37
    assert not any("max_documents" in str(row["outcome"]) for row in curated("all", None, 60))
    with pytest.raises(UserError, match=r"a\.jsonl:31: malformed JSON"):
        parts = user_documents(UserSource("mine", source.paths), source.files(), 0)
        curate(parts, tmp_path / "stop")


def test_a_bad_record_behind_the_limit_stops_nobody(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": f"{i} {PARAGRAPH} {i * 7919} {PARAGRAPH[i:]}"} for i in range(30)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(json_lines(rows))
    (tmp_path / "in" / "b.jsonl").write_bytes(b"{\n")  # which another worker reads at the same time
    source = UserSource("mine", (str(tmp_path / "in"),))
    with PoolEngine(2) as engine:
        table = curate(user_documents(source, source.files(), 0), tmp_path / "w", engine=engine, limits={"mine": 30})
        assert table.table.read["mine"].documents == 30
        with pytest.raises(UserError, match=r"b\.jsonl:1: malformed JSON") as caught:
            curate(user_documents(source, source.files(), 0), tmp_path / "w", engine=engine, limits={"mine": 31})
    assert caught.value.hint == "on_error: skip leaves such out and counts them"
    (tmp_path / "in" / "b.jsonl").write_bytes(b'{"txt": "x"}\n')
    with pytest.raises(UserError, match=r"b\.jsonl:1: ") as caught:
        curate(user_documents(source, source.files(), 0), tmp_path / "w")
    assert caught.value.hint == "fields there: txt; on_error: skip leaves such out and counts them"


@pytest.mark.parametrize("cap", [10, 29, 30, 31, 59, 60])
def test_a_cap_that_leaves_something_out_says_so(tmp_path: Path, cap: int) -> None:
    rows: list[Any] = [{"text": f"{i} {PARAGRAPH} {i * 7919} {PARAGRAPH[i:]}"} for i in range(60)]
    (tmp_path / "in").mkdir()
    for name, part in (("a", rows[:30]), ("b", rows[30:])):
        (tmp_path / "in" / f"{name}.jsonl").write_bytes(json_lines(part))
    source = UserSource("mine", (str(tmp_path / "in"),), max_documents=cap)
    table = curate(user_documents(source, source.files(), 0), tmp_path / "w", limits={"mine": cap}).table
    assert table.read["mine"].documents == cap
    said = f"max_documents: the first {cap} documents of mine; more are there"
    assert (said in str(table)) == (cap < 60)


def test_digests(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    [digest] = file_digests(list_files([str(tmp_path / "a.txt")]))
    # FIPS 180-2, appendix B.1
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert digest == {"name": str(tmp_path / "a.txt"), "sha256": sha256, "detail": "3 bytes"}
