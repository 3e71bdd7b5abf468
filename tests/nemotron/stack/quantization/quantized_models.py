"""For tests: a small Super 3, and tables of formats."""

from __future__ import annotations

from typing import Any

import torch

from nemotron.stack.models import NemotronH, NemotronHConfig

UNQUANTIZED: dict[str, Any] = {
    "embedding": "BF16", "lm_head": "BF16", "conv1d": "BF16", "attention_qkv": "BF16", "attention_out": "BF16",
    "latent_proj": "BF16", "routed_experts": "BF16", "shared_experts": "BF16", "router": "FP32",
    "mamba_in_proj": "BF16", "mamba_out_proj": "BF16", "mtp": "BF16", "kv_cache": "BF16", "ssm_state": "FP32",
}  # fmt: skip
# The released Super 3 checkpoint.
RELEASED = UNQUANTIZED | {
    "routed_experts": "NVFP4", "shared_experts": "FP8", "mamba_in_proj": "FP8", "mamba_out_proj": "FP8",
    "kv_cache": "FP8",
}  # fmt: skip
TINY = NemotronHConfig(
    hybrid_override_pattern="MEM*E", vocab_size=64, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=1, chunk_size=16,
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=64,
    moe_latent_size=32, num_nextn_predict_layers=1,
)  # fmt: skip


def bf16_model(config: NemotronHConfig = TINY) -> NemotronH:
    """Random weights that bf16 has."""
    torch.manual_seed(0)
    return NemotronH(config).bfloat16().float().eval()
