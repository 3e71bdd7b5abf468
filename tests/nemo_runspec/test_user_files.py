"""Which files a location stands for, and when their digest changes."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from nemo_runspec.errors import UserError
from nemo_runspec.user_files import digest, expanded, files_below, files_of, in_artifact, is_elsewhere


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.txt", "sub/b.txt", ".hidden.txt", ".git/c.txt", "sub/.cache/d.txt", "data[1].txt"):
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "mine"


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("", ["a.txt", "data[1].txt", "sub/b.txt"]),
        ("sub", ["sub/b.txt"]),
        ("*", ["a.txt", "data[1].txt"]),  # a folder that a glob matches is not entered
        ("**", ["a.txt", "data[1].txt", "sub/b.txt"]),
        ("data[1].txt", ["data[1].txt"]),  # a name that exists is no glob
        ("*/b.*", ["sub/b.txt"]),
        (".git", [".git/c.txt"]),  # hidden, but named
        (".hidden.txt", [".hidden.txt"]),
    ],
)
def test_the_files_of_a_location(folder: Path, location: str, expected: list[str]) -> None:
    for spelling in (str(folder / location), f"file://{folder / location}", os.path.relpath(folder / location)):
        assert files_of(spelling) == [str(folder / name) for name in expected]


def test_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert files_of("~/sub") == [str(folder / "sub" / "b.txt")]


@pytest.mark.parametrize("location", ["data/*.txt", "file://data/*.txt", "~/data/*.txt", "../exp[[]1]/data/*"])
def test_brackets_of_the_folder_that_one_is_in_are_no_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    for name in ("exp[1]", "exp1"):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "data" / f"{name}.txt").write_text("")
    monkeypatch.chdir(tmp_path / "exp[1]")
    monkeypatch.setenv("HOME", str(tmp_path / "exp[1]"))
    assert files_of(location) == [str(tmp_path / "exp[1]" / "data" / "exp[1].txt")]


def test_a_home_folder_that_is_nobodys_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^~nobody-of-this-name/x: there is no user 'nobody-of-this-name'"):
        files_of("~nobody-of-this-name/x")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 9)  # of a container, say: in no list of users
    with pytest.raises(UserError, match=r"^X=~/x: no home folder is known\nset HOME"):
        expanded("~/x", "X=")


def test_links_are_followed_and_circles_end(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "e.txt").write_text("e")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(folder)
    (folder / "sub" / "nowhere.txt").symlink_to(folder / "missing")
    names = [os.path.relpath(name, folder) for name in files_of(str(folder))]
    assert names == ["a.txt", "data[1].txt", "link/e.txt", "sub/b.txt", "sub/nowhere.txt"]


def test_what_is_left_out_is_counted(folder: Path) -> None:
    passed_over: Counter[str] = Counter()
    os.mkfifo(folder / "pipe")
    assert len(list(files_below(folder, passed_over))) == 3
    assert passed_over == {"hidden file": 1, "hidden folder": 2, "pipe, socket or device": 1}


@pytest.mark.parametrize(
    ("location", "message", "hint"),
    [
        ("mine/b.txt", "no such file: mine/b.txt", "did you mean .*/mine/a.txt"),
        ("nowhere/b.txt", "no such file: nowhere/b.txt", "None"),
        (" ", "a path that is empty", "the current folder is [.]"),
        ("mine/*.csv", r"no file matches mine/\*\.csv", "None"),
        ("mine/s*", r"no file matches mine/s\*", "it matches folders: name them without the glob"),
    ],
)
def test_what_does_not_exist(
    folder: Path, monkeypatch: pytest.MonkeyPatch, location: str, message: str, hint: str
) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(UserError, match=f"^{message}") as caught:
        files_of(location)
    assert re.match(hint, str(caught.value.hint))


def test_the_digest_is_over_names_sizes_and_times(folder: Path) -> None:
    def now() -> str | None:
        return digest(files_of(str(folder)))

    (folder / "a.txt").write_text("x")
    os.utime(folder / "a.txt", ns=(1, 1))
    seen = [now()]
    (folder / "a.txt").write_text("yz")
    os.utime(folder / "a.txt", ns=(1, 1))
    seen.append(now())
    os.utime(folder / "a.txt", ns=(1, 2))
    seen.append(now())
    (folder / "a.txt").rename(folder / "z.txt")
    seen.append(now())
    assert None not in seen and len(set(seen)) == 4
    (folder / ".git" / "more").write_text("x")
    (folder / ".DS_Store").write_text("x")
    assert now() == seen[-1]
    (folder / "sub" / "nowhere.txt").symlink_to(folder / "missing")
    assert now() == seen[-1]  # who reads it says what is wrong
    assert digest([]) is None
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text("")
    assert now() not in (None, seen[-1])


def test_what_is_not_looked_at_here(folder: Path) -> None:
    assert is_elsewhere("s3://bucket/x") and is_elsewhere("<data:path (resolved at start)>/x")
    assert not is_elsewhere("file:///x") and not is_elsewhere("x")


def test_what_is_published_is_known_by_record_manifest_and_place(folder: Path) -> None:
    (folder / "artifact.json").write_text("{}")  # of another program, or the user's own
    places = ("", "sub/*.txt", "payload", "payload/sub/*.txt", "sub/payload/a")
    assert [place for place in places if in_artifact(str(folder / place))] == []
    (folder / "manifest.sha256").write_text("")
    assert [place for place in places if in_artifact(str(folder / place))] == ["", "payload", "payload/sub/*.txt"]
