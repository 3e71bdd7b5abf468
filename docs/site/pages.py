"""Pages of the site, from where they stand in the repository, and `llms.txt`. A hook of MkDocs (mkdocs.yml).

MkDocs reads one folder. Here READMEs stand beside their code, so each page, and each file that a page links to, gets
the path that it has in the repository: a relative link means the same on GitHub and on the site, and `--strict` refuses
one that leads nowhere. On the site `docs/` is left out of the address.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "src", "benchmarks", "examples")
OF_SITE = ("docs/site/style.css", "docs/site/iframe-worker.js")
LINK = re.compile(r"\]\(([^)#\s]+)")

_nav: list[Any] = []  # of the build under way: `on_nav` fills it, `on_post_build` reads it


def file_at(path: str, config: MkDocsConfig) -> File:
    """The file of the repository at `path`, under its address on the site."""
    file = File.generated(config, path, abs_src_path=str(ROOT / path))
    # The front page is docs/index.md; what GitHub shows first stands beside it.
    file.dest_uri = "readme.html" if path == "README.md" else file.dest_uri.removeprefix("docs/")
    return file


def pages() -> list[str]:
    """The paths of all Markdown files that are for readers, in the repository."""
    found = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
    return sorted(str(page.relative_to(ROOT)) for page in found)


def linked(page: str) -> set[str]:
    """The paths of the other files of the repository that a page links to."""
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [((ROOT / page).parent / link).resolve() for link in LINK.findall(text) if "://" not in link]
    inside = [path for path in targets if path.is_file() and path.is_relative_to(ROOT)]
    return {str(path.relative_to(ROOT)) for path in inside}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, and those of the repository in place of the folder's."""
    ours = pages()
    paths = {*ours, *(path for page in ours for path in linked(page)), *OF_SITE}
    theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*theme, *(file_at(path, config) for path in sorted(paths))])


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Remember what the site consists of."""
    _nav[:] = nav.items


def first_sentence(markdown: str) -> str:
    """The first sentence below the title, without marks and links."""
    text = re.sub(r"^(```.*?^```|#.*?$|\|.*?$|:::.*?$|<.*?$)", "", markdown, flags=re.MULTILINE | re.DOTALL)
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    plain = re.sub(r"[*`]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph))
    return re.split(r"(?<=[.!?]) ", plain, maxsplit=1)[0]


def lines_of(items: list[Any], depth: int = 2) -> list[str]:
    """The lines of llms.txt for pages and sections: a list, under a heading for each section."""
    found = [item for item in items if isinstance(item, Page)]
    lines = [f"- [{page.title}]({page.url}): {first_sentence(page.markdown or '')}" for page in found]
    for section in (item for item in items if not isinstance(item, Page)):
        lines += ["", f"{'#' * depth} {section.title}", "", *lines_of(section.children, depth + 1)]
    return lines


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt (llmstxt.org): what there is to read, a line a page, for a program that reads the site."""
    head = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    text = "\n".join([*head, *lines_of(_nav)]) + "\n"
    (Path(config.site_dir) / "llms.txt").write_text(text, encoding="utf-8")
