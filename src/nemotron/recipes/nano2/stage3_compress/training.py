#!/usr/bin/env python
# /// script
# [tool.runspec]
# docs = "Prune the large model, then distil it into what is left."
# name = "nano2/compressed"
# setup = "nemotron-cookbook[train]"
# run.launch = "direct"
# config = {dir = "./config/training", default = "tiny", schema = "training.py:Config"}
# resources.gpus_per_node = 0
# ///
"""Stage 3, step 2 of 3: from the large model to a small one.

    python data_curation.py --scale tiny | python training.py | python evaluation.py
    python training.py --dataset-path DIR --prune.parameter-share 0.6 --distil.epochs 2

Two scripts do it, one after the other, and each also runs alone: `training_prune.py` and `training_distil.py`.
"""

from __future__ import annotations

if __name__ == "__main__":  # importing torch takes seconds: Ctrl-C in them is one line
    from nemo_runspec.script import begin_script

    begin_script()

from dataclasses import dataclass, replace
from pathlib import Path

from nemotron.kit import Checkpoint, Scale, UserPath
from nemotron.kit.dataclass_script import run_step, step_config
from nemotron.recipes.nano2.stage3_compress import training_distil, training_prune


@dataclass
class Config:
    """The configs of the two."""

    dataset_path: UserPath | None = None  # default: what the script before in the pipe made
    scale: Scale | None = None  # of both: one smaller than that of the data takes its share of the rows
    output_dir: Path | None = None  # also leave the model there
    prune: training_prune.Config = step_config(training_prune.Config, "dataset_path")  # of training_prune.py
    distil: training_distil.Config = step_config(training_distil.Config, "student_path")  # of training_distil.py


def main(config: Config) -> Checkpoint:
    """Prune, then distil."""
    pruned = training_prune.main(
        replace(config.prune, scale=config.prune.scale or config.scale, dataset_path=config.dataset_path)
    )
    distil = replace(
        config.distil,
        scale=config.distil.scale or config.scale,
        student_path=pruned.path,
        output_dir=config.output_dir or config.distil.output_dir,
    )
    return training_distil.main(distil)


if __name__ == "__main__":
    run_step(main, Config)
