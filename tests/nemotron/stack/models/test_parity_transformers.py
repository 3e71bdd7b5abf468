"""Logits and gradients equal those of transformers' NemotronH on the same random weights, block by block."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.decoding.steps import prefill
from nemotron.stack.models.published.presets import PRESETS

transformers = pytest.importorskip("transformers")

CASES = [
    pytest.param("M", {}, id="mamba"),
    pytest.param("*", {}, id="attention"),
    pytest.param("E", {}, id="experts"),
    pytest.param("-", {}, id="dense"),
    pytest.param("MEM*EME", {}, id="nano3"),
    pytest.param("M-M*-", {}, id="nano2"),
    pytest.param("M", {"n_groups": 1}, id="one-group"),
    pytest.param("M", {"n_groups": 4}, id="a-group-a-head"),
    pytest.param("M", {"mamba_num_heads": 6, "mamba_head_dim": 3, "ssm_state_size": 16, "n_groups": 3}, id="six-heads"),
    pytest.param("M", {"conv_kernel": 2}, id="conv-2"),
    pytest.param("M", {"conv_kernel": 3}, id="conv-3"),
    pytest.param("M", {"chunk_size": 32}, id="chunk-longer-than-text"),
    pytest.param("M", {"chunk_size": 7}, id="odd-chunk"),
    pytest.param("*", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 7}, id="one-kv-head"),
    pytest.param("*", {"num_attention_heads": 4, "num_key_value_heads": 4}, id="no-kv-sharing"),
    pytest.param("E", {"num_experts_per_tok": 1, "routed_scaling_factor": 1.0}, id="one-expert"),
    pytest.param("E", {"num_experts_per_tok": 5}, id="all-experts"),
    pytest.param("E", {"moe_latent_size": 9}, id="latent"),
    pytest.param("E", {"moe_latent_size": 1}, id="latent-of-one"),
    pytest.param("E", {"moe_latent_size": 24}, id="latent-as-wide-as-hidden"),
    pytest.param("E", {"moe_latent_size": 31, "num_experts_per_tok": 5}, id="latent-wider-all-experts"),
    pytest.param(
        "E",
        {"moe_latent_size": 8, "n_routed_experts": 16, "num_experts_per_tok": 6, "routed_scaling_factor": 5.0},
        id="latent-many-experts",
    ),
    pytest.param("MEM*EME", {"moe_latent_size": 10, "routed_scaling_factor": 5.0}, id="super3"),
]


def reference_of(model: NemotronH) -> nn.Module:
    """The same weights in transformers' NemotronH, its clamp of dt switched off as the published config has it."""
    unlimited = (0.0, math.inf)
    config = transformers.NemotronHConfig(
        **model.config.to_dict(), n_group=1, topk_group=1, norm_topk_prob=True,
        time_step_limit=unlimited, use_cache=False, attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    reference: nn.Module = transformers.NemotronHForCausalLM(config).eval()
    for layer in reference.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = unlimited
    state = {name.replace("backbone.", "model."): tensor for name, tensor in model.state_dict().items()}
    reference.load_state_dict(state)
    return reference


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(length))


def assert_same_gradients(
    model: NemotronH, reference: nn.Module, ids: Tensor, floor_share: float = 0.0, tolerance: float = 1e-4
) -> None:
    """Those of the next-token loss, each relative to its norm, or to a share of the norm of all of them."""
    next_token_loss(model(ids).logits, ids).backward()
    next_token_loss(reference(ids).logits, ids).backward()
    expected = {name.replace("model.", "backbone."): p.grad for name, p in reference.named_parameters()}
    floor = floor_share * torch.stack([grad.norm() for grad in expected.values()]).norm()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = (parameter.grad - expected[name]).norm() / expected[name].norm().clamp(min=floor)
        assert error < tolerance, (name, float(error))


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize(("pattern", "dimensions"), CASES)
def test_logits_and_gradients(make_model: Callable[..., NemotronH], pattern: str, dimensions: dict[str, Any]) -> None:
    model = make_model(pattern, seed=1, **dimensions)
    reference = reference_of(model)
    for length in (1, 8, 21):
        ids = tokens(3, length)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, reference(ids).logits, atol=1e-5, rtol=1e-5)
    # With one expert a token the router's weight is constant and its gradient rounding: hence the floor.
    assert_same_gradients(model, reference, tokens(3, 21), floor_share=1e-3)


def scaled_down(name: str, draw: int) -> NemotronHConfig:
    """A published Nano 2 with random small sizes: some of its blocks in a row, of every kind; its ratio of the MLP."""
    config, chance = PRESETS[name], random.Random(f"{name} {draw}")
    pattern, length = config.hybrid_override_pattern, chance.randint(7, 12)
    windows = [pattern[i : i + length] for i in range(len(pattern) - length + 1)]
    hidden, kv_heads, groups = 2 * chance.randint(6, 48), chance.randint(1, 3), chance.randint(1, 4)
    return replace(
        config,
        hybrid_override_pattern=chance.choice([window for window in windows if set(window) == set(pattern)]),
        vocab_size=61,
        hidden_size=hidden,
        intermediate_size=hidden * config.intermediate_size // config.hidden_size,  # 4 times, 3.5 times
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * chance.randint(1, 5),
        head_dim=chance.randint(4, 40),
        mamba_head_dim=config.mamba_head_dim if draw == 0 else chance.randint(3, 40),
        n_groups=groups,
        mamba_num_heads=groups * chance.randint(1, 4),
        ssm_state_size=chance.randint(3, 48),
        chunk_size=chance.randint(4, 32),
    )


@pytest.mark.parametrize("draw", range(6))
@pytest.mark.parametrize("name", ["nano2-12b", "nano2-9b"])
def test_the_published_nano2_at_random_small_sizes(make_model: Callable[..., NemotronH], name: str, draw: int) -> None:
    dimensions = asdict(scaled_down(name, draw))
    model = make_model(dimensions.pop("hybrid_override_pattern"), seed=draw, **dimensions)
    reference = reference_of(model)
    for length in (1, 37):
        ids = tokens(2, length)
        with torch.no_grad():
            expected = reference(ids).logits
            error = (model(ids).logits - expected).abs().max() / expected.abs().max()
        assert error < 1e-5, float(error)  # as far as either is from fp64, in twice the blocks of the cases above
    # A few gradients of dt are 3e-4 of the whole: of those the last digits differ, hence the floor. In one draw of the
    # 9B one of A_log is ill-conditioned: on some processors either is 1e-4 from fp64, and 2e-4 from the other.
    tolerance = 5e-4 if (name, draw) == ("nano2-9b", 1) else 1e-4
    assert_same_gradients(model, reference, tokens(2, 37), 1e-3, tolerance)


def test_the_draws_of_nano2_differ_in_what_matters() -> None:
    """Else parity at random sizes would say little: state, groups, heads, and Mamba-2 blocks that follow each other."""
    drawn = [scaled_down(name, draw) for name in ("nano2-12b", "nano2-9b") for draw in range(6)]
    for size in ("hidden_size", "head_dim", "mamba_head_dim", "ssm_state_size", "chunk_size"):
        assert len({getattr(config, size) for config in drawn}) >= 6
    assert {config.num_attention_heads // config.num_key_value_heads for config in drawn} >= {1, 5}
    assert {config.n_groups for config in drawn} == {1, 2, 3, 4}
    assert any("MM" in config.hybrid_override_pattern for config in drawn)  # only the 9B has such


@pytest.mark.parametrize("pattern", ["M", "*", "E", "-", "MEM*EME-"])
def test_a_batch_large_enough_for_onednn(make_model: Callable[..., NemotronH], pattern: str) -> None:
    """512 tokens, 1024 choices of 5 experts: other matmuls than those of the small batches (see `models/linear.py`)."""
    model = make_model(pattern, seed=3)
    reference, ids = reference_of(model), tokens(8, 64)
    ours, theirs = model(ids).logits, reference(ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert_same_gradients(model, reference, ids)


@pytest.mark.parametrize("pattern", ["M", "*", "MEM*EME-"])
def test_left_padding(make_model: Callable[..., NemotronH], pattern: str) -> None:
    model = make_model(pattern, seed=2)
    ids, is_token = tokens(3, 19), torch.ones(3, 19, dtype=torch.bool)
    is_token[1, :5] = False
    is_token[2, :18] = False
    with torch.no_grad():
        expected = reference_of(model)(ids, attention_mask=is_token.long()).logits
        packed = model(ids, is_token.long()).logits
        last, _ = prefill(model, ids, is_token, 19)
    torch.testing.assert_close(packed[is_token], expected[is_token], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last, expected[:, -1], atol=1e-5, rtol=1e-5)


def test_the_correction_bias_changes_choices_in_these_weights(make_model: Callable[..., NemotronH]) -> None:
    """Otherwise parity would say nothing about the bias."""
    model, ids = make_model("E", seed=1), tokens(3, 21)
    with torch.no_grad():
        biased = model(ids).logits
        model.moe_blocks()[0].gate.e_score_correction_bias.zero_()
        assert ((biased - model(ids).logits).abs().amax(-1) > 1e-2).float().mean() > 0.2
