"""The site is built whole, with nothing that leads nowhere and nothing that comes from elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAV = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
# What a page makes a browser fetch by itself; a link that a reader clicks may lead anywhere.
FETCHED = re.compile(
    r"<(?:script|link|img|iframe|source|object)\b[^>]*?\b(?:src|href|data)=[\"']?((?:https?:)?//[^\"'> ]+)"
)
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def test_every_page_of_the_docs_is_in_the_menu() -> None:
    folders = ("docs", "src", "examples", "benchmarks")
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))]
    written = {page for page in NAV if page.startswith(("docs/reference/commands/", "docs/reference/keys/"))}
    assert {str(page.relative_to(ROOT)) for page in pages} == set(NAV) - written
    assert len(NAV) == len(set(NAV))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(NAV)
    assert {found for page in pages for found in FETCHED.findall(page.read_text(encoding="utf-8"))} == set()
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert not [style for style in styles if re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style)]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="wants Chromium or Chrome")
def test_pages_that_are_opened_as_files_can_be_searched(site: Path, tmp_path: Path) -> None:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    address = f"{(site / 'guides/fork.html').as_uri()}?q=skypilot"
    command = [str(BROWSER), f"--user-data-dir={tmp_path}", *options, address]
    page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r'<a href="([^"?]+)[^"]*" class="md-search-result__link"', page)
    assert (site / "examples/forks/skypilot/index.html").as_uri() in found


@pytest.mark.slow
def test_llms_txt_names_every_page_once(site: Path) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    lines = re.findall(r"^- \[(.+)\]\((\S+)\): (.+)$", text, re.MULTILINE)
    assert sorted(address for _, address, _ in lines) == sorted(
        str(page.relative_to(site)) for page in site.rglob("*.html") if page.name != "404.html"
    )
    assert text.startswith("# Nemotron, cooked whole\n\n> ")
    sentences = {address: sentence for _, address, sentence in lines}
    assert sentences["guides/own-text.html"] == "From a folder of files to a base model that has read them."


@pytest.mark.slow
def test_commands_and_keys_are_those_of_the_code(site: Path) -> None:
    commands = (site / "reference/commands/nano3.html").read_text(encoding="utf-8")
    for words in ("nano3 pipe", "nano3 data prep sft", "nano3 rl rlvr", "nano3 model export", "nano3 chat"):
        assert f'id="nemotron-{words.replace(" ", "-")}"' in commands, words
    keys = (site / "reference/keys/nano3.html").read_text(encoding="utf-8")
    section = keys.partition('id="stage0_pretraintrainpy"')[2].partition("<h2")[0]
    row = re.search(r"<code>optimizer\.lr</code></td>\s*<td>(.*?)</td>\s*<td>(.*?)</td>\s*<td>(.*?)</td>", section)
    assert row is not None and row.groups() == ("a number &gt; 0", "0.001", "peak learning rate")
    # a list of groups, whose items have keys; an input that has no default
    assert "<code>sources.0.weight</code>" in keys
    path = re.search(r"<code>dataset\.path</code></td>\s*<td>(.*?)</td>\s*<td>(.*?)</td>", section)
    assert path is not None and path.groups() == ("a path", "")


@pytest.mark.slow
def test_the_api_pages_have_docstrings_and_signatures(site: Path) -> None:
    kit = (site / "reference/api/kit.html").read_text(encoding="utf-8")
    assert 'id="nemotron.kit.artifact.Artifact.save"' in kit and "Publish as the next version of" in kit
    assert 'id="nemotron.kit.artifact.Dataset.num_examples"' in kit  # a field, which has no docstring
    toolkit = (site / "reference/api/nemo_runspec.html").read_text(encoding="utf-8")
    assert 'id="nemo_runspec.artifacts.registry.Registry.resolve_verified"' in toolkit
