"""What README and docs point to is there: relative links, folders of the file tree, commands of the examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemotron.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [t for t in targets if "://" not in t and not (page.parent / t).exists()] == []


def test_the_file_tree_of_the_readme_exists() -> None:
    tree = next(
        block
        for block in FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
        if "src/nemo_runspec/" in block
    )
    folders: list[Path] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        del folders[depth:]
        folders.append(Path(line.split()[0]))
        assert ROOT.joinpath(*folders).is_dir(), line
    assert len(tree.splitlines()) > 10


def test_every_command_of_the_readme_exists() -> None:
    blocks = FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("nemotron ")]
    assert len(lines) > 5
    for line in lines:
        words = [word for word in line.split("#")[0].split()[1:] if re.fullmatch(r"[a-z0-9]+", word)]
        command = words[: next(i for i in range(len(words), 0, -1) if is_command(words[:i]))]
        assert len(command) >= 2, line


def is_command(words: list[str]) -> bool:
    """Whether `nemotron WORDS --help` has a page of its own (a misspelt word has none)."""
    done = CliRunner().invoke(app, [*words, "--help"])
    return done.exit_code == 0 and f"{' '.join(words)} [" in done.output
