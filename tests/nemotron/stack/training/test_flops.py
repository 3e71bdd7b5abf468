"""FLOPs against hand counts, torch's own counter, and the published numbers of active parameters."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.published.presets import PRESETS
from nemotron.stack.training.flops import forward_flops_per_token, mtp_flops_per_token, training_flops_per_token
from nemotron.stack.training.matmul_peak import measure_peak_flops

NANO3, SUPER3 = PRESETS["nano3-30b"], PRESETS["super3-120b"]


def narrow(symbols: str, **changes: int | str) -> NemotronHConfig:
    """A 16-wide model with blocks `symbols`."""
    return dataclasses.replace(NemotronHConfig(
        hybrid_override_pattern=symbols, vocab_size=10, hidden_size=16, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, mamba_num_heads=2, mamba_head_dim=8, ssm_state_size=4, n_groups=1, conv_kernel=4, chunk_size=8,
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, moe_shared_expert_intermediate_size=20,
        intermediate_size=64,
    ), **changes)  # fmt: skip


def only(symbols: str, **changes: int) -> float:
    """Forward FLOPs per token of a 16-wide model with blocks `symbols`, less the output head."""
    return forward_flops_per_token(narrow(symbols, **changes), seq_len=7) - 2 * 16 * 10


def counted(config: NemotronHConfig, seq_len: int, training: bool) -> float:
    """FLOPs per token that torch counts in a forward pass, or in forward and backward: its matrix products.

    Its attention forms all L x L scores, masked ones too: what the closed form says for the length 2 L - 1.
    """
    torch.manual_seed(0)
    model = NemotronH(config).train(training)
    ids = torch.randint(config.vocab_size, (2, seq_len))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = model(ids)
        if training:
            sum(logits.sum() for logits in [output.logits, *output.mtp_logits]).backward()
    return counter.get_total_flops() / ids.numel()


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
    # LatentMoE: router and shared expert as before; 16 to 6 and back; two experts, up and down 6x12
    assert only("E", moe_latent_size=6) == 2 * (128 + 2 * 96 + 2 * 2 * 72 + 2 * 320)


def test_multi_token_prediction_by_hand() -> None:
    plain, mtp = narrow("-"), narrow("-", num_nextn_predict_layers=1, mtp_hybrid_override_pattern="-", mtp_num_layers=3)
    head, mlp, eh_proj = 16 * 10, 2 * 16 * 64, 32 * 16
    assert mtp_flops_per_token(plain, 7) == 0
    assert mtp_flops_per_token(mtp, 7) == 2 * (eh_proj + mlp + head)
    assert forward_flops_per_token(mtp, 7) == forward_flops_per_token(plain, 7) == 2 * (mlp + head)
    assert training_flops_per_token(mtp, 7) == 3 * 2 * (mlp + head + 3 * (eh_proj + mlp + head))


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize(
    ("symbols", "changes"),
    [
        ("-", {}),
        ("E", {}),
        ("E", {"moe_latent_size": 6}),
        ("*", {}),
        ("*-E", {"num_nextn_predict_layers": 1, "mtp_num_layers": 2, "moe_latent_size": 6}),
    ],
    ids=["mlp", "moe", "latent-moe", "attention", "mtp"],
)
def test_torch_counts_the_same(symbols: str, changes: dict[str, int], training: bool) -> None:
    config, seq_len = narrow(symbols, hidden_size=64, **changes), 12
    closed_form = training_flops_per_token if training else forward_flops_per_token
    found, expected = counted(config, seq_len, training), closed_form(config, 2 * seq_len - 1)
    # Sums over the chosen experts, and two reductions in the gradient of each norm, may be matrix products; the closed
    # form leaves them out. A forgotten projection would cost more than both.
    applications = config.mtp_num_layers if training and config.num_nextn_predict_layers else 0
    sums = symbols.count("E") + applications * config.mtp_hybrid_override_pattern.count("E")
    small = sums * 2 * config.num_experts_per_tok * config.routed_size * (3 if training else 1)
    norms = len(symbols) + 1 + applications * (len(config.mtp_hybrid_override_pattern) + 3)
    small += norms * 2 * 2 * config.hidden_size if training else 0
    assert 0 <= found - expected <= small


def test_torch_counts_the_same_scan() -> None:
    config, seq_len = narrow("M"), 32
    found = counted(config, seq_len, training=False)
    # All Q x Q products of a chunk, masked ones too; the convolution is no matrix product.
    square = forward_flops_per_token(dataclasses.replace(config, chunk_size=2 * config.chunk_size - 1), seq_len)
    expected = square - 2 * config.conv_kernel * config.mamba_conv_size
    # The first of the four chunks has no state before it to read.
    first_read = 2 * config.mamba_inner_size * config.ssm_state_size / 4
    assert found in (expected, expected - first_read)


def test_long_mamba_sequences_cost_no_more_per_token_than_attention_does() -> None:
    mamba = dataclasses.replace(NANO3, hybrid_override_pattern="M")
    assert forward_flops_per_token(mamba, 100_000) == forward_flops_per_token(mamba, 128)
    attention = dataclasses.replace(NANO3, hybrid_override_pattern="*")
    growth = forward_flops_per_token(attention, 2001) - forward_flops_per_token(attention, 1)
    assert growth == 2 * 2 * 32 * 128 * 1000


def test_measured_peak_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    peak = measure_peak_flops(seconds=0.05)
    assert torch.equal(before, torch.get_rng_state())
    assert 1e8 < peak < 1e15
