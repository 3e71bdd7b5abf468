"""Which dimensions of a Nemotron-H model fit together, and which of its blocks FP8 training takes."""

from __future__ import annotations

from typing import Protocol


class Dimensions(Protocol):
    """What `check_dimensions` looks at; a config group has it, and the model's own configuration."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def mamba_num_heads(self) -> int: ...
    @property
    def n_groups(self) -> int: ...
    @property
    def n_routed_experts(self) -> int: ...
    @property
    def num_experts_per_tok(self) -> int: ...


def check_dimensions(model: Dimensions) -> None:
    """ValueError: heads that cannot be shared out evenly, or more experts a token than there are."""
    if model.num_attention_heads % model.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads {model.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {model.num_key_value_heads}"
        )
    if model.mamba_num_heads % model.n_groups:
        raise ValueError(f"mamba_num_heads {model.mamba_num_heads} is not a multiple of n_groups {model.n_groups}")
    if model.num_experts_per_tok > model.n_routed_experts:
        raise ValueError(
            f"num_experts_per_tok {model.num_experts_per_tok} exceeds n_routed_experts {model.n_routed_experts}"
        )


def fp8_layers(pattern: str, num_layers_at_start_in_bf16: int, num_layers_at_end_in_bf16: int) -> range:
    """Indices of the blocks of `pattern` that train in FP8: all but the first and last few.

    Raises:
        ValueError: there are `E` blocks, whose routed experts the emulation does not cover, or nothing is left.
    """
    if "E" in pattern:
        raise ValueError(
            f"hybrid_override_pattern {pattern}: FP8 is emulated for M, * and - blocks, not for experts (E)"
        )
    layers = range(num_layers_at_start_in_bf16, len(pattern) - num_layers_at_end_in_bf16)
    if not layers:
        raise ValueError(
            f"num_layers_at_start_in_bf16 {num_layers_at_start_in_bf16} and num_layers_at_end_in_bf16 "
            f"{num_layers_at_end_in_bf16} leave none of the {len(pattern)} blocks for FP8"
        )
    return layers
