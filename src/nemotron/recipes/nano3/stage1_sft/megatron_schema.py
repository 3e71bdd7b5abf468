"""Every knob of `train_megatron.py`, for any family whose recipe the library has. The fields are Megatron-Bridge's."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas import megatron
from nemotron.kit.schemas.group import MODEL, SFT_PACK
from nemotron.kit.schemas.megatron import MegatronRunConfig, packing_multiple


class RunConfig(MegatronRunConfig):
    """Identity, what is read, what is written."""

    data: Annotated[str, SFT_PACK] = Field(description="what to train on: an SFTPack, as name or name:version")
    model: Annotated[str, MODEL] = Field(
        description="model to begin with, as name or name:version: a Megatron checkpoint, or Hugging Face layout"
    )


class ModelConfig(megatron.ModelConfig):
    """Fields of `HybridModelProvider`."""

    calculate_per_token_loss: Literal[True] = Field(
        description="the loss is the sum over all trained tokens of a global batch over their number; false would be a "
        "mean over rows, however much of each is trained, and fails with CP"
    )


class TrainConfig(megatron.TrainConfig):
    """How much of it. A sequence is a packed row."""

    train_tokens: int = Field(
        ge=1, description="tokens of all rows, as if they were full: the check of the three numbers below (not the "
        "library's)"
    )  # fmt: skip
    micro_batch_size: Literal[1] = Field(description="rows a forward pass: a packed row is a micro-batch")


class CheckpointConfig(megatron.CheckpointConfig):
    """Where the library saves, and what it begins with."""

    pretrained_checkpoint: str = Field(description="folder of the model to begin with: weights alone")
    load: None = Field(None, description="always the run's own folder, in which the same command goes on")


class SFTConfig(megatron.MegatronConfig):
    """`sft` at the published size: nothing has a default that a family's paper would state."""

    stage: ClassVar[Literal["pretrain", "sft"]] = "sft"
    run: RunConfig
    model: ModelConfig
    train: TrainConfig
    checkpoint: CheckpointConfig

    @model_validator(mode="after")
    def _rows_divide(self) -> Self:
        multiple = packing_multiple(self.model)
        if self.dataset.seq_length % multiple:
            raise ValueError(
                f"dataset.seq_length {self.dataset.seq_length} is no multiple of lcm(2 CP, CP TP) = {multiple}"
            )
        return self
