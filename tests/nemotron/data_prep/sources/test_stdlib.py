"""Documents of the standard library: the allow-list, the split before extraction, complete and determinate cuts."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from nemotron.data_prep.sources import stdlib
from nemotron.data_prep.sources.stdlib import HELD_OUT, MODULES

FILES = stdlib.module_files()


def test_allow_list_is_in_this_interpreter_and_holds_no_tests() -> None:
    assert set(MODULES) <= sys.stdlib_module_names
    assert {file.top for file in FILES} == set(MODULES)
    parts = {part for file in FILES for part in file.name.split(".")}
    assert parts.isdisjoint({"test", "tests", "idle_test", "idlelib", "lib2to3", "distutils", "tkinter"})


def test_modules_removed_after_3_11_are_not_listed() -> None:
    # PEP 594 and the removals of 3.12, from the "What's New" pages.
    removed = """aifc asynchat asyncore cgi cgitb chunk crypt distutils imghdr imp lib2to3 mailcap msilib nis nntplib
        ossaudiodev pipes smtpd sndhdr spwd sunau telnetlib uu xdrlib"""
    assert set(MODULES).isdisjoint(removed.split())


@pytest.mark.slow
def test_split_goes_by_top_level_module() -> None:
    splits: dict[str, set[str]] = {}
    some = [file for file in FILES if file.top in HELD_OUT | {"json", "asyncio", "pydoc_data"}]
    for document in [*stdlib.code_documents(FILES, 8000, "code"), *stdlib.prose_documents(some, 4000, "docs")]:
        splits.setdefault(document["id"].split(":")[1].split(".")[0], set()).add(document["split"])
    assert {top for top, found in splits.items() if "valid" in found} == HELD_OUT
    assert all(len(found) == 1 for found in splits.values())
    total = sum(file.path.stat().st_size for file in FILES)
    held_out = sum(file.path.stat().st_size for file in FILES if file.split == "valid")
    assert 0.05 < held_out / total < 0.10


def test_code_documents_are_the_sources_cut_between_statements() -> None:
    for name in ("heapq", "asyncio.base_events", "typing"):
        file = next(file for file in FILES if file.name == name)
        chunks = [document["text"] for document in stdlib.code_documents([file], 3000, "code")]
        assert len(chunks) > 3
        assert "".join(chunks).rstrip("\n") == file.path.read_text(encoding="utf-8").rstrip("\n")
        for chunk in chunks:
            assert len(chunk) <= 3000 or len(ast.parse(chunk).body) == 1


def test_prose_documents_hold_docstrings_and_the_language_reference() -> None:
    file = next(file for file in FILES if file.name == "bisect")
    text = "\n".join(document["text"] for document in stdlib.prose_documents([file], 4000, "docs"))
    assert text.startswith("bisect\n\nBisection algorithms.")
    assert "bisect.insort_right(a, x, lo=0, hi=None, *, key=None)\n\nInsert item x in list a" in text
    assert "return" not in [line.strip().split(" ")[0] for line in text.splitlines()]  # no code
    topics = next(file for file in FILES if file.name == stdlib.TOPICS)
    assert not list(stdlib.code_documents([topics], 8000, "code"))
    assert any(
        document["text"].startswith('The "try" statement\n****')
        for document in stdlib.prose_documents([topics], 4000, "docs")
    )


def test_passages_are_whole_lines_to_the_end_of_a_document() -> None:
    text = "one\ntwo\n\nthree\nfour"
    for ending in ("", "\n"):
        drawn = [passage for passage, _ in stdlib.passages([{"text": text + ending, "split": "train"}], 12)]
        assert drawn == ["one\ntwo\n", "three\nfour"]
    cut = stdlib.passages(
        [{"text": "a" * 5 + "\n" + "b" * 20, "split": "valid"}, {"text": "c" * 20, "split": "train"}], 7
    )
    assert list(cut) == [("a" * 5, "valid"), ("c" * 7, "train")]


def test_digest_follows_content_and_split() -> None:
    files = FILES[:3]
    assert stdlib.digest(files) == stdlib.digest(list(files))
    moved = [stdlib.ModuleFile(f.name, f.top, f.path, "valid" if f.split == "train" else "train") for f in files]
    assert stdlib.digest(moved) != stdlib.digest(files)
    assert stdlib.digest(files[:2]) != stdlib.digest(files)


def test_a_missing_module_is_left_out() -> None:
    assert not stdlib.module_files(("no_such_module",))


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n"])
def test_files_without_statements(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.py"
    path.write_text(text)
    file = stdlib.ModuleFile("m", "m", path, "train")
    assert "".join(d["text"] for d in stdlib.code_documents([file], 8000, "code")).strip() == text.strip()
    assert not list(stdlib.prose_documents([file], 4000, "docs"))
