"""Every knob of `train.py`: type, default, unit, allowed range, and where the default comes from.

Defaults are those of the published Nemotron 3 Nano 30B-A3B where it states one ("tech report": arXiv 2512.20848); group
and field names are Megatron-Bridge's. What other stages have, too, comes from nemotron.kit.schemas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas import optimizer, training
from nemotron.kit.schemas.group import MODEL, SFT_PACK, ModelPath, ModelRunConfig
from nemotron.kit.schemas.peft import PeftConfig
from nemotron.kit.schemas.training import LossReduction


class ModelConfig(training.TrainedModelConfig):
    """Balancing of the experts and multi-token prediction; the architecture is that of the model trained on."""

    moe_aux_loss_coeff: float = Field(1e-4, ge=0, description="weight of the load-balancing loss (tech report 3.1)")
    mtp_loss_scaling_factor: float = Field(
        0.1,
        ge=0,
        description="weight of the loss of multi-token prediction, for a model that has it: a mean over depths, each "
        "over its trained tokens (Megatron-Core's default); 0: its block stays as it is",
    )


class DatasetConfig(training.DatasetConfig):
    """What is read; rows are as long as data preparation packed them."""

    path: Path = Field(description="payload of the data artifact: packed Parquet files")


class TrainConfig(training.TrainConfig):
    """How long. A sequence is a packed row."""

    train_iters: int = Field(13_000, ge=1, description="optimiser steps, at most (tech report 3.1)")
    global_batch_size: int = Field(64, ge=1, description="packed rows a step over all ranks (tech report 3.1)")
    eval_interval: int = Field(100, ge=1, description="steps between validations; the last step is always validated")
    eval_iters: int = Field(64, ge=1, description="global batches a validation, at most")
    loss_reduction: LossReduction = Field(
        "token",
        description="token: the loss is the mean over the trained tokens of a global batch; conversation: over each "
        "conversation first, then over conversations (Super's second stage), for data with "
        "packing.conversation_tokens",
    )
    early_stop_patience: int = Field(
        0, ge=0, description="validations in a row without improvement, after which the final decay begins; 0: never"
    )
    early_stop_min_delta: float = Field(1e-3, ge=0, description="fall of the validation loss that counts, nats a token")


class OptimizerConfig(optimizer.OptimizerConfig):
    """AdamW; learning rate from the tech report, section 3.1, the rest as in pretraining."""

    lr: float = Field(5e-5, gt=0, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate of the last step; at most lr")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="decoupled; not on norms, biases, A_log, D, dt_bias")


class CheckpointConfig(training.CheckpointConfig):
    """Where the weights come from, and how often a run can be resumed from."""

    pretrained_checkpoint: ModelPath


class RunConfig(ModelRunConfig):
    """Identity, artifacts read and written."""

    model: Annotated[str, MODEL] = Field(description="model to tune: name, name:version, directory or hf://ORG/NAME")
    data: Annotated[str, SFT_PACK] = Field(description="artifact to train on: an SFTPack, as name or name:version")


class SFTConfig(training.TrainingConfig):
    """`nemotron nano3 sft`. The tech report states the warm-up (800 steps) and no shape after it."""

    run: RunConfig
    model: ModelConfig = Field(default_factory=ModelConfig)
    dataset: DatasetConfig
    train: TrainConfig = Field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    peft: PeftConfig = Field(default_factory=PeftConfig)
    checkpoint: CheckpointConfig
    mixed_precision: training.MixedPrecision = "bf16_mixed"

    @model_validator(mode="after")
    def _adapters_leave_the_model_as_it_is(self) -> Self:
        if self.peft.peft_scheme and self.model.moe_router_bias_update_rate:
            raise ValueError(
                f"model.moe_router_bias_update_rate {self.model.moe_router_bias_update_rate}: 0 expected with "
                "peft.peft_scheme, since the biases are part of the frozen model"
            )
        return self
