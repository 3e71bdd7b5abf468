"""The user's own files: paths and globs, three formats, and every kind of bad input with its message."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_runspec.errors import UserError
from nemotron.data_prep.jsonl import read_jsonl, write_jsonl
from nemotron.data_prep.sources import UserSource, expand_paths, file_digests, user_documents


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(*paths: object, **settings: object) -> list[tuple[str, str]]:
    source = UserSource("mine", tuple(map(str, paths)), **settings)  # type: ignore[arg-type]
    return [(document.id.rsplit("/", 1)[-1], document.text) for document in user_documents(source, seed=0)]


def test_three_formats(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", {"text": "one"}, "", {"text": "two", "n": 1})
    pq.write_table(pa.table({"text": ["three", "four"]}), tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("five\n")
    expected = [("a.jsonl:1", "one"), ("a.jsonl:3", "two"), ("b.parquet:1", "three"), ("b.parquet:2", "four")]
    assert read(tmp_path / "*") == [*expected, ("c.txt:1", "five\n")]
    assert read(tmp_path / "*", max_documents=3) == expected[:3]


def test_order_and_repetition_of_paths_do_not_matter(tmp_path: Path) -> None:
    a = lines(tmp_path / "a.jsonl", {"text": "a"})
    (tmp_path / "deep" / "er").mkdir(parents=True)
    b = lines(tmp_path / "deep" / "er" / "b.jsonl", {"text": "b"})
    assert expand_paths([str(b), str(a), str(tmp_path / "**" / "*.jsonl")]) == [a, b]


def test_a_name_with_brackets_is_a_name_if_it_exists(tmp_path: Path) -> None:
    assert read(lines(tmp_path / "data[1].jsonl", {"text": "x"})) == [("data[1].jsonl:1", "x")]


def test_a_long_text_file_becomes_several_documents(tmp_path: Path) -> None:
    paragraph = "word " * 2000 + "\n\n"
    (tmp_path / "book.txt").write_text(paragraph * 25)
    documents = read(tmp_path / "book.txt")
    assert [len(text) for _, text in documents] == [100_020, 100_020, 50_010]
    assert "".join(text for _, text in documents) == paragraph * 25


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "x"', r"a\.jsonl:2: malformed JSON: Expecting ',' delimiter \(column 13\)"),
        ("[1]", r"a\.jsonl:2: expected a JSON object, found list"),
        ("not json", r"a\.jsonl:2: malformed JSON"),
        ('{"txt": "x"}', r"a\.jsonl:2: field 'text' is missing, did you mean 'txt'\?"),
        ('{"text": 3}', r"a\.jsonl:2: field 'text' is not text"),
        ("[" * 100_000, r"a\.jsonl:2: malformed JSON"),
    ],
)
def test_bad_lines_name_file_and_line(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        read(lines(tmp_path / "a.jsonl", {"text": "fine"}, line))


def test_bad_bytes_name_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: not UTF-8"):
        read(tmp_path / "a.jsonl")
    (tmp_path / "a.txt").write_bytes(b"fine\xff")
    with pytest.raises(UserError, match=r"a\.txt: not UTF-8"):
        read(tmp_path / "a.txt")


def test_missing_and_empty_inputs(tmp_path: Path) -> None:
    lines(tmp_path / "notes.jsonl")
    with pytest.raises(UserError, match="no such file") as caught:
        read(tmp_path / "note.jsonl")
    assert caught.value.hint == f"did you mean {tmp_path / 'notes.jsonl'}?"
    with pytest.raises(UserError, match="no file matches"):
        read(tmp_path / "*.parquet")
    with pytest.raises(UserError, match="is a directory"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"source 'mine' is empty: no document in .*notes\.jsonl"):
        read(tmp_path / "notes.jsonl")
    with pytest.raises(UserError, match=r"unknown file type '\.csv'"):
        read(lines(tmp_path / "a.csv"))


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(UserError, match=r"a\.parquet: not a readable Parquet file"):
        read(tmp_path / "a.parquet")


def test_digests(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    [digest] = file_digests([tmp_path / "a.txt"])
    # FIPS 180-2, appendix B.1
    assert digest["sha256"] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert digest["bytes"] == 3


@settings(deadline=None)
@given(
    st.lists(st.dictionaries(st.text(max_size=4), st.one_of(st.text(max_size=8), st.integers(), st.none())), max_size=5)
)
def test_jsonl_round_trips(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]]) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "x.jsonl"
    assert write_jsonl(path, rows) == len(rows)
    assert [row for _, row in read_jsonl(path)] == rows
