"""Every knob of `qad.py`: type, default, unit, allowed range. Names are those of the other training scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas import training
from nemotron.kit.schemas.evaluation import EvaluationConfig
from nemotron.kit.schemas.group import MODEL, SFT_PACK, Group, ModelPath, ModelRunConfig
from nemotron.kit.schemas.optimizer import OptimizerConfig, SchedulerConfig


class RunConfig(ModelRunConfig):
    """Identity, artifacts read and written."""

    model: Annotated[str, MODEL] = Field(description="the quantised model to go on from, as name or name:version")
    data: Annotated[str, SFT_PACK] = Field(description="rows to distil on: an SFTPack, as name or name:version")


class DatasetConfig(training.DatasetConfig):
    """What is read."""

    path: Path = Field(description="payload of the data artifact: packed Parquet files")
    eval_rows: int = Field(ge=1, description="held-out rows on which KL to the full model is measured, at most")


class TrainConfig(Group):
    """Steps, batches and validations."""

    train_iters: int = Field(ge=1, description="optimiser steps")
    global_batch_size: int = Field(ge=1, description="rows a step")
    micro_batch_size: int = Field(ge=1, description="rows a forward pass; changes memory, not results")
    eval_interval: int = Field(ge=1, description="steps between validations; the first and the last always have one")


class CheckpointConfig(training.CheckpointConfig):
    """Where the weights come from, and how often a run can be resumed from."""

    pretrained_checkpoint: ModelPath


class QADConfig(Group):
    """`nemotron super3 qad`."""

    neutral_keys: ClassVar = training.NEUTRAL_KEYS

    run: RunConfig
    dataset: DatasetConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    logger: training.LoggerConfig = Field(default_factory=training.LoggerConfig)
    rng: training.RngConfig = Field(default_factory=training.RngConfig)
    mixed_precision: training.MixedPrecision = "bf16_mixed"
    resume: training.Resume = None

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        training.check_schedule(self.optimizer, self.scheduler, self.train.train_iters)
        return self
