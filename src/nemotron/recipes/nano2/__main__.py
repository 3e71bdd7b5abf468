"""Nemotron Nano 2, every stage in order, in one process.

python -m nemotron.recipes.nano2 --scale tiny --pretrain.train.lr 2e-3
"""

from __future__ import annotations

if __name__ == "__main__":
    from nemo_runspec.script import begin_script

    begin_script()

from dataclasses import dataclass, field, replace

from nemotron.kit import Results
from nemotron.kit.dataclass_script import run_step
from nemotron.kit.schemas.group import Scale
from nemotron.recipes.nano2.stage0_pretrain import __main__ as stage0_pretrain


@dataclass
class RecipeConfig:
    """The configs of the stages, under one scale."""

    scale: Scale = "tiny"
    pretrain: stage0_pretrain.StageConfig = field(default_factory=stage0_pretrain.StageConfig)


def main(config: RecipeConfig) -> Results:
    """Stage 0; the other stages follow here."""
    return stage0_pretrain.main(replace(config.pretrain, scale=config.scale))


if __name__ == "__main__":
    run_step(main, RecipeConfig)
