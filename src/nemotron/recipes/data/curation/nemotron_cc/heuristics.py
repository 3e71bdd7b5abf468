# /// script
# [tool.runspec]
# docs = "Drop documents by counts and ratios of words, lines and characters"
# name = "data/curate/heuristics"
# setup = "nemotron-cookbook[curation]"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/heuristics"
# schema = "schema.py:HeuristicsConfig"
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

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

from typing import TYPE_CHECKING

from nemo_runspec.config import load_script_config
from nemotron.data_prep.curation import heuristics
from nemotron.data_prep.curation.step import open_step
from nemotron.kit import read_pipe
from nemotron.kit.commands import run_data_script
from nemotron.kit.schemas.curation import HeuristicSettings

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.schema import HeuristicsConfig


def main() -> None:
    """Filter documents and publish those that stay."""
    cfg: HeuristicsConfig = load_script_config(__file__, inputs=read_pipe)
    settings = HeuristicSettings(limits=dict(cfg.filters), exempt=cfg.exempt)

    with open_step(cfg, __file__) as step:
        with step.run.phase("filter"):
            table = step.filter(heuristics.judge, settings)
        step.publish(table)


if __name__ == "__main__":
    run_data_script(main)
