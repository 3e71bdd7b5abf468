"""Every knob of `qad_modelopt.py`: those of a fine-tuning on Megatron-Bridge, and a table of formats."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from nemotron.kit.schemas.group import Group
from nemotron.kit.schemas.quantization import AlgorithmConfig, PrecisionConfig
from nemotron.recipes.nano3.stage1_sft.megatron_schema import SFTConfig


class CalibrationConfig(Group):
    """Rows of the training data on which the student's scales are found."""

    calib_size: int = Field(ge=1, description="rows; those that the replicas do not share equally are left out")
    seq_length: int = Field(ge=2, description="tokens of a row that are looked at, the first ones")


class QADConfig(SFTConfig):
    """`nemotron super3 qad` at the published size: `checkpoint.pretrained_checkpoint` is the full model."""

    precision: PrecisionConfig = Field(description="the table: kind of layer -> format")
    algorithm: AlgorithmConfig
    calibration: CalibrationConfig

    @model_validator(mode="after")
    def _table_is_megatrons(self) -> Self:
        if self.precision.mamba_before_attention is not None:
            raise ValueError("precision.mamba_before_attention: Megatron counts the blocks of a PP stage alone")
        if self.calibration.seq_length % (2 * self.model.context_parallel_size):
            raise ValueError(
                f"calibration.seq_length {self.calibration.seq_length} is no multiple of 2 x "
                f"model.context_parallel_size {self.model.context_parallel_size}"
            )
        return self
