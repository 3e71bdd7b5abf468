"""Every knob of `quantize.py`: type, default, unit, allowed range. What is quantised to what is the table `precision`.

Names are ModelOpt's where it has some. No table is a default: a config states the whole of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from nemotron.kit.schemas.evaluation import EvaluationConfig
from nemotron.kit.schemas.group import MODEL, SFT_PACK, Group, ModelPath, ModelRunConfig
from nemotron.kit.schemas.quantization import BITS, PrecisionConfig, QuantAlgo, WeightScales
from nemotron.kit.schemas.training import DatasetConfig

SearchedKind: TypeAlias = Literal[
    "lm_head", "attention_qkv", "attention_out", "latent_proj", "routed_experts", "shared_experts", "mamba_in_proj",
    "mamba_out_proj", "mlp",
]  # fmt: skip


class RunConfig(ModelRunConfig):
    """Identity, artifacts read and written."""

    model: Annotated[str, MODEL] = Field(
        description="model to quantise: name, name:version, directory or hf://ORG/NAME"
    )
    data: Annotated[str, SFT_PACK] = Field(description="calibration samples and held-out rows: an SFTPack")


class CheckpointConfig(Group):
    """Where the weights come from."""

    pretrained_checkpoint: ModelPath


class CalibrationConfig(DatasetConfig):
    """Samples whose activations are looked at; rows are as long as data preparation packed them."""

    path: Path = Field(description="payload of the data artifact: packed Parquet files")
    calib_size: int = Field(
        ge=1, description="rows of training data (Nano 3: 1,000 samples; Super 3: 256 of 65,536 tokens)"
    )
    eval_rows: int = Field(ge=1, description="held-out rows on which KL to the full model is measured, at most")


class AutoQuantizeConfig(Group):
    """AutoQuantize: formats of some kinds of layers are searched for, not stated. Names are ModelOpt's."""

    effective_bits: float = Field(
        gt=0, le=16, description="bits a weight of the searched layers takes on average, scales included"
    )
    layers: list[SearchedKind] = Field(min_length=1, description="rows of `precision` that are searched for instead")
    quant_algos: list[QuantAlgo] = Field(min_length=1, description="formats to choose from, beside BF16")
    score_size: int = Field(ge=1, description="rows on which layers are scored (Super 3: 512 samples)")

    @model_validator(mode="after")
    def _smallest_formats_fit(self) -> Self:
        least = float(min(BITS[each] for each in self.quant_algos))
        if self.effective_bits < least:
            raise ValueError(f"effective_bits {self.effective_bits}: the smallest of quant_algos takes {least} bits")
        return self


class QuantizeConfig(Group):
    """`nemotron super3 quantize` and `nemotron nano3 quantize`."""

    run: RunConfig
    checkpoint: CheckpointConfig
    dataset: CalibrationConfig
    precision: PrecisionConfig = Field(description="the table: kind of layer -> format")
    weight_scales: WeightScales = Field(
        description="how NVFP4's block scales are chosen: max; mse, of all E4M3 values the best; four_over_six, of two"
    )
    auto_quantize: AutoQuantizeConfig | None = Field(
        None, description="search for formats within a budget of bits; null: the table alone decides"
    )
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
