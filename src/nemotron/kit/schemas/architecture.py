"""Which dimensions of a Nemotron-H model fit together, and which of its blocks FP8 and NVFP4 training take."""

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


def fp8_layers(
    pattern: str, num_layers_at_start_in_bf16: int | None = None, num_layers_at_end_in_bf16: int | None = None
) -> range:
    """Indices of the blocks of `pattern` that train in FP8: all but the first and last few; None: 4, as in Nano 2.

    Raises:
        ValueError: there are `E` blocks, whose routed experts the emulation does not cover, or nothing is left.
    """
    if "E" in pattern:
        raise ValueError(
            f"hybrid_override_pattern {pattern}: FP8 is emulated for M, * and - blocks, not for experts (E)"
        )
    start = 4 if num_layers_at_start_in_bf16 is None else num_layers_at_start_in_bf16
    end = 4 if num_layers_at_end_in_bf16 is None else num_layers_at_end_in_bf16
    return _layers_between(pattern, start, end, "FP8")


def nvfp4_layers(
    pattern: str, num_layers_at_start_in_bf16: int | None = None, num_layers_at_end_in_bf16: int | None = None
) -> range:
    """Indices of the blocks of `pattern` that train in NVFP4: all but the first and last few.

    None: none at the start, and at the end the final 15 % (Nemotron 3 Super, arXiv 2604.12374, table 3), rounded up:
    14 of its 88 blocks, as Megatron-Bridge's recipe has it.

    Raises:
        ValueError: nothing is left.
    """
    start = num_layers_at_start_in_bf16 or 0
    end = -(-15 * len(pattern) // 100) if num_layers_at_end_in_bf16 is None else num_layers_at_end_in_bf16
    return _layers_between(pattern, start, end, "NVFP4")


def _layers_between(pattern: str, start: int, end: int, precision: str) -> range:
    layers = range(start, len(pattern) - end)
    if not layers:
        raise ValueError(
            f"num_layers_at_start_in_bf16 {start} and num_layers_at_end_in_bf16 {end} leave none of the "
            f"{len(pattern)} blocks for {precision}"
        )
    return layers
