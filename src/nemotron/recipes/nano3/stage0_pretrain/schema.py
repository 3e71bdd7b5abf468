"""Every knob of `train.py`: type, default, unit, allowed range, and where the default comes from.

Defaults are those of the published Nemotron 3 Nano 30B-A3B where it states one ("tech report": arXiv 2512.20848); group
and field names are Megatron-Bridge's. What other stages have, too, comes from nemotron.kit.schemas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas import optimizer, pretraining, training
from nemotron.kit.schemas.architecture import check_dimensions, fp8_layers, nvfp4_layers


class ModelConfig(pretraining.ModelConfig):
    """Architecture (tech report, table 1) and the balancing of its experts (tech report 2.3)."""

    hybrid_override_pattern: str = Field(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        pattern=r"^[M*E-]+$",
        description="one symbol a block: M Mamba-2, * attention, E mixture of experts, - dense MLP",
    )
    vocab_size: int = Field(131072, ge=2, description="tokens; at least the tokenizer's")
    hidden_size: int = Field(2688, ge=1, description="width of the residual stream")
    num_attention_heads: int = Field(32, ge=1, description="query heads of a * block")
    num_key_value_heads: int = Field(2, ge=1, description="key and value heads; divides num_attention_heads")
    head_dim: int = Field(128, ge=1, description="width of an attention head")
    mamba_num_heads: int = Field(64, ge=1, description="heads of an M block; a multiple of n_groups")
    mamba_head_dim: int = Field(64, ge=1, description="width of a Mamba head; heads x width is the inner width")
    ssm_state_size: int = Field(128, ge=1, description="state of a Mamba channel")
    n_groups: int = Field(8, ge=1, description="groups of heads that share B and C")
    conv_kernel: int = Field(4, ge=1, description="taps of the causal convolution")
    chunk_size: int = Field(128, ge=1, description="tokens a chunk of the scan; changes speed, not results")
    n_routed_experts: int = Field(128, ge=1, description="experts of an E block")
    num_experts_per_tok: int = Field(6, ge=1, description="experts that a token visits; at most n_routed_experts")
    moe_intermediate_size: int = Field(1856, ge=1, description="width of a routed expert")
    moe_shared_expert_intermediate_size: int = Field(
        3712, ge=1, description="width of the expert that sees every token"
    )
    routed_scaling_factor: float = Field(2.5, gt=0, description="factor on the sum of the routed experts")
    intermediate_size: int = Field(1856, ge=1, description="width of a - block; Nano 3 has none")
    initializer_range: float = Field(0.0173, gt=0, description="standard deviation of initial weights")
    layer_norm_epsilon: float = Field(1e-5, gt=0, description="inside the root of RMSNorm")
    moe_aux_loss_coeff: float = Field(1e-4, ge=0, description="weight of the load-balancing loss (tech report 2.3)")

    @model_validator(mode="after")
    def _dimensions_fit(self) -> Self:
        check_dimensions(self)
        return self


class DatasetConfig(pretraining.DatasetConfig):
    """What is read."""

    path: Path = Field(description="payload of the data artifact: blend.json, token files, tokenizer")
    seq_length: int = Field(8192, ge=2, description="tokens a sequence (tech report 2.3)")


class TrainConfig(training.TrainConfig):
    """How much of it."""

    global_batch_size: int = Field(3072, ge=1, description="sequences a step over all ranks (tech report 2.3)")
    eval_interval: int = Field(1000, ge=1, description="steps between validations; the last step is always validated")
    eval_iters: int = Field(32, ge=1, description="global batches of held-out text a source and validation, at most")


class OptimizerConfig(optimizer.OptimizerConfig):
    """AdamW (tech report 2.3)."""

    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    min_lr: float = Field(1e-5, ge=0, description="learning rate of the last step; at most lr")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="decoupled; not on norms, biases, A_log, D, dt_bias")


class EvaluationConfig(pretraining.EvaluationConfig):
    """What is measured at the end, beside bits per byte; published as Results."""

    trigram_baseline: bool = Field(
        True, description="count a trigram model of the trained tokens; memory grows with them"
    )


class PretrainConfig(training.TrainingConfig):
    """`nemotron nano3 pretrain`. Published: WSD, the last 20 % of the steps decay (tech report 2.3); not the shape."""

    run: pretraining.RunConfig
    model: ModelConfig = Field(default_factory=ModelConfig)
    dataset: DatasetConfig
    train: TrainConfig
    checkpoint: pretraining.CheckpointConfig = Field(default_factory=pretraining.CheckpointConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    mixed_precision: Literal[
        "auto", "fp32", "bf16_mixed", "bf16_with_fp8_subchannel_scaling_mixed", "bf16_with_nvfp4_mixed"
    ] = Field(
        "bf16_mixed",
        description="type of the matrix products; auto: bf16 where the processor has it, else fp32. The last two are "
        "emulated: blockwise FP8, for patterns without E, and NVFP4 (docs/architecture/quantization.md)",
    )

    @model_validator(mode="after")
    def _every_depth_predicts_something(self) -> Self:
        short, depths = self.dataset.short, self.model.mtp_num_layers if self.model.num_nextn_predict_layers else 0
        if (length := self.dataset.seq_length if short is None else short.seq_length) <= depths:
            raise ValueError(f"model.mtp_num_layers {depths}: sequences of {length} tokens have nothing that far ahead")
        return self

    @model_validator(mode="after")
    def _some_blocks_are_in_low_precision(self) -> Self:
        model = self.model
        layers = {"bf16_with_fp8_subchannel_scaling_mixed": fp8_layers, "bf16_with_nvfp4_mixed": nvfp4_layers}
        if self.mixed_precision in layers:
            layers[self.mixed_precision](
                model.hybrid_override_pattern, model.num_layers_at_start_in_bf16, model.num_layers_at_end_in_bf16
            )
        return self
