# /// script
# dependencies = ["warcio", "trafilatura"]
#
# [tool.runspec]
# docs = "Find the main text of crawled pages"
# name = "data/curate/extract"
# setup = "nemotron-cookbook[curation]"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/extract"
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

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

from typing import TYPE_CHECKING

from nemo_runspec.config import load_script_config
from nemotron.data_prep.curation.extraction import extract_shard, plan_extraction
from nemotron.data_prep.curation.step import collect, open_step
from nemotron.data_prep.sources.locations import list_files
from nemotron.kit import Source, read_pipe
from nemotron.kit.commands import run_data_script
from nemotron.kit.schemas.curation import ExtractionSettings

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.schema import ExtractConfig


def main() -> None:
    """Extract the main text of all pages and publish the documents."""
    cfg: ExtractConfig = load_script_config(__file__, inputs=read_pipe)
    settings = ExtractionSettings.of(cfg)
    files = list_files(cfg.warc, formats=("warc",))

    with open_step(cfg, __file__) as step:
        plan = plan_extraction(files, {"step": "extract", **settings.model_dump()})  # a task a WARC file
        with step.run.phase("extract"):
            table = collect(plan, step.work_dir, extract_shard, settings, step.engine)
        # Reading a crawl once more, only for its digest, would take as long as the step itself.
        own = [Source(name=f.name, detail=f"{f.size} bytes, version {f.version}") for f in files if not cfg.run.data]
        step.publish(table, sources=own)


if __name__ == "__main__":
    run_data_script(main)
