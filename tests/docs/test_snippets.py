"""The snippets of the pages on Python run as they stand there, one after another."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/reference/api").glob("*.md"))
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_there_are_snippets() -> None:
    assert {page.stem for page in PAGES} == {"nemo_runspec", "kit"}
    assert all(len(SNIPPET.findall(page.read_text(encoding="utf-8"))) >= 3 for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_snippets_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(tmp_path / "output"))
    monkeypatch.delenv("RUNSPEC_ARTIFACTS_ROOT", raising=False)
    run_snippets(page)


@pytest.mark.slow  # loads torch
def test_the_snippet_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nemotron.stack.models import NemotronH, NemotronHConfig

    monkeypatch.chdir(tmp_path)
    NemotronH(NemotronHConfig()).save_pretrained(Path("my-model"))
    run_snippets(ROOT / "README.md")
    (tokens,) = json.loads(capsys.readouterr().out)  # one continuation for one prompt
    assert 1 <= len(tokens) <= 16 and all(0 <= token < 2048 for token in tokens)


def run_snippets(page: Path) -> None:
    """Run the Python blocks of a page in one namespace."""
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "snippets"}
    for match in SNIPPET.finditer(text):
        # With the lines above it, so that a traceback names the line of the page.
        above = text.count("\n", 0, match.start(1))
        exec(compile("\n" * above + match[1], str(page), "exec"), names)
