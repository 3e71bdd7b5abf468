"""Every knob of `quantize_modelopt.py`. The table has the rows of `quantize.py`; the rest are ModelOpt's names.

Nothing that decides what is quantised has a default here: each config states the whole of its table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from nemotron.kit.schemas.group import MODEL, SFT_PACK, Group, ModelPath, RunConfig
from nemotron.kit.schemas.quantization import AlgorithmConfig, PrecisionConfig


class ModelOptRunConfig(RunConfig):
    """Identity, artifacts read and written."""

    model: Annotated[str, MODEL] = Field(
        description="model to quantise: name, name:version, directory or hf://ORG/NAME"
    )
    data: Annotated[str, SFT_PACK] = Field(description="calibration samples: an SFTPack")
    output: str | None = Field(None, description="name under which the quantised model is published")


class CheckpointConfig(Group):
    """Where the weights come from."""

    pretrained_checkpoint: ModelPath


class CalibrationConfig(Group):
    """Samples whose activations are looked at."""

    path: Path = Field(description="payload of the data artifact: packed Parquet files (not the library's)")
    calib_size: int = Field(ge=1, description="rows of training data")
    seq_length: int = Field(ge=2, description="tokens of a row that are looked at, the first ones")


class QuantizeConfig(Group):
    """`nemotron nano3 quantize` and `nemotron super3 quantize` at the published size."""

    run: ModelOptRunConfig
    checkpoint: CheckpointConfig
    dataset: CalibrationConfig
    precision: PrecisionConfig = Field(description="the table: kind of layer -> format")
    algorithm: AlgorithmConfig
