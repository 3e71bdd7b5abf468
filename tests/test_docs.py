"""What README and docs point to is there: relative links, folders of the file tree, modules.

Their commands: test_commands_in_docs.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = ("src", "examples", "benchmarks", "tests")
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted(path for folder in ("docs", *CODE) for path in (ROOT / folder).rglob("*.md"))
MODULES = [f"/{path.relative_to(ROOT)}" for folder in CODE for path in (ROOT / folder).rglob("*.py")]
# Of a user's own, and misspelt ones.
EXAMPLES = {
    "add.py", "path/to/script.py", "garden/beds/dig.py", "trian.py", "schma.py", "FILE.py", "halves.py", "sorting.py"
}  # fmt: skip
# Those that docs/guides/fork.md makes; tests/test_fork_guide.py does it.
EXAMPLES |= {"select.py", "select_documents.py", "stage0_pretrain/select_documents.py"}
EXAMPLES |= {"src/nemotron/recipes/nano3/stage0_pretrain/select_documents.py"}
EXAMPLES |= {"cli/commands/mine/run_step.py"}
EXAMPLES |= {"CLONE/examples/forks/skypilot/pretrain.py", "src/mymodel/commands/pretrain.py"}
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_modules_that_a_page_names_exist(page: Path) -> None:
    """A name may leave out the folders before it: `launch_script.py`, `chat/pack.py`."""
    names = {name.lstrip("./") for name in re.findall(r"[\w./-]+\.py\b", page.read_text(encoding="utf-8"))}
    assert [name for name in names - EXAMPLES if not any(path.endswith(f"/{name}") for path in MODULES)] == []
