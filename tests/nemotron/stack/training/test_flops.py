"""FLOPs against hand counts and against the published number of active parameters."""

from __future__ import annotations

import dataclasses

import pytest

from nemotron.stack.models import NemotronHConfig
from nemotron.stack.training.flops import forward_flops_per_token, training_flops_per_token
from nemotron.stack.training.matmul_peak import measure_peak_flops

NANO3 = NemotronHConfig(
    hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", vocab_size=131072, hidden_size=2688,
    num_attention_heads=32, num_key_value_heads=2, head_dim=128, mamba_num_heads=64, mamba_head_dim=64,
    ssm_state_size=128, n_groups=8, conv_kernel=4, chunk_size=128, n_routed_experts=128, num_experts_per_tok=6,
    moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
)  # fmt: skip


def only(symbols: str, **changes: int) -> float:
    """Forward FLOPs per token of a 16-wide model with blocks `symbols`, less the output head."""
    config = dataclasses.replace(NemotronHConfig(
        hybrid_override_pattern=symbols, vocab_size=10, hidden_size=16, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, mamba_num_heads=2, mamba_head_dim=8, ssm_state_size=4, n_groups=1, conv_kernel=4, chunk_size=8,
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, moe_shared_expert_intermediate_size=20,
        intermediate_size=64,
    ), **changes)  # fmt: skip
    return forward_flops_per_token(config, seq_len=7) - 2 * 16 * 10


def test_blocks_by_hand() -> None:
    assert only("-") == 2 * (16 * 64 + 64 * 16)
    # q, o: 16x16 each; k, v: 16x8 each; scores and values: 16 each over (7+1)/2 = 4 visible keys
    assert only("*") == 2 * (2 * 256 + 2 * 128 + 2 * 16 * 4)
    # router 16x8; two of eight experts, up and down 16x12; shared up and down 16x20
    assert only("E") == 2 * (128 + 2 * 2 * 192 + 2 * 320)
    # in_proj 16 x (16+16+8+2); conv 4 taps x 24 channels; 4 visible x (C.B 4 + scores.x 16);
    # states written and read 2 x 16 x 4; out_proj 16x16
    assert only("M") == 2 * (16 * 42 + 4 * 24 + 4 * 20 + 2 * 64 + 256)
    assert only("E", n_routed_experts=16) - only("E") == 2 * 16 * 8  # idle experts cost nothing but their router row


def test_long_mamba_sequences_cost_no_more_per_token_than_attention_does() -> None:
    mamba = dataclasses.replace(NANO3, hybrid_override_pattern="M")
    assert forward_flops_per_token(mamba, 100_000) == forward_flops_per_token(mamba, 128)
    attention = dataclasses.replace(NANO3, hybrid_override_pattern="*")
    growth = forward_flops_per_token(attention, 2001) - forward_flops_per_token(attention, 1)
    assert growth == 2 * 2 * 32 * 128 * 1000


def test_nano3_costs_twice_its_active_parameters() -> None:
    # 3.228 B active parameters, counting the output head and not the embedding (tech report: 3.2 B). At length 1 what
    # stays beside the weights is the scan, the one visible score and the tiny vectors: well under 1 %.
    assert forward_flops_per_token(NANO3, 1) == pytest.approx(2 * 3.228e9, rel=0.01)
    assert training_flops_per_token(NANO3, 8192) == 3 * forward_flops_per_token(NANO3, 8192)


def test_measured_peak_leaves_the_random_state_alone() -> None:
    import torch

    torch.manual_seed(3)
    before = torch.get_rng_state()
    peak = measure_peak_flops(seconds=0.05)
    assert torch.equal(before, torch.get_rng_state())
    assert 1e8 < peak < 1e15
