"""Stage 1 whole: curate, train, evaluate, in one process.

python -m nemotron.recipes.nano2.stage1_sft --scale tiny --train.lr 2e-3
"""

from __future__ import annotations

if __name__ == "__main__":
    from nemo_runspec.script import begin_script

    begin_script()

from dataclasses import dataclass, replace

from nemotron.kit import Results, Scale
from nemotron.kit.dataclass_script import run_step, step_config
from nemotron.recipes.nano2.stage1_sft import data_curation, evaluation, training


@dataclass
class StageConfig:
    """The configs of the three steps, under one scale."""

    scale: Scale = "tiny"
    data: data_curation.Config = step_config(data_curation.Config, "scale")
    train: training.Config = step_config(training.Config, "dataset_path")
    eval: evaluation.Config = step_config(evaluation.Config, "checkpoint_path", "scale")


def main(config: StageConfig) -> Results:
    """What the pipe of the three scripts does."""
    dataset = data_curation.main(replace(config.data, scale=config.scale))
    checkpoint = training.main(replace(config.train, dataset_path=dataset.path))
    return evaluation.main(replace(config.eval, checkpoint_path=checkpoint.path, scale=config.scale))


if __name__ == "__main__":
    run_step(main, StageConfig)
