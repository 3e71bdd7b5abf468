# /// script
# dependencies = ["warcio"]
#
# [tool.runspec]
# docs = "Publish the small crawl that comes with this recipe, for the steps to read"
# name = "data/curate/crawl"
# setup = "nemotron-cookbook[curation]"
#
# [tool.runspec.run]
# launch = "direct"
#
# [tool.runspec.config]
# dir = "./config/crawl"
# schema = "schema.py:CrawlConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron-CC, before step 1: the small crawl that comes with this recipe, as an artifact that the other steps read.

    nemotron data curate crawl -c tiny

In `demo_crawl/` lie WARC files, pages labelled by quality, from which the classifiers learn, and two evaluation sets;
its README says how they were made. For pages of your own, leave this script out and give extract.py your WARC files.

Simplified against the paper: the published data comes from 99 snapshots of Common Crawl.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_runspec.artifacts.manifest import list_files as payload_files
from nemo_runspec.artifacts.manifest import payload_digest, sha256_file
from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError
from nemo_runspec.words import counted
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.warc import read_records
from nemotron.kit import Dataset, Source, open_run, print_complete
from nemotron.kit.commands import run_data_script

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.schema import CrawlConfig

DEMO_CRAWL = Path(__file__).with_name("demo_crawl")


def digest_of(folder: Path) -> str:
    """sha256 (hex) over the files in a folder, names and content: that of the artifact which they become."""
    return payload_digest({name: sha256_file(folder / name) for name in payload_files(folder)})


def main() -> None:
    """Publish the crawl."""
    cfg: CrawlConfig = load_script_config(__file__)
    digest = digest_of(DEMO_CRAWL)
    if digest != cfg.sha256:
        raise UserError(f"{DEMO_CRAWL}: other files than those that the config names", f"to use them: sha256={digest}")

    with open_run(cfg, script=__file__) as run:
        shutil.rmtree(run.output_dir, ignore_errors=True)  # whatever a killed run left there
        shutil.copytree(DEMO_CRAWL, run.output_dir)
        files = list_files([str(run.output_dir / "warc")], formats=("warc",))
        num_pages = sum(page.kind == "response" for file in files for page in read_records(file, max_body_bytes=0))
        dataset = Dataset(
            path=run.output_dir,
            num_examples=num_pages,
            train_path=run.output_dir / "warc",
            sources=[Source(name=DEMO_CRAWL.name, sha256=cfg.sha256, detail="comes with the recipe")],
        )
        dataset.save(move=True)
        print(f"{dataset.ref}: {counted(num_pages, 'page')}", file=sys.stderr)
        print_complete({"data": dataset})


if __name__ == "__main__":
    run_data_script(main)
