# /// script
# [tool.runspec]
# schema = "1"
# docs = "Make a small crawl offline, with planted cases that every later step is measured on"
# name = "data/curate/crawl"
# setup = "pip install 'nemotron[curation]'"
#
# [tool.runspec.run]
# launch = "direct"
#
# [tool.runspec.config]
# dir = "./config/crawl"
# default = "tiny"
# schema = "schema.py:CrawlConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron-CC, before step 1: a small crawl, made offline, as WARC files with a record of all that was planted in it.

    nemotron data curate crawl -c tiny
    python make_crawl.py --config tiny num_pages=3000 seed=2

Pages in seven languages: explanations from the docstrings of the running Python, and sentences put together from lists,
each within menus, cookie banners, advertisements and scripts. Planted: copies, near copies of known similarity,
passages that many pages share, personal data and what only looks like it, worthless pages, questions of two evaluation
sets, broken pages. `truth.jsonl` says what is where; its format: nemotron/data_prep/curation/step.py.

Simplified against the paper: the published data comes from 99 snapshots of Common Crawl. For pages of your own, leave
this script out and give extract.py your WARC files.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError, run_main
from nemotron.data_prep.curation.step import TRUTH
from nemotron.data_prep.sources import stdlib
from nemotron.data_prep.work.jsonl import write_jsonl
from nemotron.kit import Dataset, Source, open_run, print_complete
from nemotron.kit.stop import stop_at_once
from nemotron.recipes.data.curation.nemotron_cc import crawl_texts
from nemotron.recipes.data.curation.nemotron_cc.crawl_pages import make_pages, write_warc

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.schema import CrawlConfig


def main() -> None:
    """Make the crawl and publish it."""
    cfg: CrawlConfig = load_script_config(__file__)
    if cfg.python != platform.python_version():
        raise UserError(f"this config is for Python {cfg.python}, this is {platform.python_version()}")

    with open_run(cfg, script=__file__) as run:
        shutil.rmtree(run.output_dir, ignore_errors=True)  # whatever a killed run left there
        (run.output_dir / "warc").mkdir(parents=True)
        (run.output_dir / "evaluation").mkdir()

        # --- Evaluation sets, and pages, some of which leak them ------------------------------------------------------
        sets = crawl_texts.evaluation_sets(Random(f"evaluation {cfg.seed}"))
        for name, rows in sets.items():
            write_jsonl(run.output_dir / "evaluation" / f"{name}.jsonl", rows)
        with run.phase("pages"):
            pages = make_pages(cfg.num_pages, cfg.seed, sets)

        # --- WARC files; the file of a truncated page ends there ------------------------------------------------------
        truncated = [page for page in pages if page.broken == "truncated"]
        whole = [page for page in pages if page.broken != "truncated"]
        with run.phase("write"):
            for number in range(cfg.num_files):
                some = whole[number :: cfg.num_files] + truncated[number : number + 1]
                write_warc(run.output_dir / "warc" / f"crawl-{number:05d}.warc.gz", some)
        pages = whole + truncated[: cfg.num_files]

        # --- The truth ------------------------------------------------------------------------------------------------
        pages.sort(key=lambda page: page.url)
        write_jsonl(run.output_dir / TRUTH, ({"url": page.url, "planted": page.planted} for page in pages))
        write_jsonl(run.output_dir / "main_text.jsonl", ({"url": page.url, "text": page.text} for page in pages))
        planted = Counter(case["kind"] for page in pages for case in page.planted)

        # --- Publish --------------------------------------------------------------------------------------------------
        files = stdlib.module_files()
        dataset = Dataset(
            path=run.output_dir,
            num_examples=len(pages),
            train_path=run.output_dir / "warc",
            metrics={"pages": len(pages), "planted": dict(sorted(planted.items()))},
            sources=[
                Source(
                    name="python-standard-library",
                    sha256=stdlib.digest(files),
                    detail=f"docstrings of {platform.python_implementation()} {platform.python_version()}",
                ),
                Source(
                    name="sentence-lists",
                    sha256=hashlib.sha256(crawl_texts.LISTS.read_bytes()).hexdigest(),
                    detail=crawl_texts.LISTS.name,
                ),
            ],
        )
        dataset.save(move=True)
        print(f"{dataset.ref}: {len(pages)} pages; planted: {dict(planted)}", file=sys.stderr)
        print_complete({"data": dataset})


if __name__ == "__main__":
    stop_at_once()
    sys.exit(run_main(main))
