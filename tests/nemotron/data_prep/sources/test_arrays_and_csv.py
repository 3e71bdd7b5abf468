"""JSON arrays and CSV: the rows that the standard library reads, whatever the size of the pieces that arrive."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_runspec.errors import UserError
from nemotron.data_prep.sources import lines
from nemotron.data_prep.sources.files import BEGIN_BYTES

from .test_policy import both
from .written import read

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ITEMS = st.dictionaries(TEXT, VALUES, max_size=3) | st.integers() | st.lists(st.integers(), max_size=2)


@settings(max_examples=60)
@given(st.lists(ITEMS, max_size=8), st.integers(1, 40), st.sampled_from([None, 0, 3]), st.booleans())
def test_an_array_gives_what_json_reads(
    tmp_path_factory: pytest.TempPathFactory, items: list[Any], buffer: int, indent: int | None, ascii_only: bool
) -> None:
    path = tmp_path_factory.mktemp("array") / "a.json"
    blank = " " * (buffer % BEGIN_BYTES)
    path.write_text(blank + json.dumps(items, indent=indent, ensure_ascii=ascii_only) + 3 * blank + "\n", "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_BUFFER", buffer)  # bytes that arrive at a time
        rows, report = read(path, on_error="skip", required=())
    expected = [(f"a.json, record {i}", item) for i, item in enumerate(items, 1) if isinstance(item, dict)]
    assert rows == expected
    others = len(items) - len(expected)
    assert report.errors() == ({"not a JSON object": others} if others else {})


@pytest.mark.parametrize(
    ("content", "complaint", "left"),
    [
        ('[{"text": "a"}, {"text": "b"', r"not a readable JSON file \(item 2: Expecting ',' delimiter\)", 1),
        ('[{"text": "a"}', r"not a readable JSON file \(item 2: Expecting value\)", 1),
        ('[{"text": "a"}, {"text": b}, {"text": "c"}]', r"not a readable JSON file \(item 2: Expecting value\)", 1),
        ('[{"text": "a"}, {"text": "%s"}]' % ("x" * 50_000), "item 2 is longer than 4000 bytes", 1),
        ('[{"text": "a"}]\n[{"text": "b"}]', r"'\[\{\"text\": \"b\"\}\]' behind the array of 1 items", 1),
        (
            '[{"text": "a"}]%s{"text": "b"}' % (" " * 9000),
            "behind the array of 1 items.*a.json, record 1 is not read",
            1,
        ),
        ('[{"text": "a"}]]', r"'\]' behind the array of 1 items", 1),
        ("[]x", "'x' behind the array of 0 items", 0),
        ("[" * 100_000, r"not a readable JSON file \(item 1", 0),
    ],
)
def test_an_array_that_is_none_is_a_damaged_file(
    tmp_path: Path, content: str, complaint: str, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_BUFFER", 64)
    (tmp_path / "a.json").write_text(content)
    both(tmp_path / "a.json", complaint, "damaged file", left, max_record_bytes=4000)


def test_an_item_of_an_array_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "a"},\n {"txt": "b"}, {"text": "\\ud800"}, {"text": "c"}]')
    with pytest.raises(UserError, match=r"a\.json, record 2: field 'text' is missing, did you mean 'txt'"):
        read(tmp_path / "a.json")
    rows, report = read(tmp_path / "a.json", on_error="skip")
    assert [value["text"] for _, value in rows] == ["a", "c"]
    assert report.skipped == {"field is missing": 1, "malformed JSON": 1}


def test_an_array_whose_name_promises_lines_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for content in (
        '[\n{"text": "a"},\n{"text": "b"}\n]\n',
        '[{"text": "a"}, {"text": "b"}]',
        ' [{"text": "a"}\n,{"text": "b"}]',
    ):
        path.write_text(content)
        assert [value["text"] for _, value in read(path)[0]] == ["a", "b"]
    path.write_text('[{"text": "a"}]\n[{"text": "b"}]\n')  # lines all the same, and no records
    both(path, r"a\.jsonl:1: not a JSON object: expected a JSON object, found list", "not a JSON object", 0, 2)
    path.write_text('[INFO] saved\n{"text": "b"}\n')
    both(path, r"a\.jsonl:1: malformed JSON", "malformed JSON", 1)
    # What is inside a compressed file, or far away, is not looked at when it is listed.
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'[\n{"text": "a"}\n]\n'))
    with pytest.raises(UserError, match=r"a\.jsonl\.gz:1: malformed JSON") as caught:
        read(tmp_path / "a.jsonl.gz")
    assert caught.value.hint == "a JSON array is read from a file whose name ends in .json or .json.gz"
    (tmp_path / "pretty.json").write_text(json.dumps({"data": [{"text": "x"}]}, indent=1))
    with pytest.raises(UserError, match="malformed JSON") as caught:
        read(tmp_path / "pretty.json")
    assert caught.value.hint == "an object of several lines: write one a line, or an array of them"


@settings(max_examples=40)
@given(
    st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=6),
    st.sampled_from(["csv", "tsv", "csv.gz", "TSV", "tsv.csv"]),
)
def test_csv_gives_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, values: list[tuple[str, str, str]], suffix: str
) -> None:
    content = io.StringIO(newline="")
    writer = csv.writer(content, delimiter="\t" if suffix.lower() == "tsv" else ",")
    writer.writerows([("text", "other", "a b"), *values])
    data = content.getvalue().encode("utf-8-sig")
    path = tmp_path_factory.mktemp("csv") / f"a.{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    rows, report = read(path, required=())
    assert [tuple(value.get(name, "") for name in ("text", "other", "a b")) for _, value in rows] == values
    assert all(cell for _, value in rows for cell in value.values())  # an empty cell is a field that is missing
    assert report.errors() == {}
    renamed, _ = read(path, columns={"text": "a b"}, required=())
    assert [value.get("text", "") for _, value in renamed] == [value for _, _, value in values]


def test_columns_of_csv_without_a_name_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "pandas.csv").write_text(",text,\n0,fine,\n1,too,x\n")
    assert [value for _, value in read(tmp_path / "pandas.csv")[0]] == [{"text": "fine"}, {"text": "too"}]


def test_bad_rows_of_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,n\n"fine, ""so""\nto say",1\nshort\n\nfine,2\n')
    both(path, r"a\.csv:2: malformed CSV row: 1 field under 2 names", "malformed CSV row", 2)
    path.write_bytes(b"text,n\nfine,1\nb\xffd,2\nfine,3\n")
    both(path, r"a\.csv:2: not UTF-8", "not UTF-8", 2)
    path.write_bytes(b'text\nfine\n"never ends\n')
    both(path, "not a readable CSV file .*unexpected end of data", "damaged file", 1)
    path.write_bytes(b"text,text\na,b\n")
    both(path, "not a readable CSV file .*the header needs names, each another: text, text", "damaged file", 0)
    path.write_bytes(b",,\na,b,c\n")
    both(path, "not a readable CSV file .*the header needs names", "damaged file", 0)
    path.write_bytes("text,größe\nfine,1\n".encode("latin-1"))
    both(path, "not a readable CSV file .*the header is not UTF-8: gr\ufffd\ufffde", "damaged file", 0)
    path.write_bytes("text,n\nfine,1\n".encode("utf-16"))
    both(path, r"a\.csv:1: not UTF-8: the file is UTF-16", "not UTF-8", 0)
    path.write_bytes(b"text\nfine\n" + b"x" * 5000 + b"\n")
    both(path, "not a readable CSV file .*field larger than field limit", "damaged file", 1, max_record_bytes=4000)
    path.write_bytes(b"text,n\nfine,1\n,2\n")
    both(path, r"a\.csv:2: field 'text' is missing", "field is missing", 1)
    path.write_bytes(b"body\nfine\n")
    both(path, r"a\.csv:1: field 'text' is missing", "field is missing", 0)
