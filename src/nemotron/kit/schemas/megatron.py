"""Config groups of a training on Megatron-Bridge (0.6.2): a key is the library's field of that name, and is handed on.

Groups are those of its `ConfigContainer`. Nothing that decides what is trained has a default here: length, batch,
tokens, schedule and parallelism stand in every config, so that none of them is inherited in silence. A key that is no
field of the library says so. `tests/contracts/` checks all keys against the library's sources.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas.group import MODEL, PRETRAIN_BLEND, Group, RunConfig


class ParallelConfig(Group):
    """Fields of `HybridModelProvider` that say where the model lies; the product with the data parallel size is the
    number of GPUs."""

    tensor_model_parallel_size: int = Field(ge=1, description="TP: GPUs that share each matrix; divides the heads")
    pipeline_model_parallel_size: int = Field(ge=1, description="PP: GPUs that share the blocks")
    context_parallel_size: int = Field(ge=1, description="CP: GPUs that share the tokens of a sequence")
    expert_model_parallel_size: int = Field(ge=1, description="EP: GPUs that share the routed experts; divides them")
    expert_tensor_parallel_size: int = Field(ge=1, description="TP of the routed experts")
    sequence_parallel: bool = Field(description="SP: norms and residuals are shared along the tokens; needs TP above 1")


class ModelConfig(ParallelConfig):
    """Fields of `HybridModelProvider`; dimensions and kernels are those of the library's recipe."""

    seq_length: int = Field(ge=2, description="tokens a sequence")
    moe_aux_loss_coeff: float = Field(ge=0, description="weight of the load-balancing loss")
    moe_router_bias_update_rate: float = Field(ge=0, description="step of the expert bias towards equal loads")
    recompute_granularity: Literal["full", "selective"] | None = Field(description="activations computed again")
    recompute_modules: list[
        Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
    ] = Field(description="parts of blocks that `selective` recomputes")


class DatasetConfig(Group):
    """What is read."""

    path: Path = Field(description="payload of the data artifact: blend.json, .bin and .idx files (not the library's)")
    phase: str | None = Field(
        None, description="phase of the blend whose weights count; None: its only one (not the library's)"
    )
    seq_length: int = Field(ge=2, description="tokens a sequence; that of the model")
    num_workers: int = Field(8, ge=0, description="processes that read, a GPU")


class TrainConfig(Group):
    """How much of it. Training ends at `train_iters` of the whole schedule, wherever a run begins."""

    train_tokens: int = Field(
        ge=1, description="tokens from the first iteration of the schedule to the last: the check of the three numbers "
        "below (not the library's)"
    )  # fmt: skip
    train_iters: int = Field(ge=1, description="iterations from the beginning of the schedule")
    global_batch_size: int = Field(ge=1, description="sequences an iteration over all GPUs")
    micro_batch_size: int = Field(ge=1, description="sequences a forward pass on one model replica")
    exit_duration_in_mins: int | None = Field(
        None, ge=1, description="save and leave after so many minutes: `checkpoint_must_save_by` of NeMo-RL"
    )


class ValidationConfig(Group):
    """How often held-out text is scored."""

    eval_interval: int = Field(ge=1, description="iterations between validations")
    eval_iters: int = Field(ge=1, description="global batches of a validation")


class OptimizerConfig(Group):
    """Adam."""

    lr: float = Field(gt=0, description="peak learning rate")
    min_lr: float = Field(ge=0, description="learning rate at the end of the decay; at most lr")
    adam_beta1: float = Field(ge=0, lt=1, description="decay of the first moment")
    adam_beta2: float = Field(ge=0, lt=1, description="decay of the second moment")
    adam_eps: float = Field(gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(ge=0, description="decoupled; not on norms and biases")
    clip_grad: float = Field(gt=0, description="largest norm of all gradients together")


class SchedulerConfig(Group):
    """Learning rate over the iterations of the whole schedule, which may be longer than `train_iters`."""

    lr_decay_style: Literal["WSD", "cosine", "constant"] = Field(description="shape after the warm-up")
    lr_warmup_iters: int = Field(ge=0, description="iterations of linear warm-up")
    lr_decay_iters: int = Field(ge=1, description="iterations from the beginning to the end of the decay")
    lr_wsd_decay_iters: int | None = Field(None, ge=1, description="iterations of the decay of WSD, the last ones")
    lr_wsd_decay_style: Literal["linear", "minus_sqrt", "cosine", "exponential"] = Field(
        "linear", description="shape of that decay; the library's own default is exponential"
    )


class CheckpointConfig(Group):
    """Where the library saves; the default is the folder of the run, in which the same command goes on."""

    pretrained_checkpoint: str | None = Field(
        None, description="folder of checkpoints to begin with: weights alone, the schedule from its beginning"
    )
    load: str | None = Field(
        None,
        description="folder of checkpoints to go on from with optimiser, schedule and iteration; None: the run's own",
    )
    save_interval: int = Field(ge=1, description="iterations between checkpoints")
    most_recent_k: int = Field(2, ge=-1, description="newest checkpoints kept; -1: all")
    async_save: bool = Field(True, description="write them in the background")


class LoggerConfig(Group):
    """What is logged."""

    log_interval: int = Field(10, ge=1, description="iterations between lines")
    wandb_project: str | None = Field(None, description="project in W&B")
    wandb_exp_name: str | None = Field(None, description="name of the run in W&B")


class RestartConfig(Group):
    """`inprocess_restart`: NVRx begins again in the same processes where a rank fails or hangs."""

    enabled: bool = Field(False, description="catch a failing or hanging rank, and go on from the last checkpoint")
    soft_timeout: float = Field(60.0, gt=0, description="seconds without progress until a rank counts as hanging")
    hard_timeout: float = Field(90.0, gt=0, description="seconds without progress until its process is ended")


class StragglerConfig(Group):
    """`nvrx_straggler`: which GPUs are slower than the others."""

    enabled: bool = Field(False, description="measure every GPU")
    report_time_interval: float = Field(300.0, gt=0, description="seconds between reports")
    stop_if_detected: bool = Field(False, description="save and leave where one is too slow")


class MegatronRunConfig(RunConfig):
    """Identity, what is read, what is written."""

    output: str | None = Field(None, description="name under which the last checkpoint is published")


class MegatronConfig(Group):
    """A training on Megatron-Bridge."""

    run: MegatronRunConfig
    recipe: str = Field(
        description="function of megatron.bridge.recipes.nemotronh that the config starts from: dimensions, kernels, "
        "environment"
    )
    model: ModelConfig
    dataset: DatasetConfig
    train: TrainConfig
    validation: ValidationConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    checkpoint: CheckpointConfig
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    inprocess_restart: RestartConfig = Field(default_factory=RestartConfig)
    nvrx_straggler: StragglerConfig = Field(default_factory=StragglerConfig)
    mixed_precision: str = Field(description="recipe of megatron.bridge.training.mixed_precision, such as bf16_mixed")

    @model_validator(mode="after")
    def _numbers_agree(self) -> Self:
        model, train, scheduler = self.model, self.train, self.scheduler
        if model.seq_length != self.dataset.seq_length:
            raise ValueError(f"model.seq_length {model.seq_length} is not dataset.seq_length {self.dataset.seq_length}")
        tokens_per_iteration = train.global_batch_size * model.seq_length
        tokens = train.train_iters * tokens_per_iteration
        if abs(tokens - train.train_tokens) > tokens_per_iteration:  # a published figure is no whole number of batches
            raise ValueError(
                f"train.train_iters {train.train_iters:,} x train.global_batch_size {train.global_batch_size:,} x "
                f"model.seq_length {model.seq_length:,} are {tokens:,} tokens, train.train_tokens says "
                f"{train.train_tokens:,}: {round(train.train_tokens / tokens_per_iteration):,} iterations would be that"
            )
        if train.train_iters > scheduler.lr_decay_iters and scheduler.lr_decay_style != "constant":
            raise ValueError(
                f"train.train_iters {train.train_iters:,} exceeds scheduler.lr_decay_iters {scheduler.lr_decay_iters:,}"
            )
        if scheduler.lr_decay_style == "WSD" and scheduler.lr_wsd_decay_iters is None:
            raise ValueError("scheduler.lr_wsd_decay_iters is missing: the library would decay from the beginning")
        decay = scheduler.lr_wsd_decay_iters or 0
        if scheduler.lr_warmup_iters + decay > scheduler.lr_decay_iters:
            raise ValueError(
                f"scheduler.lr_warmup_iters {scheduler.lr_warmup_iters:,} + lr_wsd_decay_iters {decay:,} exceed "
                f"lr_decay_iters {scheduler.lr_decay_iters:,}"
            )
        if self.optimizer.min_lr > self.optimizer.lr:
            raise ValueError(f"optimizer.min_lr {self.optimizer.min_lr} exceeds optimizer.lr {self.optimizer.lr}")
        if model.sequence_parallel and model.tensor_model_parallel_size == 1:
            raise ValueError("model.sequence_parallel shares tokens among the GPUs of TP, and TP is 1: set it to false")
        return self


class PretrainRunConfig(MegatronRunConfig):
    """Of a pretraining, which reads a blend."""

    data: Annotated[str, PRETRAIN_BLEND] = Field(
        description="what to train on: a PretrainBlend, as name or name:version"
    )
    model: Annotated[str | None, MODEL] = Field(
        None, description="checkpoint to go on from, as name or name:version; `checkpoint.load` says where it lies"
    )


class MegatronPretrainConfig(MegatronConfig):
    """Pretraining: token streams, mixed by the blend of the data artifact."""

    run: PretrainRunConfig


def check_layout(model: ParallelConfig, *, heads: int, groups: int, experts: int, blocks: int) -> None:
    """ValueError where the parallelism does not divide the model.

    Args:
        heads: query heads of attention. groups: groups of Mamba's B and C. experts: routed ones; 0: none.
        blocks: of the pattern.
    """
    tensor, pipeline = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    for name, size, what, count in (
        ("tensor_model_parallel_size", tensor, "attention heads", heads),
        ("tensor_model_parallel_size", tensor, "groups of Mamba", groups),
        ("pipeline_model_parallel_size", pipeline, "blocks", blocks),
        ("expert_model_parallel_size", model.expert_model_parallel_size, "experts", experts or 1),
    ):
        if count % size:
            raise ValueError(f"{name} {size} does not divide the {count} {what}")
