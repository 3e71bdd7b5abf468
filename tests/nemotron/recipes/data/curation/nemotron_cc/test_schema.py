"""Knobs of the crawl, extraction and language steps: what makes another run, and what does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from nemotron.recipes.data.curation.nemotron_cc import schema


def extraction(location: Path | str, data: str | None = None) -> str:
    run = {"data": data, "output": "documents"}
    state = schema.ExtractConfig.model_validate({"run": run, "warc": [str(location)]}).state
    assert isinstance(state, str)
    return state


def test_own_files_count_and_those_of_artifacts_do_not(tmp_path: Path) -> None:
    file = tmp_path / "own" / "a.warc"
    file.parent.mkdir()
    states = set()
    for content in (b"one", b"another"):
        file.write_bytes(content)
        # Beside an input artifact, too.
        states |= {extraction(file), extraction(file.parent), extraction(file.parent / "*.warc", "crawl:1")}
    assert len(states) == 2
    assert "" not in states

    payload = tmp_path / "art" / "crawl" / "1" / "payload"
    shutil.copytree(file.parent, payload)
    (payload.parent / "artifact.json").write_text("{}")
    assert extraction(payload) == extraction(payload / "*.warc") == extraction("https://a.example/a.warc") == ""


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="no such file"):
        extraction(tmp_path / "a.warc")
    with pytest.raises(ValidationError, match="no file matches"):
        extraction(tmp_path / "*.warc")
