"""Knobs of the crawl, extraction and language steps: what makes another run, and what does not."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import ValidationError

from nemotron.recipes.data.curation.nemotron_cc import schema

FOLDER = Path(schema.__file__).parent


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"copy_of_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where pydantic looks annotations up
    spec.loader.exec_module(module)
    return module


def test_other_sentences_are_another_crawl(tmp_path: Path) -> None:
    config = {"run": {"output": "crawl"}}
    before = schema.CrawlConfig.model_validate(config).lists
    for name in ("crawl_pages.py", "crawl_texts.py", "crawl_texts.yaml"):
        copy = tmp_path / name.replace(".", "_")
        shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("__pycache__"))
        assert load(copy / "schema.py").CrawlConfig.model_validate(config).lists == before
        with (copy / name).open("a") as file:
            file.write("# more\n")
        assert load(copy / "schema.py").CrawlConfig.model_validate(config).lists != before


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
