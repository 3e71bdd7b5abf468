"""A dense model in float64 whose every parameter is random, with widths that all differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nemotron.stack.models import NemotronH, NemotronHConfig


@pytest.fixture
def model(small_config: Callable[..., NemotronHConfig]) -> NemotronH:
    config = small_config(
        "M-*M-", hidden_size=24, intermediate_size=20, num_attention_heads=6, num_key_value_heads=2, head_dim=5,
        mamba_num_heads=8, mamba_head_dim=6, ssm_state_size=7, n_groups=2,
    )  # fmt: skip
    torch.manual_seed(7)
    model = NemotronH(config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * scale + (1.0 if "norm" in name else 0.0))
    return model


@pytest.fixture
def rows() -> list[torch.Tensor]:
    """Two batches of token ids, [3, 11] and [2, 11]."""
    ids = torch.randint(0, 61, (5, 11), generator=torch.Generator().manual_seed(1))
    return [ids[:3], ids[3:]]
