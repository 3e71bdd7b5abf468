"""Rows read are the rows written, whatever they were written with."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import struct
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_runspec.errors import UserError

from .written import arrow, every_format, json_lines, parquet, read, response, warc, zstd

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), min_size=1, max_size=3)
ROWS = st.lists(st.fixed_dictionaries({"text": TEXT, "n": st.integers(0, 9), "m": MESSAGES}), min_size=1, max_size=12)


@settings(max_examples=40)
@given(ROWS, st.integers(50, 3000))
def test_every_format_gives_the_rows_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], target_bytes: int
) -> None:
    for path in every_format(tmp_path_factory.mktemp("rows"), rows).values():
        found, report = read(path, target_bytes=target_bytes)
        assert [value for _, value in found] == rows, path.name
        assert (report.records, report.skipped) == (len(rows), {})


def test_several_members_and_frames_are_one_file(tmp_path: Path) -> None:
    parts = [json_lines([{"text": f"{i}"}]) for i in range(3)]
    # A line may go on in the next member.
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(parts[0][:5]) + gzip.compress(parts[0][5:] + parts[1]))
    (tmp_path / "b.jsonl.zst").write_bytes(zstd(parts[0][:5]) + zstd(parts[0][5:]) + zstd(parts[1] + parts[2]))
    size = b"\x50\x2a\x4d\x18" + struct.pack("<II", 4, len(zstd(parts[0])))  # pzstd begins with the next frame's
    (tmp_path / "c.jsonl.zst").write_bytes(size + zstd(parts[0]) + size + zstd(parts[1]))
    (tmp_path / "d.warc").write_bytes(size + zstd(warc([response("http://e.org/", b"page")], gz=False, info=False)))
    found, report = read(tmp_path, required=())
    texts = [value.get("text", value.get("html")) for _, value in found]
    assert texts == ["0", "1", "0", "1", "2", "0", "1", "page"] and not report.errors()


def test_a_batch_without_rows_ends_nothing(tmp_path: Path) -> None:
    schema = pa.schema([("text", pa.string())])
    batches = [pa.record_batch([pa.array(texts, pa.string())], schema=schema) for texts in (["0"], [], ["1"], [])]
    for name, new in (("a.arrow", pa.ipc.new_file), ("b.arrows", pa.ipc.new_stream)):
        with new(str(tmp_path / name), schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    with pq.ParquetWriter(tmp_path / "c.parquet", schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    for target_bytes in (1, 1 << 30):
        found, report = read(tmp_path, target_bytes=target_bytes)
        assert [value["text"] for _, value in found] == ["0", "1"] * 3
        assert (report.records, report.skipped) == (6, {})


def test_a_mark_of_byte_order_alone_on_its_line_is_blank(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.jsonl").write_bytes(mark + b'\r\n{"text": "a"}\r\n')
    (tmp_path / "b.jsonl").write_bytes(mark)
    found, report = read(tmp_path)
    assert found == [("a.jsonl:2", {"text": "a"})] and report.skipped == {"empty file": 1}


def test_columns_are_renamed_projected_and_found_in_objects(tmp_path: Path) -> None:
    rows = [{"body": f"b{i}", "meta": {"url": {"s": f"u{i}"}, "n": 1}, "more": [1]} for i in range(3)]
    columns = {"text": "body", "url": "meta.url.s", "date": "meta.date"}
    for path in every_format(tmp_path, rows).values():
        found, _ = read(path, columns=columns)
        assert [value for _, value in found] == [{"text": f"b{i}", "url": f"u{i}"} for i in range(3)], path.name


def test_a_name_with_a_dot_is_a_name_first(tmp_path: Path) -> None:
    rows = [{"a.b": "dotted", "a": {"b": "nested"}}]
    (tmp_path / "a.jsonl").write_bytes(json_lines(rows))
    assert read(tmp_path, columns={"text": "a.b"})[0] == [("a.jsonl:1", {"text": "dotted"})]


def test_optional_columns_that_a_table_lacks_cost_no_row(tmp_path: Path) -> None:
    for path in every_format(tmp_path, [{"other": i} for i in range(10)]).values():
        found, report = read(path, columns={"url": "link"}, required=())
        assert [value for _, value in found] == [{}] * 10
        assert report.records == 10


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_objects_of_a_table_have_the_fields_that_they_were_written_with(tmp_path: Path, name: str) -> None:
    calls: list[dict[str, Any]] = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"y": [None, 2]}}]
    rows = [{"text": "x", "calls": calls, "more": {"a": 1}, "n": 1}, {"text": "y", "calls": [], "more": {"b": "c"}}]
    (tmp_path / name).write_bytes(parquet(rows) if name == "a.parquet" else arrow(rows))
    found, _ = read(tmp_path / name)
    assert [row for _, row in found] == [rows[0], {**rows[1], "n": None}]  # a column itself is there
    with pytest.raises(UserError, match=r"field 'more\.a' is null"):
        read(tmp_path / name, columns={"text": "text", "a": "more.a"}, present=("a",))


def test_other_types_of_text_and_of_values(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": pa.array(["a", "b"]).dictionary_encode(),
            "large": pa.array(["c", "d"], pa.large_string()),
            "when": pa.array([1, 1_700_000_000_123_456_789], pa.timestamp("ns")),
            "day": pa.array([datetime.date(2024, 2, 29), None]),
            "price": pa.array([decimal.Decimal("1.50"), None]),
            "calls": pa.array([[{"day": datetime.date(2024, 2, 29), "n": 1}], None]),
            "days": pa.array([[datetime.date(2024, 2, 29)], None], pa.list_(pa.date32(), 1)),
            "took": pa.array([90, None], pa.duration("s")),
            "id": pa.array([uuid.UUID(int=1).bytes, None], pa.uuid()),
            "tags": pa.array(
                [[("a", [("b", datetime.date(2024, 2, 29))]), ("c", [])], None], map_of(map_of(pa.date32()))
            ),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    found, _ = read(tmp_path)
    first: dict[str, object] = {
        "text": "a",
        "large": "c",
        "when": "1970-01-01 00:00:00.000000001",
        "day": "2024-02-29",
        "price": "1.50",
    }
    first["calls"] = [{"day": "2024-02-29", "n": 1}]
    first |= {"days": ["2024-02-29"], "took": "90", "id": str(uuid.UUID(int=1))}
    first["tags"] = {"a": {"b": "2024-02-29"}, "c": {}}
    assert [found[0][1], found[2][1]] == [first] * 2
    assert found[1][1]["when"] == "2023-11-14 22:13:20.123456789"
    json.dumps(found)  # what was read can be written
    found, _ = read(tmp_path, columns={"text": "tags.a.b"}, on_error="skip")
    assert [value for _, value in found] == [{"text": "2024-02-29"}] * 2


def map_of(kind: pa.DataType) -> pa.DataType:
    return pa.map_(pa.string(), kind)


def test_two_columns_of_one_name_are_refused_where_they_are_read(tmp_path: Path) -> None:
    table = pa.table([["one"], ["two"], ["three"]], names=["text", "text", "id"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "b.arrow"):
        with pytest.raises(UserError, match=rf"{name}: .*2 columns of the name 'text'"):
            read(tmp_path / name)
        assert [value for _, value in read(tmp_path / name, columns={"text": "id"})[0]] == [{"text": "three"}]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_row_is_as_long_as_its_own_values_and_not_as_its_dictionary(tmp_path: Path, name: str) -> None:
    texts = [f"{i:03d}" * 100 for i in range(30)]
    roles = pa.StructArray.from_arrays([pa.array(["user"] * 30).dictionary_encode()], ["role"])
    table = pa.table({"text": pa.array(texts).dictionary_encode(), "turns": pa.ListArray.from_arrays(range(31), roles)})
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        with pa.OSFile(str(tmp_path / name), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    found, report = read(tmp_path, max_record_bytes=1000, on_error="skip")
    assert [row for _, row in found] == [{"text": text, "turns": [{"role": "user"}]} for text in texts]
    assert not report.skipped


def test_byte_order_marks_and_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    (tmp_path / "b.md").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert [value["text"] for _, value in read(tmp_path)[0]] == ["a", "b", "one\ntwo\nthree\n"]


def test_text_is_a_document_a_file_and_long_ones_are_cut_at_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    paragraph = "word " * 2000 + "\n\n"
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress((paragraph * 25).encode()))
    found, _ = read(tmp_path)
    assert found[0] == ("a.py:1", {"text": "x = 1\n", "path": str(tmp_path / "a.py")})
    assert [(place, len(value["text"])) for place, value in found[1:]] == [
        ("book.txt.gz:1", 100_020), ("book.txt.gz:2", 100_020), ("book.txt.gz:3", 50_010)
    ]  # fmt: skip
    assert "".join(value["text"] for _, value in found[1:]) == paragraph * 25


def test_blank_lines_at_the_end_are_no_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 200_000 + b"\n\n\n \n")
    (tmp_path / "b.txt").write_bytes(b"x" * 200_000 + b"\n\n\ny")
    found, report = read(tmp_path)
    assert [(name, len(value["text"])) for name, value in found] == [
        ("a.txt:1", 200_002), ("b.txt:1", 200_002), ("b.txt:2", 2)
    ]  # fmt: skip
    assert report.records == 3 and report.skipped == {}


@pytest.mark.parametrize("gz", [True, False])
def test_pages_and_texts_of_a_crawl(tmp_path: Path, gz: bool) -> None:
    page = "<html><body>café – ok</body></html>"
    packed = gzip.compress(page.encode())
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (packed[:9], packed[9:])) + b"0\r\n\r\n"
    (tmp_path / ("a.warc.gz" if gz else "a.warc")).write_bytes(
        warc(
            [
                response("http://e.org/1", page.encode(), Content_Type="text/html; charset=UTF-8"),
                ("request", "http://e.org/1", b"GET / HTTP/1.1\r\n\r\n", None),
                response("http://e.org/2", b"moved", "301 Moved"),
                response("http://e.org/3", b"\x89PNG", Content_Type="image/png"),
                response("http://e.org/4", page.encode("cp1252"), Content_Type="text/html; charset=iso-8859-1"),
                response("http://e.org/5", b'<meta charset="koi8-r">' + "да".encode("koi8-r")),
                response("http://e.org/6", chunked, Transfer_Encoding="chunked", Content_Encoding="gzip"),
                response("http://e.org/7", b"plain \xff", Content_Type="text/plain"),
                response("http://e.org/8", b"\xff?", Content_Encoding="br"),
                ("conversion", "http://e.org/1", "café".encode(), None),
            ],
            gz=gz,
        )
    )
    found, report = read(tmp_path, required=())
    date = "2024-05-06T07:08:09Z"
    kinds = {"html": "text/html", "text": "text/plain"}
    texts = [
        (2, "html", 1, page),
        (6, "html", 4, page),
        (7, "html", 5, '<meta charset="koi8-r">да'),
        (8, "html", 6, page),
        (9, "text", 7, "plain ÿ"),
    ]
    name = "a.warc.gz" if gz else "a.warc"
    assert found == [
        (f"{name}:{number}", {kind: text, "url": f"http://e.org/{i}", "date": date, "content_type": kinds[kind]})
        for number, kind, i, text in texts
    ] + [(f"{name}:11", {"text": "café", "url": "http://e.org/1", "date": date})]
    assert report.records == 6
    assert report.skipped == {
        "WARC record of another kind": 2,
        "HTTP status other than 200": 1,
        "neither HTML nor text": 1,
        "content encoding that is not read": 1,
    }
    assert report.errors() == {}
