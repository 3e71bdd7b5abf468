# /// script
# [tool.runspec]
# docs = "Of documents with equal text, keep one"
# name = "data/curate/exact_dedup"
# setup = "nemotron-cookbook[curation]"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/exact_dedup"
# schema = "schema.py:ExactDedupConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron-CC, step 3: documents -> documents of which no two have the same text.

    nemotron data curate exact_dedup -c tiny
    python exact_dedup.py --config tiny normalisation=none

Of documents with equal texts, the one whose id has the smallest hash is kept: this choice favours no crawl and no date,
and does not depend on how the documents are divided into shards. Texts are compared by a hash of 128 bits.

Added to the paper, which names only fuzzy and substring deduplication; NeMo Curator, which it used, runs this step on
GPUs. Here each task hashes a shard, and one process sorts the hashes, using 17 bytes of memory per document.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

from typing import TYPE_CHECKING

from nemo_runspec.config import load_script_config
from nemotron.data_prep.curation.deduplication import exact
from nemotron.data_prep.curation.step import open_step
from nemotron.kit import read_pipe
from nemotron.kit.commands import run_data_script

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.schema import ExactDedupConfig


def main() -> None:
    """Keep one document of every text and publish them."""
    cfg: ExactDedupConfig = load_script_config(__file__, inputs=read_pipe)

    with open_step(cfg, __file__) as step:
        with step.run.phase("deduplicate"):  # hash, find equal hashes, write what stays
            table = exact.deduplicate(step.documents(), cfg.normalisation, step.work_dir, step.engine)
        step.publish(table)


if __name__ == "__main__":
    run_data_script(main)
