"""Training FLOPs per token of a hybrid model, from its config: what the hardware must do, one multiply-add = 2 FLOPs.

Counted: every matrix multiplication of a forward pass (embedding look-up excluded), attention scores, the Mamba-2
scan and convolution; the backward pass as twice the forward. Norms, activations and the optimiser are left out, as
usual. Only the experts that a token visits count.
"""

from __future__ import annotations

from nemotron.stack.models.config import NemotronHConfig


def forward_flops_per_token(config: NemotronHConfig, seq_len: int) -> float:
    """FLOPs of the forward pass for one token of a sequence of `seq_len` tokens, without the MTP block."""
    return _blocks(config, config.hybrid_override_pattern, seq_len) + _head(config)


def mtp_flops_per_token(config: NemotronHConfig, seq_len: int) -> float:
    """FLOPs of one application of the MTP block to one token: eh_proj, its blocks and the head again; 0 without one."""
    if config.num_nextn_predict_layers == 0:
        return 0.0
    eh_proj = 2.0 * 2 * config.hidden_size**2
    return eh_proj + _blocks(config, config.mtp_hybrid_override_pattern, seq_len) + _head(config)


def training_flops_per_token(config: NemotronHConfig, seq_len: int) -> float:
    """FLOPs of forward and backward for one token: three times the forward pass, every MTP application included."""
    mtp = config.mtp_num_layers * mtp_flops_per_token(config, seq_len)
    return 3.0 * (forward_flops_per_token(config, seq_len) + mtp)


def _head(config: NemotronHConfig) -> float:
    return 2.0 * config.hidden_size * config.vocab_size


def _blocks(config: NemotronHConfig, pattern: str, seq_len: int) -> float:
    flops = {
        "M": _mamba(config, seq_len),
        "*": _attention(config, seq_len),
        "E": _moe(config),
        "-": 2.0 * 2 * config.hidden_size * config.intermediate_size,
    }
    return sum(flops[symbol] for symbol in pattern)


def _attention(config: NemotronHConfig, seq_len: int) -> float:
    query_dim = config.num_attention_heads * config.head_dim
    kv_dim = config.num_key_value_heads * config.head_dim
    projections = config.hidden_size * (2 * query_dim + 2 * kv_dim)
    scores = 2 * query_dim * (seq_len + 1) / 2  # q.k and p.v, over the (L+1)/2 keys that a causal query sees on average
    return 2.0 * (projections + scores)


def _moe(config: NemotronHConfig) -> float:
    router = config.hidden_size * config.n_routed_experts
    routed = config.num_experts_per_tok * 2 * config.routed_size * config.moe_intermediate_size
    latent = 2 * config.hidden_size * config.moe_latent_size if config.moe_latent_size is not None else 0
    shared = 2 * config.hidden_size * config.moe_shared_expert_intermediate_size
    return 2.0 * (router + routed + latent + shared)


def _mamba(config: NemotronHConfig, seq_len: int) -> float:
    inner = config.mamba_num_heads * config.mamba_head_dim
    group_state = config.n_groups * config.ssm_state_size
    in_proj = config.hidden_size * (2 * inner + 2 * group_state + config.mamba_num_heads)
    conv = config.conv_kernel * (inner + 2 * group_state)
    # SSD: within a chunk attention-like products C.B (per group) and scores.x (per head) over the (Q+1)/2 earlier
    # positions; between chunks every token writes its state once and reads it once.
    visible = (min(config.chunk_size, seq_len) + 1) / 2
    within = visible * (group_state + inner)
    between = 2 * inner * config.ssm_state_size
    out_proj = inner * config.hidden_size
    return 2.0 * (in_proj + conv + within + between + out_proj)
