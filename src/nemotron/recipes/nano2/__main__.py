"""Nemotron Nano 2, every stage in order, in one process.

python -m nemotron.recipes.nano2 --scale tiny --pretrain.train.lr 2e-3 --sft.eval.samples 4
"""

from __future__ import annotations

if __name__ == "__main__":
    from nemo_runspec.script import begin_script

    begin_script()

import sys
from dataclasses import dataclass, replace

from nemotron.kit import Checkpoint, Dataset, Results, Scale
from nemotron.kit.dataclass_script import run_step, step_config
from nemotron.recipes.nano2.stage0_pretrain import __main__ as stage0_pretrain
from nemotron.recipes.nano2.stage1_sft import __main__ as stage1_sft
from nemotron.recipes.nano2.stage2_rl import __main__ as stage2_rl
from nemotron.recipes.nano2.stage3_compress import __main__ as stage3_compress
from nemotron.recipes.nano2.summary import summarise, table


@dataclass
class RecipeConfig:
    """The configs of the stages, under one scale."""

    scale: Scale = "tiny"
    pretrain: stage0_pretrain.StageConfig = step_config(stage0_pretrain.StageConfig, "scale")
    sft: stage1_sft.StageConfig = step_config(stage1_sft.StageConfig, "scale", "data.base_path")
    rl: stage2_rl.StageConfig = step_config(stage2_rl.StageConfig, "scale", "data.base_path")
    compress: stage3_compress.StageConfig = step_config(
        stage3_compress.StageConfig, "scale", "data.teacher_path", "data.sft_path", "data.pretrain_path"
    )


def main(config: RecipeConfig) -> Results:
    """Each stage goes on from the model that the one before it evaluated."""
    pretrained = stage0_pretrain.main(replace(config.pretrain, scale=config.scale))
    base = Checkpoint.input_of(pretrained)
    curation = replace(config.sft.data, base_path=base.path)
    asked = stage1_sft.main(replace(config.sft, scale=config.scale, data=curation))
    tuned = Checkpoint.input_of(asked)
    prompts = replace(config.rl.data, base_path=tuned.path)
    compared = stage2_rl.main(replace(config.rl, scale=config.scale, data=prompts))
    aligned = Checkpoint.input_of(compared)
    mixture = replace(
        config.compress.data,
        teacher_path=aligned.path,
        sft_path=Dataset.input_of(tuned).path,
        pretrain_path=Dataset.input_of(base).path,
    )
    compressed = stage3_compress.main(replace(config.compress, scale=config.scale, data=mixture))
    numbers = summarise(*(results.metrics for results in (pretrained, asked, compared, compressed)))
    print(table(numbers), file=sys.stderr)
    return compressed


if __name__ == "__main__":
    run_step(main, RecipeConfig)
