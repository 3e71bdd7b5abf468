"""Config groups of a training on NeMo-RL (0.7.0): a key is the library's key of that name, and is handed on.

Groups are those of its two `MasterConfig`s, for GRPO and DPO. The library takes any key, and passes over one that it
does not know; here that is an error, and `tests/contracts/` checks all keys against its sources. Nothing that decides
what is trained has a default here: lengths, batches, rewards, loss, layout and generation stand in every config. What
has a default is machinery that all published runs set alike. Folders of checkpoints and logs are the run's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, model_validator

from nemo_runspec.errors import nearest
from nemotron.kit.schemas.group import Group, RunConfig, Seed
from nemotron.kit.schemas.megatron import (
    Dimensions,
    ParallelConfig,
    check_layout,
    check_replicas,
    dimensions_of,
    warnings_of,
)

GYM_KINDS = ("resources_servers", "responses_api_models", "responses_api_agents")
PRECISION = Literal["bfloat16", "float32"]


# ---- policy: the model being trained, and where it lies


class MegatronOptimizerConfig(Group):
    """Adam of Megatron-Core (`OptimizerConfig`)."""

    optimizer: Literal["adam"] = Field("adam", description="algorithm")
    lr: float = Field(gt=0, description="peak learning rate")
    min_lr: float = Field(ge=0, description="learning rate at the end of the decay; with `constant` that of the peak")
    weight_decay: float = Field(ge=0, description="decoupled; not on norms and biases")
    adam_beta1: float = Field(ge=0, lt=1, description="decay of the first moment")
    adam_beta2: float = Field(ge=0, lt=1, description="decay of the second moment")
    adam_eps: float = Field(gt=0, description="added to the root of the second moment")
    clip_grad: float = Field(gt=0, description="largest norm of all gradients together")
    bf16: bool = Field(True, description="weights in bfloat16, master weights as `params_dtype`")
    fp16: bool = Field(False, description="weights in float16")
    params_dtype: Literal["float32"] = Field("float32", description="type of the master weights")
    sgd_momentum: float = Field(0.9, ge=0, description="of SGD, which is not used; the library demands it")
    use_distributed_optimizer: bool = Field(True, description="replicas share the optimiser's state")
    use_precision_aware_optimizer: bool = Field(True, description="moments and gradients may have types of their own")
    optimizer_cpu_offload: bool = Field(False, description="optimiser in the memory of the host")
    optimizer_offload_fraction: float = Field(0.0, ge=0, le=1, description="share of it that is")


class MegatronSchedulerConfig(Group):
    """Learning rate over the steps (`SchedulerConfig`); NeMo-RL sets its end to the end of the training."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(description="shape after the warm-up")
    lr_warmup_iters: int = Field(ge=0, description="steps of linear warm-up")
    lr_warmup_init: float = Field(ge=0, description="learning rate at the first step")
    start_weight_decay: float = Field(ge=0, description="weight decay at the beginning")
    end_weight_decay: float = Field(ge=0, description="weight decay at the end")
    weight_decay_incr_style: Literal["constant"] = Field("constant", description="how it moves between both")


class MegatronDDPConfig(Group):
    """Gradients between replicas."""

    grad_reduce_in_fp32: bool = Field(False, description="sum gradients in float32")
    overlap_grad_reduce: bool = Field(True, description="while the backward pass goes on")
    overlap_param_gather: bool = Field(True, description="gather parameters while the forward pass goes on")
    use_custom_fsdp: bool = Field(False, description="nothing reads it; the library demands it")
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = Field(
        "optim_grads_params", description="what FSDP would share"
    )


class MegatronConfig(ParallelConfig):
    """Megatron-Core as the trainer: layout, recomputation, router."""

    enabled: Literal[True] = Field(True, description="train with Megatron-Core")
    num_layers_in_first_pipeline_stage: int | None = Field(None, ge=1, description="blocks of the first of PP stages")
    num_layers_in_last_pipeline_stage: int | None = Field(None, ge=1, description="blocks of the last of PP stages")
    pipeline_dtype: PRECISION = Field("bfloat16", description="type of what is sent between PP stages")
    activation_checkpointing: bool = Field(description="compute activations again in the backward pass")
    recompute_granularity: Literal["full", "selective"] = Field("full", description="all of them, or recompute_modules")
    recompute_modules: list[str] | None = Field(None, description="parts of blocks that `selective` recomputes")
    freeze_moe_router: bool = Field(description="train no router; its expert bias may still move")
    moe_router_dtype: Literal["fp32", "fp64"] = Field("fp32", description="type of the router's scores")
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = Field(
        "none", description="loss on unequal loads; with one, trainer and generator come apart (NeMo-RL's Nano recipe)"
    )
    moe_router_bias_update_rate: float = Field(ge=0, description="step of the expert bias towards equal loads")
    moe_permute_fusion: bool = Field(True, description="fused kernel that sorts tokens by expert")
    moe_enable_deepep: bool = Field(False, description="DeepEP between the GPUs of EP")
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = Field(
        "alltoall", description="how tokens travel to their experts"
    )
    moe_shared_expert_overlap: bool = Field(False, description="compute the shared expert while tokens travel")
    moe_per_layer_logging: bool = Field(True, description="log loads of every block")
    mtp_num_layers: int = Field(0, ge=0, description="depths of multi-token prediction that are trained; 0: none")
    mtp_loss_scaling_factor: float = Field(0.3, ge=0, description="weight of their loss")
    mtp_use_repeated_layer: bool = Field(False, description="one block, applied so often, in place of several")
    mtp_detach_heads: bool = Field(False, description="their loss does not reach the model below")
    apply_rope_fusion: bool = Field(True, description="fused rotary embedding; Nemotron has none")
    bias_activation_fusion: bool = Field(
        False, description="fused bias and activation; squared ReLU has no such kernel"
    )
    gradient_accumulation_fusion: bool = Field(False, description="add weight gradients within the matrix product")
    use_fused_weighted_squared_relu: bool = Field(False, description="fused activation of the experts")
    defer_fp32_logits: bool = Field(True, description="logits in float32 chunk by chunk; logprob_chunk_size needs it")
    empty_unused_memory_level: int = Field(
        1, ge=0, le=2, description="memory freed between phases; 1 before generation"
    )
    optimizer: MegatronOptimizerConfig
    scheduler: MegatronSchedulerConfig
    distributed_data_parallel_config: MegatronDDPConfig = Field(default_factory=MegatronDDPConfig)


class DisabledConfig(Group):
    """A part of the library that is not used."""

    enabled: Literal[False] = Field(False, description="off")


class SequencePackingConfig(Group):
    """Several sequences in a row of a micro-batch."""

    enabled: bool = Field(description="pack; CP above 1 needs it, DPO cannot have it")
    train_mb_tokens: int = Field(ge=1, description="tokens of a packed row when training")
    logprob_mb_tokens: int = Field(ge=1, description="tokens of a packed row when computing log-probabilities")
    algorithm: Literal[
        "modified_first_fit_decreasing", "first_fit_decreasing", "first_fit_shuffle", "concatenative"
    ] = Field("modified_first_fit_decreasing", description="which sequences share a row")


class TokenizerConfig(Group):
    """Text to tokens."""

    name: str = Field(description="folder or name in Hugging Face layout")
    chat_template_kwargs: dict[str, JsonValue] | None = Field(None, description="what the chat template is told")


class TrainedPolicyConfig(Group):
    """The model, whatever its loss."""

    model_name: str = Field(
        description="folder or name in Hugging Face layout: architecture and tokenizer, and the weights too unless "
        "checkpointing.pretrained_checkpoint says where they are"
    )
    tokenizer: TokenizerConfig
    train_global_batch_size: int = Field(ge=1, description="sequences an update; of DPO: pairs")
    train_micro_batch_size: int = Field(ge=1, description="sequences (DPO: pairs) a forward pass on one replica")
    logprob_batch_size: int = Field(1, ge=1, description="sequences a pass that computes log-probabilities")
    logprob_chunk_size: int | None = Field(2048, ge=1, description="tokens whose logits exist at a time; null: all")
    max_total_sequence_length: int = Field(ge=2, description="tokens of a prompt and its responses")
    precision: PRECISION = Field(description="type of the weights")
    megatron_cfg: MegatronConfig
    dtensor_cfg: DisabledConfig = Field(default_factory=DisabledConfig)
    draft: DisabledConfig = Field(default_factory=DisabledConfig)
    dynamic_batching: DisabledConfig = Field(default_factory=DisabledConfig)
    make_sequence_length_divisible_by: int = Field(
        ge=1, description="sequences are padded to a multiple of this: of 2 x CP, and of TP with sequence_parallel"
    )
    max_grad_norm: float = Field(gt=0, description="largest norm of all gradients together")
    optimizer: None = Field(None, description="of the other backend")
    scheduler: None = Field(None, description="of the other backend")

    @model_validator(mode="after")
    def _divides(self) -> Self:
        layout = self.megatron_cfg
        tensor, pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
        dimensions = dimensions_of(self.model_name) or Dimensions(  # what is not known of a model counts as divided
            blocks=pipeline, heads=tensor, mamba_heads=tensor * layout.context_parallel_size, groups=8,
            experts=layout.expert_model_parallel_size, expert_width=layout.expert_tensor_parallel_size,
        )  # fmt: skip
        if layout.mtp_use_repeated_layer and not layout.mtp_num_layers:
            raise ValueError(
                "megatron_cfg.mtp_use_repeated_layer: true builds a block, mtp_num_layers 0 never applies it"
            )
        first, last = layout.num_layers_in_first_pipeline_stage, layout.num_layers_in_last_pipeline_stage
        if ends := [blocks for blocks in (first, last) if blocks is not None]:
            blocks, stages = dimensions.blocks - sum(ends), pipeline - len(ends)
            if blocks < 0 or (blocks % stages if stages > 0 else blocks):
                raise ValueError(
                    f"megatron_cfg: {blocks} blocks are left for the {stages} other stages of the pipeline"
                )
            dimensions = replace(dimensions, blocks=pipeline)
        check_layout(layout, dimensions, self.max_total_sequence_length, "megatron_cfg.")
        pad = (2 * layout.context_parallel_size if layout.context_parallel_size > 1 else 1) * (
            layout.tensor_model_parallel_size if layout.sequence_parallel else 1
        )
        if self.make_sequence_length_divisible_by % pad:
            raise ValueError(
                f"make_sequence_length_divisible_by {self.make_sequence_length_divisible_by} is no multiple of {pad}: "
                "2 x CP with CP above 1, times TP with sequence_parallel"
            )
        return self

    def check_gpus(self, gpus: int) -> None:
        """ValueError where so many GPUs cannot train in this layout and batch."""
        batch, micro_batch = self.train_global_batch_size, self.train_micro_batch_size
        check_replicas(self.megatron_cfg, gpus, batch, micro_batch, "policy.train_")


# ---- policy.generation: vLLM


class VllmChatConfig(Group):
    """How vLLM's server, which Gym's agents talk to, takes a response apart."""

    enable_auto_tools: bool = Field(True, description="find calls of tools in it")
    tool_parser: str = Field(description="parser of calls")
    reasoning_parser: str = Field(description="parser of reasoning")


class VllmSpecificArgs(Group):
    """The engine."""

    tensor_parallel_size: int = Field(ge=1, description="TP of an engine")
    pipeline_parallel_size: int = Field(ge=1, description="PP of an engine")
    expert_parallel_size: int = Field(ge=1, description="EP of an engine; above 1 a multiple of its TP")
    gpu_memory_utilization: float = Field(gt=0, lt=1, description="share of a GPU's memory that the engine takes")
    max_model_len: int = Field(ge=2, description="longest sequence, tokens")
    precision: PRECISION = Field("bfloat16", description="type of the weights")
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = Field("auto", description="type of keys and values")
    enforce_eager: bool = Field(False, description="without CUDA graphs")
    skip_tokenizer_init: bool = Field(False, description="without a tokenizer; the server needs one")
    enable_prefix_caching: bool | None = Field(None, description="keep the states of prefixes; null: where the GPU can")
    async_engine: Literal[True] = Field(True, description="responses come one by one; Gym needs it")
    expose_http_server: Literal[True] = Field(True, description="serve the engine over HTTP; Gym needs it")
    reasoning_parser_plugin: str = Field(
        "/opt/nemo-rl/nemo_rl/models/generation/vllm/reasoning_parsers/nano_v3_reasoning_parser.py",
        description="file in the image that brings the parser nano_v3",
    )
    http_server_serving_chat_kwargs: VllmChatConfig


class ResourcesConfig(Group):
    """What generation has for itself."""

    gpus_per_node: int | None = Field(None, ge=1, description="GPUs of each of its nodes; null: none of its own")
    num_nodes: int | None = Field(None, ge=1, description="its nodes; null: none of its own")


class ColocationConfig(Group):
    """Where vLLM runs."""

    enabled: bool = Field(description="on the GPUs of the trainer, in turns; false: on nodes of its own")
    resources: ResourcesConfig = Field(default_factory=ResourcesConfig)


class VllmConfig(Group):
    """How responses are drawn."""

    backend: Literal["vllm"] = Field("vllm", description="engine")
    max_new_tokens: int = Field(ge=1, description="longest response, tokens")
    temperature: float = Field(gt=0, description="of sampling; training assumes 1")
    top_p: float = Field(gt=0, le=1, description="nucleus; training assumes 1")
    top_k: None = Field(None, description="Gym cannot pass one on")
    stop_token_ids: None = Field(None, description="Gym cannot pass them on")
    stop_strings: None = Field(None, description="Gym cannot pass them on")
    colocated: ColocationConfig
    vllm_cfg: VllmSpecificArgs
    vllm_kwargs: dict[str, JsonValue] = Field(description="arguments of vLLM's engine itself, which NeMo-RL hands on")


class GRPOPolicyConfig(TrainedPolicyConfig):
    """The model, and what draws from it."""

    sequence_packing: SequencePackingConfig
    generation: VllmConfig

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        length, generation = self.max_total_sequence_length, self.generation
        for name, value in (
            ("generation.vllm_cfg.max_model_len", generation.vllm_cfg.max_model_len),
            ("generation.max_new_tokens", generation.max_new_tokens),
        ):
            if value > length:
                raise ValueError(f"{name} {value:,} exceeds max_total_sequence_length {length:,}: it would be cut")
        if self.sequence_packing.train_mb_tokens < length:
            raise ValueError(f"sequence_packing.train_mb_tokens is below max_total_sequence_length {length:,}")
        if self.megatron_cfg.context_parallel_size > 1 and not self.sequence_packing.enabled:
            raise ValueError("megatron_cfg.context_parallel_size above 1 needs sequence_packing.enabled: true")
        return self


# ---- grpo, loss_fn: the algorithm


class AsyncGRPOConfig(Group):
    """Generation ahead of the trainer."""

    enabled: bool = Field(description="draw the rollouts of coming steps while the trainer updates")
    max_trajectory_age_steps: int = Field(ge=1, description="oldest weights that a rollout may be of, in steps")
    in_flight_weight_updates: bool = Field(False, description="new weights in the middle of a response")
    recompute_kv_cache_after_weight_updates: bool = Field(False, description="and what it has read, read again")


class GRPOConfig(Group):
    """How many prompts and responses, and how rewards become advantages."""

    num_prompts_per_step: int = Field(ge=1, description="prompts a step")
    num_generations_per_prompt: int = Field(ge=2, description="responses of each prompt")
    max_num_steps: int = Field(ge=1, description="steps at most")
    max_num_epochs: int = Field(ge=1, description="passes through the prompts at most")
    max_rollout_turns: int = Field(1, ge=1, description="not with Gym, whose agents have limits of their own")
    use_leave_one_out_baseline: bool = Field(description="compare with the other responses of the prompt")
    normalize_rewards: bool = Field(description="divide advantages by the standard deviation of those")
    advantage_clip_low: float | None = Field(lt=0, description="smallest advantage; null: any")
    advantage_clip_high: float | None = Field(gt=0, description="largest advantage; null: any")
    overlong_filtering: bool = Field(description="leave responses that hit the limit out of the loss")
    seq_logprob_error_threshold: float | None = Field(
        gt=1, description="leave out responses for which trainer and generator differ by more than this factor"
    )
    invalid_tool_call_advantage: float | None = Field(
        description="advantage of the tokens of a malformed call of a tool; null: their own"
    )
    malformed_thinking_advantage: float | None = Field(
        description="advantage of the tokens of a response with a stray <think> or </think>; null: their own"
    )
    val_period: int = Field(ge=-1, description="steps between validations; -1: none")
    val_at_start: bool = Field(False, description="validate before the first step")
    val_at_end: bool = Field(False, description="validate after the last step")
    max_val_samples: None = Field(None, description="with Gym all records of the validation file, once each")
    val_batch_size: int | None = Field(None, ge=1, description="with Gym the script sets it to that number")
    use_dynamic_sampling: bool = Field(False, description="draw again where all responses have one reward")
    batch_multiplier: int = Field(1, ge=1, description="prompts drawn for that, over those of a step")
    reward_shaping: DisabledConfig = Field(default_factory=DisabledConfig)
    reward_scaling: DisabledConfig = Field(default_factory=DisabledConfig)
    async_grpo: AsyncGRPOConfig
    seed: Seed = Field(42, description="of sampling")


class ClippedPGLossConfig(Group):
    """The clipped policy gradient."""

    reference_policy_kl_penalty: float = Field(ge=0, description="weight of the KL to the initial policy")
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = Field(description="estimator of the KL")
    kl_input_clamp_value: float | None = Field(gt=0, description="largest difference of two log-probabilities in it")
    kl_output_clamp_value: float | None = Field(gt=0, description="largest KL of a token; null: any")
    ratio_clip_min: float = Field(ge=0, le=1, description="lower clip: ratio at least 1 - this")
    ratio_clip_max: float = Field(ge=0, description="upper clip: ratio at most 1 + this")
    ratio_clip_c: float | None = Field(None, gt=1, description="dual clip; null: none")
    force_on_policy_ratio: bool = Field(description="the ratio is 1 by definition: right with one update a batch")
    token_level_loss: bool = Field(description="mean over tokens; false: over responses of their means")
    use_on_policy_kl_approximation: bool = Field(description="weight the KL by the policy over the generator")
    use_importance_sampling_correction: bool = Field(
        description="weight tokens by the probability of the trainer over that of the generator"
    )
    sequence_level_importance_ratios: bool = Field(False, description="one weight a response, as in GSPO")
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = Field(
        description="what becomes of a weight out of bounds: tis clamps it, icepop drops the token; null: nothing"
    )
    truncated_importance_sampling_ratio: float | None = Field(gt=0, description="largest weight in bounds")
    truncated_importance_sampling_ratio_min: float | None = Field(None, ge=0, description="smallest weight in bounds")
    use_kl_in_reward: bool = Field(False, description="the KL as a part of the reward")


# ---- data, env: prompts and who verifies them


class DataFileConfig(Group):
    """One file."""

    data_path: str = Field(description="JSONL")


class GymDatasetConfig(Group):
    """How records of Gym are read: line by line, as they are."""

    dataset_name: Literal["NemoGymDataset"] = Field("NemoGymDataset", description="reader")
    env_name: Literal["nemo_gym"] = Field("nemo_gym", description="environment")
    processor: Literal["nemo_gym_data_processor"] = Field("nemo_gym_data_processor", description="what makes a prompt")
    prompt_file: None = Field(None, description="a record brings its prompt")
    system_prompt_file: None = Field(None, description="a record brings its prompt")


class TrainedDataConfig(Group):
    """Two files, and how they are read."""

    train: DataFileConfig
    validation: DataFileConfig
    max_input_seq_length: int | None = Field(None, ge=1, description="longest prompt, of DPO: longest answer with it")
    shuffle: bool = Field(description="another order in each pass")
    num_workers: int = Field(1, ge=0, description="processes that read")


class GymFileConfig(DataFileConfig):
    """One file of records."""

    repeat: int = Field(1, ge=1, description="how often it is read, one time after another")


class GymDataConfig(TrainedDataConfig):
    """Prompts of all environments in one file."""

    train: GymFileConfig
    use_multiple_dataloader: Literal[False] = Field(False, description="one file an environment")
    default: GymDatasetConfig = Field(default_factory=GymDatasetConfig)


class EffortLevelsConfig(Group):
    """Short responses to prompts that ask for low effort (NeMo-RL's `EffortLevelsConfig`)."""

    low_string: str = Field(description="what such a prompt holds; empty: all prompts do")
    low_weight: float = Field(ge=0, description="weight of being short")
    low_penalty: float = Field(ge=0, description="weight of being too long")
    low_ub: int = Field(ge=1, description="tokens from which a response is too long")


class NemoGymConfig(Group):
    """Global config of NeMo Gym (0.4.0); beside the keys below stand instances of its servers, by name, as in Gym.

    An instance that is null is none: so a config leaves out one of the config that it goes on from.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    config_paths: list[str] = Field(description="config files of Gym's servers, models and agents")
    num_gpu_nodes: int = Field(0, ge=0, description="nodes of the judges that Gym starts, beside cluster.num_nodes")
    skip_venv_if_present: bool = Field(True, description="use the image's environments of the servers")
    use_absolute_ip: bool = Field(False, description="servers are called by address, not by name")
    invalid_tool_call_patterns: list[str] = Field(
        ["<tool_call>", "</tool_call>", "<function_call>", "</function_call>"],
        description="text that marks a malformed call of a tool",
    )
    thinking_tags: list[str] = Field(["<think>", "</think>"], description="text that marks stray reasoning")
    effort_levels: EffortLevelsConfig | None = Field(None, description="null: no prompt asks for low effort")

    @model_validator(mode="before")
    @classmethod
    def _without_null_instances(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None or key in cls.model_fields}

    @model_validator(mode="after")
    def _others_are_servers(self) -> Self:
        for name, instance in (self.__pydantic_extra__ or {}).items():
            if not (isinstance(instance, dict) and any(isinstance(instance.get(kind), dict) for kind in GYM_KINDS)):
                near = nearest(name, type(self).model_fields)
                raise ValueError(
                    f"{name} is neither a key nor a server, which has one of {', '.join(GYM_KINDS)}"
                    + (f"; did you mean {near}?" if near else "")
                )
        return self

    def settings(self, key: str) -> Iterator[Any]:
        """Every value of a key in the instances of servers."""
        for instance in (self.__pydantic_extra__ or {}).values():
            for kind in GYM_KINDS:
                apps = instance.get(kind) if isinstance(instance, dict) else None
                for app in apps.values() if isinstance(apps, dict) else ():
                    if isinstance(app, dict) and key in app:
                        yield app[key]


class EnvConfig(Group):
    """Who verifies."""

    should_use_nemo_gym: Literal[True] = Field(True, description="NeMo Gym")
    should_log_nemo_gym_responses: bool = Field(False, description="log every response in full")
    nemo_gym: NemoGymConfig


# ---- checkpointing, logger, cluster


class PretrainedCheckpointConfig(Group):
    """Weights to begin with."""

    path: str = Field(description="folder iter_NNNNNNN")
    format: Literal["megatron_lm", "megatron_bridge"] = Field(
        "megatron_lm",
        description="megatron_lm: weights alone, for the architecture of policy.model_name; megatron_bridge: that "
        "too, from run_config.yaml, which names classes that the Megatron-Bridge of the image has to have",
    )


class CheckpointingConfig(Group):
    """What is saved, in the folder of the run, in which the same command goes on."""

    enabled: Literal[True] = Field(True, description="save")
    pretrained_checkpoint: PretrainedCheckpointConfig | None = Field(
        None, description="weights to begin with; null: those of policy.model_name"
    )
    save_period: int = Field(ge=1, description="steps between checkpoints")
    keep_top_k: int = Field(ge=1, description="best checkpoints kept")
    metric_name: str | None = Field(pattern="^(train|val):", description="by which they are the best; null: the newest")
    higher_is_better: bool = Field(description="whether a larger one is better")
    checkpoint_must_save_by: str | None = Field(
        pattern=r"^\d{2}:\d{2}:\d{2}:\d{2}$",
        description="days:hours:minutes:seconds after the start, when the run saves and leaves: below the time limit "
        "of the job by a step and a save; null: no limit",
    )
    save_optimizer: bool = Field(True, description="with the optimiser")


class WandbConfig(Group):
    """Weights & Biases."""

    project: str = Field("nemotron", description="project")
    name: str = Field("run", description="name of the run")


class GPUMonitoringConfig(Group):
    """How often GPUs are looked at."""

    collection_interval: int = Field(10, ge=1, description="seconds")
    flush_interval: int = Field(10, ge=1, description="seconds")


class LoggerConfig(Group):
    """Where metrics go beside the terminal."""

    tensorboard_enabled: bool = Field(True, description="TensorBoard, in the folder of the run")
    wandb_enabled: bool = Field(False, description="Weights & Biases")
    swanlab_enabled: bool = Field(False, description="SwanLab")
    mlflow_enabled: bool = Field(False, description="MLflow")
    monitor_gpus: bool = Field(True, description="memory and use of the GPUs")
    num_val_samples_to_print: int = Field(0, ge=0, description="validation samples on the terminal")
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    tensorboard: dict[str, JsonValue] = Field({}, description="options of TensorBoard")
    gpu_monitoring: GPUMonitoringConfig = Field(default_factory=GPUMonitoringConfig)


class ClusterConfig(Group):
    """Nodes of trainer and generator together."""

    num_nodes: int = Field(ge=1, description="nodes, without those of env.nemo_gym.num_gpu_nodes")
    gpus_per_node: int = Field(ge=1, description="GPUs of each")


class NemoRLRunConfig(RunConfig):
    """Identity, what is written."""

    output: str | None = Field(None, description="name under which the last checkpoint is published")


class NemoRLConfig(Group):
    """A training on NeMo-RL."""

    run: NemoRLRunConfig
    checkpointing: CheckpointingConfig
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    cluster: ClusterConfig
    policy: TrainedPolicyConfig

    def check_machines(self, nodes: int, processes_per_node: int, launcher: str) -> list[str]:
        """Before the job is submitted: ValueError where it has another number of nodes; what to warn of."""
        judges = self.judge_nodes()
        if nodes != self.cluster.num_nodes + judges:
            of_judges = f" + env.nemo_gym.num_gpu_nodes {judges}" if judges else ""
            raise ValueError(f"cluster.num_nodes {self.cluster.num_nodes}{of_judges} has to be all nodes of the job")
        return warnings_of(self.policy.megatron_cfg)

    def judge_nodes(self) -> int:
        """Nodes of the job beside those of `cluster`."""
        return 0


class GRPOMasterConfig(NemoRLConfig):
    """GRPO with Gym."""

    grpo: GRPOConfig
    loss_fn: ClippedPGLossConfig
    policy: GRPOPolicyConfig
    data: GymDataConfig
    env: EnvConfig

    def judge_nodes(self) -> int:
        """Those of the judges that Gym starts."""
        return self.env.nemo_gym.num_gpu_nodes

    @model_validator(mode="after")
    def _numbers_agree(self) -> Self:
        grpo, policy, colocated = self.grpo, self.policy, self.policy.generation.colocated
        drawn = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
        if policy.train_global_batch_size != drawn:
            raise ValueError(
                f"policy.train_global_batch_size {policy.train_global_batch_size:,} is not grpo.num_prompts_per_step x "
                f"grpo.num_generations_per_prompt = {drawn:,}, which makes one update a step"
            )
        if grpo.async_grpo.enabled and colocated.enabled:
            raise ValueError(
                "grpo.async_grpo.enabled needs nodes for generation: policy.generation.colocated.enabled=false"
            )
        if grpo.async_grpo.enabled and grpo.max_num_epochs > 1:
            raise ValueError(
                f"grpo.max_num_epochs {grpo.max_num_epochs}: with grpo.async_grpo.enabled the library passes through "
                f"the prompts once; set it to 1, and data.train.repeat to {grpo.max_num_epochs}"
            )
        if grpo.async_grpo.enabled and not self.loss_fn.use_importance_sampling_correction:
            raise ValueError("grpo.async_grpo.enabled needs loss_fn.use_importance_sampling_correction: true")
        if self.loss_fn.truncated_importance_sampling_type and self.loss_fn.truncated_importance_sampling_ratio is None:
            raise ValueError("loss_fn.truncated_importance_sampling_type needs truncated_importance_sampling_ratio")
        for rollouts in self.env.nemo_gym.settings("num_rollouts_per_prompt"):
            if rollouts != grpo.num_generations_per_prompt:
                raise ValueError(
                    f"num_rollouts_per_prompt {rollouts} is not grpo.num_generations_per_prompt "
                    f"{grpo.num_generations_per_prompt}: the judge would wait, and give all the same score"
                )
        nodes = self.cluster.num_nodes
        if not colocated.enabled:
            generating = colocated.resources.num_nodes or 0
            if not 0 < generating < nodes:
                raise ValueError(
                    f"policy.generation.colocated.resources: {generating} nodes of cluster.num_nodes {nodes} generate; "
                    "num_nodes has to be given, and to leave some for the trainer"
                )
            if colocated.resources.gpus_per_node != self.cluster.gpus_per_node:
                raise ValueError(
                    f"policy.generation.colocated.resources.gpus_per_node {colocated.resources.gpus_per_node} is not "
                    f"cluster.gpus_per_node {self.cluster.gpus_per_node}"
                )
            nodes -= generating
            gpus = generating * self.cluster.gpus_per_node
        else:
            gpus = nodes * self.cluster.gpus_per_node
        engine = policy.generation.vllm_cfg.tensor_parallel_size * policy.generation.vllm_cfg.pipeline_parallel_size
        if gpus % engine:
            raise ValueError(f"{gpus} GPUs that generate are no multiple of vLLM's TP x PP = {engine}")
        policy.check_gpus(nodes * self.cluster.gpus_per_node)
        return self


# ---- DPO


class DPOConfig(Group):
    """The algorithm. Its beta is `reference_policy_kl_penalty`; there is no other KL."""

    max_num_steps: int = Field(ge=1, description="optimiser steps at most")
    max_num_epochs: int = Field(ge=1, description="passes through the pairs at most")
    reference_policy_kl_penalty: float = Field(gt=0, description="beta: factor of the margin in the sigmoid")
    preference_loss_weight: float = Field(ge=0, description="weight of -log sigmoid of the margin")
    sft_loss_weight: float = Field(ge=0, description="weight of the negative log-likelihood of the chosen answer")
    preference_average_log_probs: bool = Field(description="means over tokens in the margin; false: sums")
    sft_average_log_probs: bool = Field(description="mean over tokens in the likelihood; false: sum")
    val_period: int = Field(ge=-1, description="steps between validations; -1: none")
    val_batches: int = Field(ge=1, description="batches of a validation")
    val_global_batch_size: int = Field(ge=1, description="pairs of one")
    val_micro_batch_size: int = Field(1, ge=1, description="pairs a forward pass on one replica")
    val_at_start: bool = Field(True, description="validate before the first step")
    val_at_end: bool = Field(False, description="validate after the last step")
    seed: Seed = Field(42, description="of the order of the pairs")


class DPOMegatronConfig(MegatronConfig):
    """The trainer of DPO, which asks for one thing more."""

    use_linear_ce_fusion_loss: bool = Field(False, description="loss from hidden states, without all logits at once")


class DPOPolicyConfig(TrainedPolicyConfig):
    """The model; its weights at the beginning are the reference."""

    megatron_cfg: DPOMegatronConfig
    sequence_packing: DisabledConfig = Field(default_factory=DisabledConfig)

    @model_validator(mode="after")
    def _no_context_parallelism(self) -> Self:
        if self.megatron_cfg.context_parallel_size > 1:
            raise ValueError("megatron_cfg.context_parallel_size above 1 needs packed sequences, which DPO cannot have")
        return self


class PreferenceDatasetConfig(Group):
    """How pairs are read."""

    dataset_name: Literal["PreferenceDataset"] = Field("PreferenceDataset", description="reader")
    prompt_file: None = Field(None, description="a pair brings its prompt")
    system_prompt_file: None = Field(None, description="a pair brings its prompt")


class PreferenceDataConfig(TrainedDataConfig):
    """Pairs."""

    default: PreferenceDatasetConfig = Field(default_factory=PreferenceDatasetConfig)


class DPOMasterConfig(NemoRLConfig):
    """DPO."""

    dpo: DPOConfig
    policy: DPOPolicyConfig
    data: PreferenceDataConfig

    @model_validator(mode="after")
    def _layout_fits(self) -> Self:
        self.policy.check_gpus(self.cluster.num_nodes * self.cluster.gpus_per_node)
        return self
