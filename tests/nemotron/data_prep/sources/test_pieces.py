"""Any cut of any file gives exactly its records, each once and at its place."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron.data_prep.sources.files import Piece, SourceFile
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.reader import pieces_of, read_piece, row_id, where, whole
from nemotron.data_prep.sources.reading import Reading, ReadReport

from .written import arrow, every_format, json_lines, parquet, read

# Lines of every kind, ended in every way; the last one may have no end.
LINES = st.lists(
    st.sampled_from(
        [b'{"text": "a"}', b'{"text": "\xc3\xa9"}', b"", b"  ", b"[1]", b'{"x": 1}', b"{", b'"\xff"', b"\xff"]
    )
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\n\n"])


def expected(data: bytes) -> dict[int, str | None]:
    """Line number -> text, or None for a line that has to be skipped: another way to read, at once."""
    found: dict[int, str | None] = {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            try:
                value = json.loads(line.decode())
                found[number] = value["text"] if isinstance(value, dict) else None
            except (ValueError, KeyError):
                found[number] = None
    return found


@settings(max_examples=200)
@given(LINES, ENDS, st.booleans(), st.lists(st.floats(0, 1), max_size=6))
def test_any_cut_of_json_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], end: bytes, ended: bool, cuts: list[float]
) -> None:
    data = end.join(lines) + end * ended
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_bytes(data)
    [file] = list_files([str(path)])
    borders = [0, *sorted(round(cut * len(data)) for cut in cuts), len(data)]
    report = ReadReport()
    found: dict[str, str] = {}
    for i in range(len(borders) - 1):
        piece = Piece(file, borders[i], borders[i + 1], borders[i + 1] - borders[i])
        for row in read_piece(piece, Reading("skip"), report):
            place = where(piece, row.index)
            assert place not in found
            found[place] = row.value["text"]
    wanted = expected(data)
    assert found == {f"{path}:{number}": text for number, text in wanted.items() if text is not None}
    assert report.records == len(found)
    assert sum(report.errors().values()) == sum(text is None for text in wanted.values())
    for sample in report.samples:
        if sample["where"] != str(path):
            assert wanted[int(sample["where"].rpartition(":")[2])] is None


@settings(max_examples=60)
@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 4000), st.sampled_from(["parquet", "arrow", "stream"]))
def test_any_division_of_a_table(
    tmp_path_factory: pytest.TempPathFactory, count: int, group_rows: int, target_bytes: int, kind: str
) -> None:
    rows = [{"text": f"row {i}", "n": i} for i in range(count)] or [{"text": "x", "n": 0}]
    path = tmp_path_factory.mktemp("table") / ("a.parquet" if kind == "parquet" else "a.arrow")
    content = parquet(rows, group_rows) if kind == "parquet" else arrow(rows, group_rows, stream=kind == "stream")
    path.write_bytes(content)
    [file] = list_files([str(path)])
    if kind == "stream":
        assert pieces_of(file, target_bytes) == [whole(file)]
    found, report = read(path, target_bytes=target_bytes)
    assert found == [(f"{path.name}:{i + 1}", row) for i, row in enumerate(rows)]
    assert (report.records, report.skipped) == (len(rows), {})


def test_pieces_have_about_the_size_asked_for_and_are_the_same_every_time(tmp_path: Path) -> None:
    rows = [{"text": "x" * 50, "n": i} for i in range(2000)]
    for name, content in {
        "a.jsonl": json_lines(rows), "b.parquet": parquet(rows, 100), "c.arrow": arrow(rows, 100)
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
        [file] = list_files([str(tmp_path / name)])
        pieces = pieces_of(file, file.size // 5)
        assert 4 <= len(pieces) <= 8, name  # metadata is in no piece
        assert pieces == pieces_of(file, file.size // 5)
        assert sum(piece.size for piece in pieces) <= file.size
        assert pieces[0].begin == 0
        assert all(before.end == after.begin for before, after in pairwise(pieces))


def test_what_cannot_be_cut_is_one_piece(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": "x" * 50} for i in range(100)]
    for name, path in every_format(tmp_path, rows).items():
        [file] = list_files([str(path)])
        assert (len(pieces_of(file, 100)) > 1) == (
            name in ("plain.jsonl", "lines.json", "table.parquet", "file.arrow", "packed.feather")
        )
        assert pieces_of(file, 1 << 20) == [whole(file)]
        with pytest.raises(ValueError, match="target_bytes 0 must be at least 1"):
            pieces_of(file, 0)


def test_row_ids_tell_addresses_apart_whose_query_is_not_shown() -> None:
    ids = [
        row_id(whole(SourceFile(f"https://host/data.jsonl{query}", 10, "", "jsonl")), 0)
        for query in ("", "?n=1", "?n=2")
    ]
    assert ids[0] == "https://host/data.jsonl:1" and len(set(ids)) == 3
    assert not any("n=" in each for each in ids)
