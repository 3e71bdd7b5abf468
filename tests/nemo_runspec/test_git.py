"""Commit and root of the repository that a script lies in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nemo_runspec.git import git_commit, git_root


def test_outside_before_and_after_the_first_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    assert (git_root(folder), git_commit(folder)) == (None, None)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_root(folder) == tmp_path.resolve()
    assert git_commit(folder) is None
    (folder / "train.py").write_text("")
    for words in (["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert git_commit(folder) == head
    (folder / "untracked").write_text("")
    assert git_commit(folder) == head
    (folder / "train.py").write_text("changed")
    assert git_commit(folder) == f"{head}-dirty"
    installed = tmp_path / ".venv" / "site-packages"
    installed.mkdir(parents=True)
    assert git_root(installed) == tmp_path.resolve()
    (tmp_path / ".gitignore").write_text(".venv\n")
    assert (git_root(installed), git_commit(installed)) == (None, None)


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (git_root(tmp_path), git_commit(tmp_path)) == (None, None)
