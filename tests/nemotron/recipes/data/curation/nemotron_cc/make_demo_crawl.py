"""Make the small crawl that comes with the recipe.

    PYTHONPATH=src:. python -m tests.nemotron.recipes.data.curation.nemotron_cc.make_demo_crawl FOLDER

Its pages are those of `crawl_pages`, fewer of them. Another version of Python has other docstrings, and gives others.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from . import crawl_texts
from .crawl_pages import Page, make_pages, write_warc

PAGES, FILES, LABELLED, SEED = 80, 2, 150, 1


def write_crawl(folder: Path, pages: list[Page], num_files: int) -> list[Page]:
    """Write pages as WARC files `crawl-NNNNN.warc.gz`; returns those that were written.

    Of the truncated pages each file has one at most, at its end.
    """
    folder.mkdir(parents=True)
    truncated = [page for page in pages if page.broken == "truncated"][:num_files]
    whole = [page for page in pages if page.broken != "truncated"]
    for number in range(num_files):
        some = whole[number::num_files] + truncated[number : number + 1]
        write_warc(folder / f"crawl-{number:05d}.warc.gz", some)
    return whole + truncated


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSONL, gzipped where the name says so; the same rows give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def level_of(page: Page) -> int | None:
    """The planted quality of a page that has one and is neither a copy nor broken."""
    if any("duplicate" in case["kind"] for case in page.planted):
        return None
    return next((case["level"] for case in page.planted if case["kind"] == "quality"), None)


def write_labelled(folder: Path, pages: Iterable[Page]) -> None:
    """Write `good.jsonl.gz`, pages that explain something, and `other.jsonl.gz`."""
    rows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for page in pages:
        if (level := level_of(page)) is not None:
            rows[level == 2].append({"url": page.url, "text": page.text})
    write_rows(folder / "good.jsonl.gz", rows[True])
    write_rows(folder / "other.jsonl.gz", rows[False])


def main(folder: Path) -> None:
    """Write everything but the README."""
    sets = crawl_texts.evaluation_sets(Random(f"evaluation {SEED}"))
    write_crawl(folder / "warc", make_pages(PAGES, SEED, sets), FILES)
    write_labelled(folder / "labelled", make_pages(LABELLED, SEED + 1, sets))
    for name, rows in sets.items():
        write_rows(folder / "evaluation" / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
