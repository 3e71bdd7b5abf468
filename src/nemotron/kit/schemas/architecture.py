"""Which dimensions of a Nemotron-H model fit together."""

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
