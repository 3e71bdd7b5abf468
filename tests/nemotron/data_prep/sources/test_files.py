"""What a location stands for: names, globs, folders with everything in them, links, and what is passed over."""

from __future__ import annotations

import gzip
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.errors import RunFailed, UserError
from nemo_runspec.installation import install_line
from nemotron.data_prep.sources.files import FORMATS, SourceFile, format_of
from nemotron.data_prep.sources.locations import described, lineage_sources, list_files, open_binary
from nemotron.data_prep.sources.reader import read_piece, whole
from nemotron.data_prep.sources.reading import Reading, ReadReport
from nemotron.data_prep.sources.warc import require_extra

from .written import json_lines, zstd


def names(files: list[SourceFile], base: Path) -> list[str]:
    return [Path(file.uri).relative_to(base).as_posix() for file in files]


def write(path: Path, content: bytes = b'{"text": "x"}\n') -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("a.jsonl", ("jsonl", "none")),
        ("A.JSONL.GZ", ("jsonl", "gzip")),
        ("a.b.ndjson.zst", ("jsonl", "zstd")),
        ("a.json", ("json", "none")),
        ("a.pq", ("parquet", "none")),
        ("a.feather", ("arrow", "none")),
        ("a.md", ("text", "none")),
        ("a.py.gz", ("text", "gzip")),
        ("CC-MAIN-1.warc.gz", ("warc", "gzip")),
        ("CC-MAIN-1.warc.wet.gz", ("warc", "gzip")),
        ("a.parquet.gz", None),
        ("a.csv", ("csv", "none")),
        ("a.xls", None),
        ("README", None),
        ("a.gz", None),
        (".jsonl", None),
    ],
)
def test_format_by_name(name: str, known: tuple[str, str] | None) -> None:
    assert format_of(name) == known


def test_a_folder_is_all_that_is_in_it_and_says_what_it_passes_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b.jsonl", "deep/er/a.md", "deep/c.parquet", "deep/d.txt.gz"):
        write(tmp_path / name)
    for name in ("t.csv", "deep/u.csv", "deep/setup.json", "README", ".hidden.jsonl", ".git/e.jsonl", "deep/x.csv.gz"):
        write(tmp_path / name)
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    passed_over: Counter[str] = Counter()
    files = list_files([str(tmp_path)], passed_over=passed_over)
    read = ["b.jsonl", "deep/c.parquet", "deep/d.txt.gz", "deep/er/a.md", "deep/x.csv.gz"]  # settings are not packed
    assert names(files, tmp_path) == read
    expected = {
        ".csv": 2, ".json": 1, "no suffix": 1, "hidden file": 1, "hidden folder": 1,
        "pipe, socket or device": 1, "link that leads nowhere": 1,
    }  # fmt: skip
    assert passed_over == expected
    assert described(passed_over).startswith("2 x .csv, 1 x .json, ")
    assert capsys.readouterr().err == ""
    assert list_files([str(tmp_path)]) == files
    remedy = "where .csv and .json are data, name them: FOLDER/**/*.csv"
    assert capsys.readouterr().err == f"not read: {described(passed_over)}; {remedy}\n"
    assert names(list_files([f"{tmp_path}/**/*.csv"]), tmp_path) == ["deep/u.csv", "t.csv"]  # as the line says
    list_files([str(tmp_path)], formats=["jsonl"])
    assert "name them" not in capsys.readouterr().err  # which would not help


def test_order_and_repetition_do_not_matter(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl"), write(tmp_path / "deep" / "er" / "b.jsonl")
    locations = [str(b), f"file://{a}", str(a), str(tmp_path / "**" / "*.jsonl"), str(tmp_path)]
    assert names(list_files(locations), tmp_path) == ["a.jsonl", "deep/er/b.jsonl"]
    assert list_files(locations) == list_files(locations[::-1])


def test_links_in_a_circle_end_and_a_file_with_two_names_is_read_once(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.jsonl")
    write(tmp_path / "out" / "b.jsonl")
    (tmp_path / "in" / "again").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "out").symlink_to(tmp_path / "out")
    (tmp_path / "out" / "back").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "z.jsonl").symlink_to(tmp_path / "in" / "a.jsonl")
    passed_over: Counter[str] = Counter()
    found = names(list_files([str(tmp_path / "in")], passed_over=passed_over), tmp_path)
    assert found == ["in/a.jsonl", "in/out/b.jsonl"]
    assert passed_over == {"second name of a file": 1}


def test_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.json")
    write(tmp_path / "b.csv")
    write(tmp_path / "sub" / "c.jsonl")
    write(tmp_path / "data[1].jsonl")
    passed_over: Counter[str] = Counter()
    found = list_files([str(tmp_path / "*")], passed_over=passed_over)
    assert names(found, tmp_path) == ["a.json", "b.csv", "data[1].jsonl"]  # named by the glob, whatever they hold
    assert passed_over == {"folder": 1}
    assert names(list_files([str(tmp_path / "data[1].jsonl")]), tmp_path) == ["data[1].jsonl"]
    assert names(list_files([str(tmp_path / "**")]), tmp_path) == [
        "a.json", "b.csv", "data[1].jsonl", "sub/c.jsonl"
    ]  # fmt: skip
    # Relative ones, where the folder that one is in has a name that could be a glob.
    write(tmp_path / "exp[1]" / "a.jsonl")
    write(tmp_path / "exp[1]" / "sub" / "b.jsonl")
    write(tmp_path / "exp1" / "other.jsonl")
    monkeypatch.chdir(tmp_path / "exp[1]")
    passed_over.clear()
    assert names(list_files(["*"], passed_over=passed_over), tmp_path) == ["exp[1]/a.jsonl"]
    assert passed_over == {"folder": 1}


def test_plain_json_and_csv_of_a_folder_are_read_where_nothing_else_is(tmp_path: Path) -> None:
    for name in ("a.json", "b/c.csv", "d.tsv.gz"):
        write(tmp_path / name)
    assert names(list_files([str(tmp_path)]), tmp_path) == ["a.json", "b/c.csv", "d.tsv.gz"]
    write(tmp_path / "notes.txt")
    passed_over: Counter[str] = Counter()
    assert names(list_files([str(tmp_path)], passed_over=passed_over), tmp_path) == ["d.tsv.gz", "notes.txt"]
    assert passed_over == {".json": 1, ".csv": 1}


def test_the_bytes_say_the_compression(tmp_path: Path) -> None:
    body = json_lines([{"text": "x"}])
    write(tmp_path / "a.jsonl", gzip.compress(body))
    write(tmp_path / "b.jsonl", zstd(body))
    write(tmp_path / "c.jsonl.gz", body)
    assert [file.compression for file in list_files([str(tmp_path)])] == ["gzip", "zstd", "none"]


def test_only_some_formats(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.md")
    passed_over: Counter[str] = Counter()
    assert names(list_files([str(tmp_path)], ("jsonl",), passed_over), tmp_path) == ["a.jsonl"]
    assert passed_over == {".md": 1}
    with pytest.raises(UserError, match=r"b\.md: unknown file type '\.md'") as caught:
        list_files([str(tmp_path / "b.md")], ("jsonl",))
    assert caught.value.hint == "known: .jsonl, .ndjson, .jsonlines, each also with .gz or .zst"


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    write(tmp_path / "notes.jsonl")
    write(tmp_path / "a.xls")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no such file: .*note\.jsonl") as caught:
        list_files([str(tmp_path / "note.jsonl")])
    assert caught.value.hint == f"did you mean {tmp_path / 'notes.jsonl'}?"
    with pytest.raises(UserError, match=r"no file matches .*\.parquet"):
        list_files([str(tmp_path / "*.parquet")])
    with pytest.raises(UserError, match=r"cannot read .*a\.xls: unknown file type '\.xls'"):
        list_files([str(tmp_path / "a.xls")])
    with pytest.raises(UserError, match=r"\*\.xls holds no file that is read, only 1 x \.xls"):
        list_files([str(tmp_path / "*.xls")])
    with pytest.raises(UserError, match="empty holds no file that is read"):
        list_files([str(tmp_path / "empty")])
    write(tmp_path / "empty" / "b.xls")
    with pytest.raises(UserError, match=r"empty holds no file that is read, only 1 x \.xls"):
        list_files([str(tmp_path / "empty")])
    with pytest.raises(UserError, match="no file matches"):
        list_files([str(tmp_path / "emp*")])
    with pytest.raises(UserError, match=r"cannot read from s4://"):
        list_files(["s4://bucket/key.jsonl"])


def test_a_file_that_changed_after_it_was_listed_is_not_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    [file] = list_files([str(path)])
    assert open_binary(file).read() == path.read_bytes()
    path.write_bytes(b"{}\n")
    with pytest.raises(RunFailed, match=r"a\.jsonl changed after it was listed"):
        open_binary(file)
    with pytest.raises(RunFailed, match="changed after it was listed"):  # `skip` would lose all of it as one error
        list(read_piece(whole(file), Reading("skip"), ReadReport()))
    [source] = lineage_sources([file], "source mine")
    assert source.sha256 is None and source.detail.endswith("changed after it was listed")


def test_a_folder_that_may_not_be_looked_at_stops_or_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("open/a.jsonl", "shut/b.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}\n")
    scandir = os.scandir

    def refuse(path: Any) -> Any:  # also where the tests' user may look everywhere
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match="shut: Permission denied") as caught:
        list_files([str(tmp_path)])
    assert caught.value.hint is not None and "readable" in caught.value.hint
    counts: Counter[str] = Counter()
    assert [Path(file.uri).name for file in list_files([str(tmp_path)], FORMATS, counts, "skip")] == ["a.jsonl"]
    assert counts == {"unreadable folder": 1}


def test_what_reads_a_crawl_is_asked_for_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.warc.gz", "b.warc.wet.gz", "c.jsonl"):
        (tmp_path / name).write_bytes(b"")
    page, text, rows = (list_files([str(tmp_path / name)]) for name in ("a.warc.gz", "b.warc.wet.gz", "c.jsonl"))
    missing = {"trafilatura"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else object())
    require_extra([*text, *rows])
    with pytest.raises(UserError, match=r"a\.warc\.gz: reading WARC files needs trafilatura") as caught:
        require_extra([*rows, *page])
    assert caught.value.hint == install_line("curation")
    missing = {"warcio"}
    with pytest.raises(UserError, match="needs warcio"):
        require_extra(text)
    require_extra(rows)


def test_local_files_load_no_client_library_and_no_pyarrow(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    code = """
import sys
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.reader import pieces_of, read_piece
from nemotron.data_prep.sources.reading import Reading, ReadReport
[file] = list_files([sys.argv[1]])
assert [row.value for piece in pieces_of(file, 1 << 20) for row in read_piece(piece, Reading(), ReadReport())]
heavy = {"pyarrow", "fsspec", "huggingface_hub", "warcio", "w3lib", "ssl", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
