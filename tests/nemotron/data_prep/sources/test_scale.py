"""A share of a source: the same records however it is read, a larger share holds a smaller, and it is no loss."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from nemo_runspec.errors import UserError
from nemotron.data_prep.sources.reading import check_scale

from .written import every_format, json_lines, parquet, read

ROWS = [{"text": f"record {number} of this source"} for number in range(3000)]


def taken(*paths: Path, **how: float) -> list[str]:
    rows, report = read(*paths, **how)
    assert len(rows) == report.records == len(ROWS) - report.skipped.get("beyond scale", 0)
    assert not report.errors() and not report.samples
    return [value["text"] for _, value in rows]


@pytest.mark.slow
def test_a_share_is_the_same_records_in_every_format_and_any_number_of_pieces(tmp_path: Path) -> None:
    files = every_format(tmp_path, ROWS)
    small = taken(files["plain.jsonl"], share=0.1, seed=1)
    # So many, within five standard deviations of a binomial draw.
    assert abs(len(small) - 300) < 5 * math.sqrt(3000 * 0.1 * 0.9)
    for path in files.values():
        assert taken(path, share=0.1, seed=1) == small
        assert taken(path, share=0.1, seed=1, target_bytes=5000) == small
    medium = taken(files["plain.jsonl"], share=0.3, seed=1)
    assert set(small) < set(medium)
    assert set(taken(files["plain.jsonl"], share=0.1, seed=2)) != set(small)
    assert taken(files["plain.jsonl"], share=1.0) == [row["text"] for row in ROWS]


def test_where_a_text_file_lies_does_not_decide_and_what_is_malformed_still_stops(tmp_path: Path) -> None:
    chosen = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        for number in range(50):
            (folder / f"{number}.txt").write_text(f"document {number}")
        chosen.append([value["text"] for _, value in read(folder, share=0.5)[0]])
    assert chosen[0] == chosen[1] and 10 < len(chosen[0]) < 40
    (tmp_path / "bad.jsonl").write_bytes(json_lines(ROWS[:10]) + b"{\n")
    with pytest.raises(UserError, match=r"bad.jsonl:11: malformed JSON"):
        read(tmp_path / "bad.jsonl", share=0.01)


def test_what_cannot_be_read_is_of_the_share_as_well(tmp_path: Path) -> None:
    """Else a trial with 1 % of a source of which 2 % are damaged would be refused: most of what is left of it is."""
    lines = [b"{\n" if number % 3 == 0 else json_lines([row]) for number, row in enumerate(ROWS)]
    (tmp_path / "some.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "table.parquet").write_bytes(parquet([{"body": row["text"]} for row in ROWS[:1000]]))
    for name, bad, reason in (("some.jsonl", 1000, "malformed JSON"), ("table.parquet", 1000, "field is missing")):
        rows, report = read(tmp_path / name, share=0.1, seed=1, on_error="skip")
        found = report.skipped[reason]
        assert abs(found - 0.1 * bad) < 5 * math.sqrt(bad * 0.1 * 0.9)
        size = len(ROWS) if name == "some.jsonl" else bad
        assert len(rows) + found + report.skipped["beyond scale"] == size


def test_it_is_said_how_many_were_taken(capsys: pytest.CaptureFixture[str]) -> None:
    check_scale("mine", None, records=10, beyond=0)
    assert not capsys.readouterr().err
    check_scale("mine", "small", records=1000, beyond=898)
    assert capsys.readouterr().err == "source 'mine': 102 of 1,000 records taken (--scale small)\n"
    with pytest.raises(UserError, match="source 'mine': none of its 5 records is within --scale tiny"):
        check_scale("mine", "tiny", records=5, beyond=5)
