"""Architecture of a Nemotron-H model: pattern, dimensions, and the checks that make them fit together.

Field names are those of Hugging Face's `NemotronHConfig`, so that a `config.json` reads the same in both
(`published/config_json.py` reads those of other programs). Next: `layers.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from nemotron.kit.schemas.architecture import check_dimensions

BLOCK_NAMES = {"M": "Mamba-2", "*": "attention", "E": "mixture of experts", "-": "dense MLP"}
_TYPES = {"int": (int,), "float": (int, float), "str": (str,), "int | None": (int, type(None))}


@dataclass(frozen=True)
class NemotronHConfig:
    """Dimensions of a Nemotron-H model. One symbol of `hybrid_override_pattern` is one pre-norm residual block.

    Raises:
        ValueError: a value of a wrong type, or dimensions that do not fit together (unknown symbol, heads not divisible
            by groups, ...).
    """

    hybrid_override_pattern: str = "MEM*EME"
    vocab_size: int = 2048
    hidden_size: int = 128
    # attention (*): grouped queries, no positional embedding of any kind
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    # Mamba-2 (M): the inner width is mamba_num_heads x mamba_head_dim, not expand x hidden_size
    mamba_num_heads: int = 8
    mamba_head_dim: int = 32
    ssm_state_size: int = 32
    n_groups: int = 2
    conv_kernel: int = 4
    chunk_size: int = 64
    # mixture of experts (E)
    n_routed_experts: int = 16
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    moe_shared_expert_intermediate_size: int = 256
    moe_latent_size: int | None = None  # LatentMoE (Super 3): width of the routed experts' input; None: hidden_size
    routed_scaling_factor: float = 2.5
    # dense MLP (-)
    intermediate_size: int = 512
    # multi-token prediction: stored blocks (0 or 1), the symbols of the block, and how often training applies it
    num_nextn_predict_layers: int = 0
    mtp_hybrid_override_pattern: str = "*E"
    mtp_num_layers: int = 2
    initializer_range: float = 0.02
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, _TYPES[str(field.type)]):
                raise ValueError(f"{field.name} {value!r}: {field.type} expected")
        for name in ("hybrid_override_pattern", "mtp_hybrid_override_pattern"):
            pattern = getattr(self, name)
            unknown = sorted(set(pattern) - set(BLOCK_NAMES))
            if unknown or not pattern:
                raise ValueError(
                    f"{name} {pattern!r}: one or more of {' '.join(BLOCK_NAMES)} expected"
                    + (f", found {unknown}" if unknown else "")
                )
        if self.num_nextn_predict_layers not in (0, 1):
            raise ValueError(
                f"num_nextn_predict_layers {self.num_nextn_predict_layers}: 0 or 1 expected (one block, applied "
                "mtp_num_layers times, is what Nemotron 3 Super has)"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            may_be_0 = field.name in ("num_nextn_predict_layers", "mtp_num_layers")  # 0: none; stored, but not trained
            if isinstance(value, int | float) and (value < 0 if may_be_0 else value <= 0):
                raise ValueError(f"{field.name} must be positive, is {value}")
        check_dimensions(self)

    @property
    def routed_size(self) -> int:
        """Width in which the routed experts work: the latent where there is one, else the hidden size."""
        return self.moe_latent_size or self.hidden_size

    @property
    def mamba_inner_size(self) -> int:
        """Width inside a Mamba-2 block."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def mamba_conv_size(self) -> int:
        """Channels that pass through the causal convolution: x, B and C."""
        return self.mamba_inner_size + 2 * self.n_groups * self.ssm_state_size

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary, the architecture in `config.json`; `hub.hub_config` adds what other programs want there."""
        return asdict(self)
