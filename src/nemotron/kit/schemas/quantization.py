"""What each kind of layer is quantised to. Formats have ModelOpt's names (`quant_algo`)."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from nemotron.kit.schemas.group import Group

# FP8: weights and activations E4M3, one scale a tensor. NVFP4: both E2M1 in blocks of 16. W4A16_NVFP4: weights alone.
QuantAlgo: TypeAlias = Literal["FP8", "NVFP4", "W4A16_NVFP4"]
Precision: TypeAlias = Literal["BF16", "FP8", "NVFP4", "W4A16_NVFP4"]
WeightScales: TypeAlias = Literal["max", "mse", "four_over_six"]

# Bits a weight takes, its share of scales included.
BITS: dict[Precision, Fraction] = {
    "NVFP4": Fraction(9, 2),
    "W4A16_NVFP4": Fraction(9, 2),
    "FP8": Fraction(8),
    "BF16": Fraction(16),
}


class PrecisionConfig(Group):
    """A whole table: every kind of layer stands in it, those that are never quantised too."""

    embedding: Literal["BF16"] = Field(description="token embedding")
    lm_head: Precision = Field(description="output head")
    conv1d: Literal["BF16"] = Field(description="convolution of M")
    attention_qkv: Precision = Field(description="q_proj, k_proj and v_proj of *")
    attention_out: Precision = Field(description="o_proj of *")
    latent_proj: Precision = Field(description="fc1_latent_proj and fc2_latent_proj of a LatentMoE")
    routed_experts: Precision = Field(description="up_proj and down_proj of the routed experts of E")
    shared_experts: Precision = Field(description="up_proj and down_proj of the shared expert of E")
    router: Literal["FP32"] = Field(description="gate of E")
    mamba_in_proj: Precision = Field(description="in_proj of M")
    mamba_out_proj: Precision = Field(description="out_proj of M")
    mamba_before_attention: Precision | None = Field(
        None, description="in_proj and out_proj of an M block with a * block right after it; null: as of the others"
    )
    mlp: Precision = Field("BF16", description="up_proj and down_proj of -, which no published table has")
    mtp: Literal["BF16"] = Field(description="all of multi-token prediction")
    kv_cache: Literal["BF16", "FP8"] = Field(description="keys and values that attention keeps")
    ssm_state: Literal["FP32", "FP16", "FP16_stochastic"] = Field(
        description="state of M between decoding steps; FP16_stochastic: rounded at random, right on average"
    )


class AlgorithmConfig(Group):
    """`algorithm` of `mtq.quantize`: how the scales of weights are chosen; those of activations are their maximum."""

    method: Literal["max", "mse"] = Field(description="max: the largest value; mse: the smallest squared error")
    fp8_scale_sweep: bool = Field(
        description="mse: try all E4M3 values as block scales of NVFP4, and leave FP8 weights at their maximum"
    )

    @model_validator(mode="after")
    def _sweep_is_of_mse(self) -> Self:
        if self.fp8_scale_sweep != (self.method == "mse"):
            raise ValueError(
                f"fp8_scale_sweep {self.fp8_scale_sweep} with method {self.method}: mse without it would search scales "
                "of FP8 weights too, which no published checkpoint has; max has no such key"
            )
        return self
