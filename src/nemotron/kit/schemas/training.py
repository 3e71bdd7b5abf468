"""What training scripts share: batches, parallelism, checkpoints, logs, and the config that puts them together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from nemotron.kit.schemas.evaluation import EvaluationConfig
from nemotron.kit.schemas.group import Group, ModelRunConfig, Seed
from nemotron.kit.schemas.optimizer import OptimizerConfig, SchedulerConfig

# "auto": bf16_mixed where the processor multiplies bf16 faster than fp32 (`stack/training/precision.py`), else fp32.
MixedPrecision: TypeAlias = Annotated[
    Literal["auto", "fp32", "bf16_mixed"],
    Field(description="type of the matrix products; auto: bf16 where the processor has it, else fp32"),
]
# "token": every trained token of the global batch weighs the same. "conversation": every conversation does.
LossReduction: TypeAlias = Literal["token", "conversation"]
Resume: TypeAlias = Annotated[
    Path | None, Field(description="run directory to go on in, if not the one of this config and these inputs")
]
# What may change between a run and the one that goes on from its checkpoints, since no number depends on it: what is
# saved and logged how often, and how the model is spread over processes. It is no part of the run's fingerprint.
NEUTRAL_KEYS = ("checkpoint.save_interval", "checkpoint.keep_last", "checkpoint.async_save", "logger", "dist")


class TrainedModelConfig(Group):
    """How the model is trained, whatever its architecture: balancing of the experts, memory."""

    moe_router_bias_update_rate: float = Field(
        1e-3,
        ge=0,
        description="step of the expert bias towards equal loads, once an optimiser step (Megatron-Core's default)",
    )
    moe_aux_loss_coeff: float = Field(ge=0, description="weight of the load-balancing loss")
    recompute_granularity: Literal["full", "selective"] | None = Field(
        None,
        description="blocks whose activations are computed again in the backward pass: all, or recompute_modules; "
        "less memory, same results",
    )
    recompute_modules: list[Literal["mamba", "attention", "moe", "mlp"]] = Field(
        ["mamba"], description="blocks that `selective` recomputes; M blocks keep most"
    )


LinearPrecision: TypeAlias = Literal["bf16", "mxfp8", "nvfp4"]


class QuantRecipe(Group):
    """Precision of each kind of linear layer in NVFP4 training, by default that of Super 3 (arXiv 2604.12374, table 3).

    Embedding, output head, router and multi-token prediction are never quantised, and the last blocks neither.
    """

    in_proj: LinearPrecision = Field("nvfp4", description="input projection of M")
    out_proj: LinearPrecision = Field(
        "mxfp8", description="output projection of M; of its values NVFP4 flushes up to 40 % to zero (Nano 3)"
    )
    qkv_proj: LinearPrecision = Field("bf16", description="query, key and value projections of *")
    o_proj: LinearPrecision = Field("bf16", description="output projection of *")
    latent_proj: LinearPrecision = Field("bf16", description="projections into and out of the latent of E")
    experts: LinearPrecision = Field("nvfp4", description="up and down projections of the routed experts of E")
    shared_experts: LinearPrecision = Field("nvfp4", description="those of the shared expert of E")
    mlp: LinearPrecision = Field("nvfp4", description="those of -, which Super 3 does not have")


class LowPrecisionModelConfig(TrainedModelConfig):
    """The same for training that knows FP8 (numbers of Nano 2, arXiv 2508.14444) and NVFP4 (of Super 3)."""

    num_layers_at_start_in_bf16: int | None = Field(
        None, ge=0, description="first blocks that stay in bf16; null: 4 in FP8 (Nano 2), none in NVFP4 (Super 3)"
    )
    num_layers_at_end_in_bf16: int | None = Field(
        None,
        ge=0,
        description="last blocks that stay in bf16; null: 4 in FP8 (Nano 2), in NVFP4 15 % rounded up "
        "(Super 3: 14 of 88)",
    )
    quant_recipe: QuantRecipe = Field(
        default_factory=QuantRecipe, description="precision of each kind of linear layer in NVFP4 training"
    )


class DatasetConfig(Group):
    """What is read."""

    path: Path = Field(description="payload of the data artifact")


class TrainConfig(Group):
    """Steps, batches and validations."""

    train_iters: int = Field(ge=1, description="optimiser steps")
    global_batch_size: int = Field(ge=1, description="sequences a step over all ranks")
    micro_batch_size: int = Field(
        1, ge=1, description="sequences a forward pass on one rank; changes memory, and results by rounding alone"
    )
    eval_interval: int = Field(ge=1, description="steps between validations; the last step is always validated")
    eval_iters: int = Field(ge=1, description="global batches a validation, at most")


class DistConfig(Group):
    """How the model is spread over the processes of torchrun."""

    use_torch_fsdp2: bool = Field(
        False, description="each process holds a slice of weights, gradients and moments (FSDP2) instead of all of them"
    )


class CheckpointConfig(Group):
    """How often a run can be resumed from."""

    save_interval: int = Field(
        500, ge=1, description="steps between checkpoints; also saved at the end and on a signal"
    )
    keep_last: int = Field(2, ge=1, description="newest checkpoints kept")
    async_save: bool = Field(
        True, description="write them in the background, from a copy in CPU memory; a step waits for the copy only"
    )


def _without_password(address: str) -> str:
    if urlsplit(address).password:
        raise ValueError("no password in it: the address is kept in records; MLFLOW_TRACKING_PASSWORD has its place")
    return address


class TrackersConfig(Group):
    """Where metrics go beside metrics.jsonl; a tracker that fails never fails the run. Names of Megatron-Bridge."""

    wandb_project: str | None = Field(None, description="project in W&B; before [tool.wandb] of env.toml")
    wandb_entity: str | None = Field(None, description="user or team in W&B; None: your default")
    wandb_exp_name: str | None = Field(None, description="name of the run in W&B; None: nano3/sft/CONFIG-FINGERPRINT")
    mlflow_experiment: str | None = Field(None, description="experiment in MLflow")
    mlflow_run_name: str | None = Field(None, description="name of the run in MLflow; None: as in W&B")
    mlflow_tracking_uri: Annotated[str, AfterValidator(_without_password)] | None = Field(
        None,
        description="server, file or database of MLflow, without a password; None: MLFLOW_TRACKING_URI or its default",
    )
    trackio_project: str | None = Field(None, description="project in trackio, on this machine or in TRACKIO_SPACE_ID")
    tensorboard_dir: str | None = Field(
        None, description="folder of event files, one folder a run in it; a relative path is below the output root"
    )


class LoggerConfig(TrackersConfig):
    """What is written while it runs."""

    log_interval: int = Field(10, ge=1, description="steps between lines of metrics.jsonl")


class RngConfig(Group):
    """Randomness."""

    seed: Seed = Field(1234, description="of the data order and, in pretraining, of initial weights")


class TrainingConfig(Group):
    """Training on tokens, pretraining and SFT alike; a stage narrows what is its own."""

    neutral_keys: ClassVar = NEUTRAL_KEYS

    run: ModelRunConfig
    model: TrainedModelConfig
    dataset: DatasetConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    dist: DistConfig = Field(default_factory=DistConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    rng: RngConfig = Field(default_factory=RngConfig)
    resume: Resume = None

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        check_schedule(self.optimizer, self.scheduler, self.train.train_iters)
        return self

    def check_machines(self, nodes: int, processes_per_node: int, _launcher: str) -> list[str]:
        """Before the job is submitted or begun: ValueError where the batch does not divide among its processes."""
        check_divides("train.global_batch_size", self.train.global_batch_size, nodes * processes_per_node)
        return []


def check_divides(key: str, count: int, processes: int) -> None:
    """ValueError naming the config key where `count` of something cannot be spread evenly over the processes."""
    if count % processes:
        raise ValueError(f"{key} {count} does not divide among {processes} processes")


def check_schedule(optimizer: OptimizerConfig, scheduler: SchedulerConfig, steps: int) -> None:
    """ValueError where warm-up and decay take more steps than there are, or the rate would decay upwards."""
    decay = scheduler.lr_wsd_decay_iters if scheduler.lr_decay_style == "WSD" else 0
    if scheduler.lr_warmup_iters + decay > steps:
        raise ValueError(
            f"scheduler.lr_warmup_iters {scheduler.lr_warmup_iters} + scheduler.lr_wsd_decay_iters {decay} "
            f"exceed train.train_iters {steps}: lower those, too"
        )
    if optimizer.min_lr > optimizer.lr:
        raise ValueError(f"optimizer.min_lr {optimizer.min_lr} exceeds optimizer.lr {optimizer.lr}")
