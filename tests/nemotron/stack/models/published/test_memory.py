"""Memory in closed form against tensors: caches as they are allocated, weights as they are stored."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.attention import AttentionCache
from nemotron.stack.models.decoding.cache import Cache
from nemotron.stack.models.mamba2 import MambaCache
from nemotron.stack.models.published.memory import (
    conv_state_bytes,
    kv_cache_bytes_per_token,
    ssm_state_bytes,
    training_bytes,
    weight_bytes,
)
from nemotron.stack.models.published.parameters import count_parameters
from nemotron.stack.models.published.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_cache_of_a_published_model(name: str) -> None:
    config = PRESETS[name]
    cache = Cache.allocate(config, batch_size=2, capacity=5, dtype=torch.bfloat16, device=torch.device("meta"))
    keys_and_values = [layer for layer in cache.layers if isinstance(layer, AttentionCache)]
    states = [layer for layer in cache.layers if isinstance(layer, MambaCache)]
    assert sum(layer.k.nbytes + layer.v.nbytes for layer in keys_and_values) == 2 * 5 * kv_cache_bytes_per_token(config)
    assert sum(layer.ssm.nbytes for layer in states) == 2 * ssm_state_bytes(config)
    assert sum(conv.nbytes for layer in states for conv in layer.conv) == 2 * conv_state_bytes(config)


def test_nano3_remembers_six_kilobytes_a_token() -> None:
    # 6 attention blocks x keys and values x 2 heads of 128 x 2 bytes
    assert kv_cache_bytes_per_token(PRESETS["nano3-30b"]) == 6 * 2 * 2 * 128 * 2 == 6144


def test_training_state_is_that_of_adam() -> None:
    config = dataclasses.replace(NemotronHConfig("M*E-"), vocab_size=64)
    weights = NemotronH(config).bfloat16()
    masters = [torch.nn.Parameter(p.detach().float()) for p in weights.parameters()]
    for p in [*masters, *weights.parameters()]:
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(masters)
    optimizer.step()
    moments = sum(s[key].nbytes for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    live = sum(p.nbytes + p.grad.nbytes for p in weights.parameters() if p.grad is not None)
    assert training_bytes(count_parameters(config).total) == moments + live + sum(p.nbytes for p in masters)


def test_weights() -> None:
    assert [weight_bytes(1600, precision) for precision in ("fp32", "bf16", "fp8")] == [6400, 3200, 1600]
    assert weight_bytes(1600, "nvfp4") == 1600 // 2 + 1600 // 16  # two weights a byte, a scale byte a block of 16
