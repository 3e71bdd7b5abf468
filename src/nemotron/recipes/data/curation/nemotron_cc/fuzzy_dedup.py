# /// script
# [tool.runspec]
# docs = "Of nearly equal documents, keep one (MinHash LSH)"
# name = "data/curate/fuzzy_dedup"
# setup = "nemotron-cookbook[curation]"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/fuzzy_dedup"
# schema = "schema.py:FuzzyDedupConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron-CC, step 4: documents -> documents of which no two are nearly the same.

    nemotron data curate fuzzy_dedup -c tiny
    python fuzzy_dedup.py --config tiny minhash.num_bands=25 minhash.min_estimate=0.7

Every document gets a MinHash signature, locality-sensitive hashing proposes pairs, and the similarity that the
signatures estimate decides (`minhash.min_estimate`). Of each cluster of near duplicates the longest text is kept. The
share of pairs that is found at each similarity follows from the parameters, and is printed first.

Simplified against the paper: it ran NeMo Curator on GPUs. Here each task signs a shard, and one process sorts the
bands, using about 55 bytes of memory per document. The defaults are those of NeMo Curator, except that shingles are cut
from text that is lower-cased and has one space for every run of whitespace.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import sys
from typing import TYPE_CHECKING

from nemo_runspec.config import load_script_config
from nemotron.data_prep.curation.deduplication import minhash
from nemotron.data_prep.curation.step import open_step
from nemotron.kit import read_pipe
from nemotron.kit.commands import run_data_script

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.schema import FuzzyDedupConfig


def main() -> None:
    """Keep one document of every cluster and publish them."""
    cfg: FuzzyDedupConfig = load_script_config(__file__, inputs=read_pipe)
    print(minhash.describe(cfg.minhash), file=sys.stderr)

    with open_step(cfg, __file__) as step:
        with step.run.phase("deduplicate"):  # sign, find clusters, write what stays
            table, report = minhash.deduplicate(step.documents(), cfg.minhash, step.work_dir, step.engine)
        print(minhash.found_text(report), file=sys.stderr)
        step.publish(table, {"minhash": report})


if __name__ == "__main__":
    run_data_script(main)
