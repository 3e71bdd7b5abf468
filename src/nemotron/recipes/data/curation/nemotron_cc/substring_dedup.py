# /// script
# [tool.runspec]
# docs = "Cut out passages that occur twice"
# name = "data/curate/substring_dedup"
# setup = "nemotron-cookbook[curation]"
#
# [tool.runspec.run]
# launch = "ray"
#
# [tool.runspec.config]
# dir = "./config/substring_dedup"
# schema = "schema.py:SubstringDedupConfig"
#
# [tool.runspec.resources]
# nodes = 1
# gpus_per_node = 0
# ///
"""Nemotron-CC, step 5: documents -> documents in which no long passage occurs twice.

    nemotron data curate substring_dedup -c tiny
    python substring_dedup.py --config tiny min_tokens=100

A passage of `min_tokens` tokens or more that occurs twice is kept once: in the document whose id has the smallest hash,
and there at its leftmost place. Words are never cut, and the paragraphs around a cut remain separate. A document that
is too short afterwards is dropped.

Simplified against the paper: it ran the suffix arrays of Lee et al. 2022 (arXiv 2107.06499) over tokens of byte-pair
encoding. Here windows of words are hashed and sorted, with every hit compared word by word: the same passages, with
words for tokens.
"""

from __future__ import annotations

if __name__ == "__main__":  # imports take a second or more: Ctrl-C is one line
    from nemo_runspec.script import begin_script

    begin_script()

import sys
from typing import TYPE_CHECKING

from nemo_runspec.config import load_script_config
from nemotron.data_prep.curation.deduplication import substring
from nemotron.data_prep.curation.step import open_step
from nemotron.kit import read_pipe
from nemotron.kit.commands import run_data_script
from nemotron.kit.schemas.curation import SubstringSettings

if TYPE_CHECKING:
    from nemotron.recipes.data.curation.nemotron_cc.schema import SubstringDedupConfig


def main() -> None:
    """Cut out repeated passages and publish what is left."""
    cfg: SubstringDedupConfig = load_script_config(__file__, inputs=read_pipe)
    settings = SubstringSettings.of(cfg)

    with open_step(cfg, __file__) as step:
        with step.run.phase("deduplicate"):  # index windows, find repeated ones, cut
            table, cuts = substring.deduplicate(step.documents(), settings, step.work_dir, step.engine)
        print(cuts, file=sys.stderr)
        step.publish(table, {"cuts": vars(cuts)})


if __name__ == "__main__":
    run_data_script(main)
