"""What extraction and language identification report against planted truth."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemotron.data_prep.curation.language import LanguageSettings
from nemotron.data_prep.curation.step import TRUTH, write_documents
from nemotron.data_prep.work.jsonl import write_jsonl
from nemotron.recipes.data.curation.nemotron_cc import extract, language

ENGLISH = "The ferry leaves at noon and comes back before the tide turns, unless the wind says otherwise."


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    lines = ["Heading", "One line.", "Another line.", "The last line."]
    write_jsonl(tmp_path / "main_text.jsonl", [{"url": "https://a.example/1", "text": "\n".join(lines)}])
    planted = [{"kind": "language", "language": "en"}]
    write_jsonl(tmp_path / TRUTH, [{"url": "https://a.example/1", "planted": planted}])
    return tmp_path


def shard(folder: Path, url: str, text: str) -> list[Path]:
    (folder / "documents").mkdir()
    path = folder / "documents" / "a.jsonl.zst"
    write_documents(path, [{"id": "a:0", "text": text, "url": url}])
    return [path]


def test_lines_are_compared_with_the_planted_ones(truth: Path) -> None:
    files = shard(truth, "https://a.example/1", "Heading\nOne  line.\nMenu")
    found = extract._measure(files, truth)
    assert (found["line_precision"], found["line_recall"], found["lines"]) == (2 / 3, 2 / 4, 4)
    assert found["most_frequent_surplus"] == ["Menu"]


def test_pages_of_another_crawl_have_no_share(truth: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Own WARC files under a config that names the demo's truth: nothing to divide by, and no traceback."""
    pytest.importorskip("py3langid")
    files = shard(truth, "https://own.example/", ENGLISH)
    found = extract._measure(files, truth)
    assert (found["line_precision"], found["line_recall"], found["pages_lost"]) == (None, None, 1)
    assert language._measure(files, truth, truth, LanguageSettings())["accuracy"] is None
    assert capsys.readouterr().err.count("none") >= 3
