# /// script
# [tool.runspec]
# docs = "Find the main text of crawled pages"
# name = "data/curate/extract"
# setup = "pip install 'nemotron[curation]'"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/extract"
# default = "default"
# schema = "schema.py:ExtractConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron-CC, step 1: WARC files -> documents with the main text of each page, without menus and advertisements.

    nemotron data curate extract -c tiny
    python extract.py --config tiny run.data=null 'warc=[/data/CC-MAIN-2024-30/*.warc.gz]'

A page is decoded by its byte order mark, its HTTP header or its `<meta>`. Nothing is dropped silently: pages without
main text, too large, too slow, undecodable, not HTML or not found, and damaged records, are counted by reason.

Simplified against the paper: the published data was extracted by jusText. Here it is trafilatura, which falls back on
jusText where it finds too little.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import run_main
from nemotron.data_prep.curation.extraction import ExtractionSettings, extract_shard, plan_extraction
from nemotron.data_prep.curation.step import collect, publish_step
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.work.engines import open_engine
from nemotron.kit import Source, open_run, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.kit.stop import stop_at_once

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.schema import ExtractConfig


def main() -> None:
    """Extract the main text of all pages and publish the documents."""
    cfg: ExtractConfig = load_script_config(__file__, inputs=read_pipe)
    files = list_files(cfg.warc, formats=("warc",))
    settings = ExtractionSettings(cfg.max_html_bytes, cfg.max_seconds, cfg.min_chars, cfg.max_replaced)

    with open_engine() as engine, open_run(cfg, script=__file__) as run:
        # --- A task a WARC file ---------------------------------------------------------------------------------------
        work_dir = run.dir / "work"
        plan = plan_extraction(files, {"step": "extract", **cfg.model_dump(exclude={"run"})})
        with run.phase("extract"):
            table = collect(plan, work_dir, extract_shard, settings, engine)

        # --- Publish --------------------------------------------------------------------------------------------------
        # Reading a crawl once more, only for its digest, would take as long as the step itself.
        own = [Source(name=f.name, detail=f"{f.size} bytes, version {f.version}") for f in files if not cfg.run.data]
        dataset = publish_step(table, work_dir, run.output_dir, sources=own)
        print_complete({"data": dataset})


if __name__ == "__main__":
    stop_at_once()
    sys.exit(run_main(main, command_hint))
