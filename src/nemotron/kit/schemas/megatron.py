"""Config groups of a training on Megatron-Bridge (0.6.2): a key is the library's field of that name, and is handed on.

Groups are those of its `ConfigContainer`. Nothing that decides what is trained has a default here: length, batch,
tokens, schedule and parallelism stand in every config, so that none of them is inherited in silence. A key that is no
field of the library says so. `tests/contracts/` checks all keys against the library's sources.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from nemo_runspec.errors import did_you_mean
from nemotron.kit.schemas.group import MODEL, PRETRAIN_BLEND, Group, RunConfig


@dataclass(frozen=True)
class Dimensions:
    """What parallelism has to divide; 0: the model has none. `groups`: of Mamba's B and C. `experts`: routed ones, and
    the width of one."""

    blocks: int
    heads: int
    mamba_heads: int
    groups: int
    experts: int
    expert_width: int
    mtp: bool = False


# By the models that recipes of the library are named after: MODEL_pretrain_…, MODEL_sft_….
DIMENSIONS = {
    "nemotron_3_nano": Dimensions(52, 32, 64, 8, 128, 1856),  # arXiv 2512.20848, table 1
    "nemotron_3_super": Dimensions(88, 32, 128, 8, 512, 2688, mtp=True),  # arXiv 2604.12374
    "nemotron_nano_12b_v2": Dimensions(62, 40, 128, 8, 0, 0),  # arXiv 2508.14444
    "nemotron_nano_9b_v2": Dimensions(56, 40, 128, 8, 0, 0),  # the same, pruned
}


MixedPrecision = Literal[
    "bf16_mixed",
    "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed",
    "bf16_with_mxfp8_mixed",
    "bf16_with_nvfp4_mixed",
    "nanov2_bf16_with_fp8_current_scaling_mixed",
    "nemotron_h_bf16_with_fp8_current_scaling_mixed",
    "nemotron_3_super_bf16_with_nvfp4_mixed",
]


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
    moe_aux_loss_coeff: float | None = Field(
        None, ge=0, description="weight of the load-balancing loss; stated by every model with experts, and by no other"
    )
    moe_router_bias_update_rate: float | None = Field(
        None, ge=0, description="step of the expert bias towards equal loads; the same"
    )
    mtp_num_layers: int | None = Field(
        None,
        ge=0,
        description="depths of multi-token prediction: how often its block is applied; stated by every model that has "
        "it, and by no other",
    )
    mtp_use_repeated_layer: bool | None = Field(None, description="one block for all depths; the same")
    mtp_loss_scaling_factor: float | None = Field(None, ge=0, description="weight of its loss; the same")
    recompute_granularity: Literal["full", "selective"] | None = Field(description="activations computed again")
    recompute_modules: list[
        Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
    ] = Field(description="parts of blocks that `selective` recomputes")
    cuda_graph_impl: Literal["none"] | None = Field(
        None, description="none: without the CUDA graphs of the library's recipe; not stated: as they are there"
    )

    def fields(self) -> dict[str, Any]:
        """What is set in the library's object: all but what only models with experts or MTP have, or is not stated."""
        absent = {key for key in (*MOE_KEYS, *MTP_KEYS, "cuda_graph_impl") if getattr(self, key) is None}
        return self.model_dump(exclude=absent)


MOE_KEYS = ("moe_aux_loss_coeff", "moe_router_bias_update_rate")
MTP_KEYS = ("mtp_num_layers", "mtp_use_repeated_layer", "mtp_loss_scaling_factor")


class DataConfig(Group):
    """What is read."""

    path: Path = Field(description="payload of the data artifact (not the library's)")
    seq_length: int = Field(ge=2, description="tokens a sequence; that of the model")
    num_workers: int = Field(8, ge=0, description="processes that read, a GPU")


class DatasetConfig(DataConfig):
    """Token streams: blend.json, .bin and .idx files."""

    phase: str | None = Field(
        None, description="phase of the blend whose weights count; None: its only one (not the library's)"
    )


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
    """Adam. Master weights and moments are fp32 in every run; some recipes of the library have them in 16 bits."""

    lr: float = Field(gt=0, description="peak learning rate")
    min_lr: float = Field(ge=0, description="learning rate at the end of the decay; at most lr")
    adam_beta1: float = Field(ge=0, lt=1, description="decay of the first moment")
    adam_beta2: float = Field(ge=0, lt=1, description="decay of the second moment")
    adam_eps: float = Field(gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(ge=0, description="decoupled; not on norms and biases; the same from beginning to end")
    clip_grad: float = Field(gt=0, description="largest norm of all gradients together")


class DDPConfig(Group):
    """Replicas. The library sets this field to what its recipe of `mixed_precision` has; so does the script there."""

    grad_reduce_in_fp32: bool = Field(description="gradients are kept and summed in fp32; false: in bf16")


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
    most_recent_k: int = Field(2, ge=-1, description="newest checkpoints kept; 0, -1: all")
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
    granularity: Literal["node", "rank"] = Field("node", description="what is left out where it fails again")
    active_world_size: int | None = Field(
        None, ge=1, description="ranks that train; the others wait in reserve. None: all"
    )


class FaultToleranceConfig(Group):
    """`ft`: tells NVRx's ft_launcher what goes on, so that it ends a step that hangs; `launcher` of the profile."""

    enable_ft_package: bool = Field(False, description="report the sections setup, step and checkpointing to it")
    calc_ft_timeouts: bool = Field(False, description="replace its time limits by what was seen, at each checkpoint")


class StragglerConfig(Group):
    """`nvrx_straggler`: which GPUs are slower than the others."""

    enabled: bool = Field(False, description="measure every GPU")
    report_time_interval: float = Field(300.0, gt=0, description="seconds between reports")
    gpu_relative_perf_threshold: float = Field(
        0.7, ge=0, le=1, description="share of the fastest GPU's speed below which one counts as too slow"
    )
    gpu_individual_perf_threshold: float = Field(
        0.7, ge=0, le=1, description="share of its own best speed below which a GPU counts as too slow"
    )
    stop_if_detected: bool = Field(False, description="save and leave where one is too slow")


class MegatronRunConfig(RunConfig):
    """Identity, what is read, what is written."""

    output: str | None = Field(None, description="name under which the last checkpoint is published")


class MegatronConfig(Group):
    """A training on Megatron-Bridge."""

    run: MegatronRunConfig
    stage: ClassVar[Literal["pretrain", "sft"]]
    recipe: str = Field(
        description="function of megatron.bridge.recipes.nemotronh that the config starts from: dimensions, kernels, "
        "environment"
    )
    model: ModelConfig
    dataset: DataConfig
    train: TrainConfig
    validation: ValidationConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    ddp: DDPConfig
    checkpoint: CheckpointConfig
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    ft: FaultToleranceConfig = Field(default_factory=FaultToleranceConfig)
    inprocess_restart: RestartConfig = Field(default_factory=RestartConfig)
    nvrx_straggler: StragglerConfig = Field(default_factory=StragglerConfig)
    mixed_precision: MixedPrecision = Field(description="recipe of megatron.bridge.training.mixed_precision")

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
        if self.ft.enable_ft_package and self.inprocess_restart.enabled:
            raise ValueError("ft.enable_ft_package and inprocess_restart.enabled: one of them starts again, not both")
        if self.optimizer.min_lr > self.optimizer.lr:
            raise ValueError(f"optimizer.min_lr {self.optimizer.min_lr} exceeds optimizer.lr {self.optimizer.lr}")
        return self

    @model_validator(mode="after")
    def _layout_divides(self) -> Self:
        name, is_of_stage, _ = self.recipe.partition(f"_{self.stage}_")
        if not is_of_stage:
            raise ValueError(f"recipe {self.recipe}: the name of one for this step has _{self.stage}_ in it")
        dimensions = DIMENSIONS.get(name)
        if dimensions is None:
            near = did_you_mean(name, DIMENSIONS)
            raise ValueError(f"recipe {self.recipe}: what a layout has to divide is not known of {name}: {near}")
        for keys, there in ((MOE_KEYS, dimensions.experts > 0), (MTP_KEYS, dimensions.mtp)):
            for key in keys:
                if there and getattr(self.model, key) is None:
                    raise ValueError(f"model.{key} is missing: the library's own value would stand")
                if not there and getattr(self.model, key) is not None:
                    raise ValueError(f"model.{key} is of no meaning for {name}")
        if self.model.mtp_use_repeated_layer and not self.model.mtp_num_layers:
            raise ValueError("model.mtp_use_repeated_layer: true builds a block, mtp_num_layers 0 never applies it")
        check_layout(self.model, dimensions, self.model.seq_length, "model.")
        return self

    def check_machines(self, nodes: int, processes_per_node: int, launcher: str) -> list[str]:
        """Before the job is submitted: ValueError where these GPUs do not fit; what to warn of."""
        batch, micro_batch = self.train.global_batch_size, self.train.micro_batch_size
        check_replicas(self.model, nodes * processes_per_node, batch, micro_batch, "train.")
        if self.ft.enable_ft_package and launcher != "ft_launcher":
            raise ValueError(
                f"ft.enable_ft_package asks ft_launcher's monitors, and the profile's launcher is {launcher}"
            )
        return warnings_of(self.model)


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

    stage: ClassVar[Literal["pretrain", "sft"]] = "pretrain"
    run: PretrainRunConfig
    dataset: DatasetConfig


def check_layout(parallel: ParallelConfig, dimensions: Dimensions, seq_length: int, group: str = "") -> None:
    """ValueError where the parallelism does not divide the model, or its sequences. group: goes before each key."""
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    for name, size, what, count in (
        ("tensor_model_parallel_size", tensor, "attention heads", dimensions.heads),
        ("tensor_model_parallel_size", tensor, "groups of Mamba", dimensions.groups),
        ("pipeline_model_parallel_size", parallel.pipeline_model_parallel_size, "blocks", dimensions.blocks),
        ("expert_model_parallel_size", parallel.expert_model_parallel_size, "experts", dimensions.experts or 1),
        (
            "expert_tensor_parallel_size", parallel.expert_tensor_parallel_size, "columns of an expert",
            dimensions.expert_width or 1,
        ),
        # Between the TP parts Mamba's CP deals heads out, and groups as far as there are some.
        ("context_parallel_size", context, "heads of Mamba in a TP part", dimensions.mamba_heads // tensor),
    ):  # fmt: skip
        if count % size:
            raise ValueError(f"{group}{name} {size} does not divide the {count:,} {what}")
    groups = dimensions.groups // tensor
    if groups % context and context % groups:
        raise ValueError(
            f"{group}context_parallel_size {context} neither divides the {groups} groups of Mamba in a TP part, nor "
            "is a multiple of them"
        )
    # Causal attention is balanced by a piece from the front and one from the back for each GPU; SP cuts what it has.
    pieces = (2 * context if context > 1 else 1, context * tensor if parallel.sequence_parallel else 1)
    if seq_length % lcm(*pieces):
        raise ValueError(f"{seq_length:,} tokens of a sequence are no multiple of lcm(2 CP, CP TP) = {lcm(*pieces)}")
    if parallel.sequence_parallel and tensor == 1:
        raise ValueError(f"{group}sequence_parallel shares tokens among the GPUs of TP, and TP is 1: set it to false")
    if dimensions.experts and tensor > 1 and not parallel.sequence_parallel:
        raise ValueError(
            f"{group}tensor_model_parallel_size {tensor} with experts: Megatron-Core trains so with "
            f"{group}sequence_parallel: true alone"
        )


def dimensions_of(model: str) -> Dimensions | None:
    """Those of a model by its name or folder in Hugging Face layout, None where the name holds none of DIMENSIONS."""
    name = re.sub(r"[^a-z0-9]+", "_", model.lower())
    return next((dimensions for key, dimensions in DIMENSIONS.items() if key in name), None)


def check_replicas(parallel: ParallelConfig, gpus: int, batch: int, micro_batch: int, group: str) -> None:
    """ValueError where so many GPUs cannot be laid out so, or a batch cannot be dealt out to them.

    Args:
        batch: sequences an iteration, micro_batch: sequences a forward pass of a replica.
        group: goes before the keys global_batch_size and micro_batch_size.
    """
    pipeline = parallel.pipeline_model_parallel_size
    replica = parallel.tensor_model_parallel_size * pipeline * parallel.context_parallel_size
    experts = parallel.expert_tensor_parallel_size * parallel.expert_model_parallel_size * pipeline
    for name, size in (("TP x PP x CP", replica), ("ETP x EP x PP", experts)):
        if gpus % size:
            raise ValueError(f"{gpus} GPUs that train are no multiple of {name} = {size}")
    if batch % (gpus // replica * micro_batch):
        raise ValueError(
            f"{group}global_batch_size {batch} is no multiple of {gpus // replica} replicas x {group}micro_batch_size "
            f"{micro_batch}"
        )


def warnings_of(parallel: ParallelConfig) -> list[str]:
    """What is known to go wrong with a layout of a Mamba hybrid."""
    if parallel.context_parallel_size == 1:
        return []
    size = f"context_parallel_size {parallel.context_parallel_size} with Mamba"
    return [
        f"{size}: NaN has been reported (Megatron-Bridge issue 2914); compare first losses with those of fewer GPUs"
    ]


def packing_multiple(model: ParallelConfig) -> int:
    """Tokens of which every packed conversation takes a multiple: lcm(2 CP, CP TP); 1 without CP.

    CP cuts each conversation into 2 CP pieces, two of which go to a GPU, and SP cuts what a GPU has into TP
    (Megatron-Bridge issue 5080).
    """
    tensor, context = model.tensor_model_parallel_size, model.context_parallel_size
    return 1 if context == 1 else lcm(2 * context, context * tensor)
