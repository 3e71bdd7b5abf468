"""The published models as configs, under the names that `nemotron models show` takes.

Patterns and dimensions are those of the tech reports (Nemotron 3 Nano: arXiv 2512.20848, table 1; Nemotron 3 Super:
arXiv 2604.12374; Nemotron Nano v2: arXiv 2508.14444) and of the recipes in Megatron-Bridge that train and load these
models (nemotron_3_nano, nemotron_3_super, nemotron_nano_v2). Where a report prints no value, it is Megatron-Bridge's.
Dimensions of blocks that a pattern does not have keep their defaults; nothing reads them.
"""

from __future__ import annotations

from dataclasses import replace

from nemotron.stack.models.config import NemotronHConfig

PRESETS: dict[str, NemotronHConfig] = {
    # Nemotron 3 Nano 30B-A3B: 52 blocks, 23 M, 23 E, 6 *
    "nano3-30b": NemotronHConfig(
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        vocab_size=131072,
        hidden_size=2688,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        mamba_num_heads=64,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        conv_kernel=4,
        chunk_size=128,
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
        initializer_range=0.0173,
        layer_norm_epsilon=1e-5,
    ),
    # Nemotron 3 Super 120B-A12B: 88 blocks, 40 M, 40 E, 8 *; LatentMoE; one MTP block, applied twice in training
    "super3-120b": NemotronHConfig(
        hybrid_override_pattern=(
            "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
        ),
        vocab_size=131072,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        mamba_num_heads=128,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        conv_kernel=4,
        chunk_size=128,
        n_routed_experts=512,
        num_experts_per_tok=22,
        moe_intermediate_size=2688,
        moe_shared_expert_intermediate_size=5376,
        moe_latent_size=1024,
        routed_scaling_factor=5.0,
        num_nextn_predict_layers=1,
        mtp_hybrid_override_pattern="*E",
        mtp_num_layers=2,
        initializer_range=0.014,
        layer_norm_epsilon=1e-5,
    ),
    # Nemotron Nano v2 12B, the base model: 62 blocks, 28 M, 28 -, 6 *
    "nano2-12b": NemotronHConfig(
        hybrid_override_pattern="M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
        vocab_size=131072,
        hidden_size=5120,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        mamba_num_heads=128,
        mamba_head_dim=80,
        ssm_state_size=128,
        n_groups=8,
        conv_kernel=4,
        chunk_size=128,
        intermediate_size=20480,
        initializer_range=0.02,
        layer_norm_epsilon=1e-5,
    ),
}
# Nemotron Nano v2 9B, the 12B pruned and distilled: 56 blocks, 27 M, 25 -, 4 *
PRESETS["nano2-9b"] = replace(
    PRESETS["nano2-12b"],
    hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    hidden_size=4480,
    intermediate_size=15680,
)
