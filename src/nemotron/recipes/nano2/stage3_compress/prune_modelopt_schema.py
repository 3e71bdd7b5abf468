"""Every knob of `prune_modelopt.py`. Names are those of ModelOpt's Minitron and of Megatron-Core."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from nemotron.kit.schemas.group import MODEL, SFT_PACK, Group, ModelPath, RunConfig


class PruneRunConfig(RunConfig):
    """Identity, artifacts read and written."""

    model: Annotated[str, MODEL] = Field(description="large model: name, name:version, directory or hf://ORG/NAME")
    data: Annotated[str, SFT_PACK] = Field(description="rows on which units are scored: an SFTPack")
    output: str | None = Field(None, description="name under which the pruned model is published")


class CheckpointConfig(Group):
    """Where the weights come from."""

    pretrained_checkpoint: ModelPath


class CalibrationConfig(Group):
    """Rows whose activations are looked at."""

    path: Path = Field(description="payload of the data artifact: packed Parquet files (not the library's)")
    calib_size: int = Field(ge=1, description="rows of training data")
    seq_length: int = Field(ge=2, description="tokens of a row that are looked at, the first ones")


class ExportConfig(Group):
    """`export_config` of `mtp.prune`: the shape that stays, in Megatron-Core's words."""

    num_layers: int = Field(ge=1, description="blocks")
    hidden_size: int = Field(ge=1, description="width between the blocks")
    ffn_hidden_size: int = Field(ge=1, description="width of the MLP blocks")
    num_attention_heads: int = Field(ge=1, description="query heads")
    mamba_num_heads: int = Field(ge=1, description="heads of Mamba")
    mamba_head_dim: int = Field(ge=1, description="channels of a head of Mamba")


class DivisorsConfig(Group):
    """Arguments of `get_mcore_minitron_config`: what a width that stays has to be a multiple of."""

    hidden_size_divisor: int = Field(ge=1, description="of hidden_size")
    ffn_hidden_size_divisor: int = Field(ge=1, description="of ffn_hidden_size")
    mamba_head_dim_divisor: int = Field(ge=1, description="of mamba_head_dim")
    num_layers_divisor: int = Field(ge=1, description="of num_layers")


class PruneConfig(Group):
    """`nemotron nano2 compress prune` at the published size."""

    run: PruneRunConfig
    checkpoint: CheckpointConfig
    dataset: CalibrationConfig
    export_config: ExportConfig
    divisors: DivisorsConfig
