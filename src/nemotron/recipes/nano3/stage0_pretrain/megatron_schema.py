"""Every knob of `train_megatron.py`. The fields are Megatron-Bridge's, the model is Nemotron 3 Nano 30B-A3B."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from nemotron.kit.schemas.megatron import MegatronPretrainConfig, check_layout

HEADS, GROUPS, EXPERTS, BLOCKS = 32, 8, 128, 52  # arXiv 2512.20848, table 1


class PretrainConfig(MegatronPretrainConfig):
    """`nemotron nano3 pretrain` at the published size."""

    @model_validator(mode="after")
    def _layout_divides(self) -> Self:
        check_layout(self.model, heads=HEADS, groups=GROUPS, experts=EXPERTS, blocks=BLOCKS)
        return self
