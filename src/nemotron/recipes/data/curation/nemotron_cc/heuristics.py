# /// script
# [tool.runspec]
# docs = "Drop documents by counts and ratios of words, lines and characters"
# name = "data/curate/heuristics"
# setup = "pip install 'nemotron[curation]'"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/heuristics"
# default = "default"
# schema = "quality_schema.py:HeuristicsConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron-CC, step 8: documents -> documents that pass the heuristic filters.

    nemotron data curate heuristics -c tiny
    python heuristics.py --config tiny filters.word_count.low=30 filters.digits=null

The filters are those of Gopher, C4 and FineWeb that NeMo Curator applies to English; the config has the limits of each,
with the paper that they come from. Documents of high quality are exempt, as in the paper, which found that the filters
remove good text that a quality classifier keeps.

Simplified against the paper: no filter by the perplexity of a language model.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from nemo_runspec.config import load_script_config
from nemo_runspec.errors import run_main
from nemotron.data_prep.curation import heuristics
from nemotron.data_prep.curation.step import filter_shards, list_documents, plan_step, publish_step
from nemotron.data_prep.work.engines import open_engine
from nemotron.kit import Dataset, open_run, print_complete, read_pipe
from nemotron.kit.commands import command_hint
from nemotron.kit.stop import stop_at_once

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.quality_schema import HeuristicsConfig


def main() -> None:
    """Filter documents and publish those that stay."""
    cfg: HeuristicsConfig = load_script_config(__file__, inputs=read_pipe)
    limits = {
        name: heuristics.Limits(limit["low"], limit["high"])
        for name, limit in cfg.filters.model_dump().items()
        if limit is not None
    }
    settings = heuristics.HeuristicSettings(limits, frozenset(cfg.exempt))

    with open_engine() as engine, open_run(cfg, script=__file__) as run:
        files = list_documents(Dataset.load(cfg.run.data).path)
        work_dir = run.dir / "work"
        plan = plan_step(files, {"step": "heuristics", **cfg.model_dump(exclude={"run"})})

        # --- Filter -------------------------------------------------------------------------------------------------
        with run.phase("filter"):
            table = filter_shards(plan, work_dir, heuristics.judge, settings, engine)

        # --- Publish ------------------------------------------------------------------------------------------------
        dataset = publish_step(table, work_dir, run.output_dir)
        print_complete({"data": dataset})


if __name__ == "__main__":
    stop_at_once()
    sys.exit(run_main(main, command_hint))
