"""Small models whose every parameter is random: nothing stays at the 0 or 1 that initialisation would leave it at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemotron.stack.models import NemotronH, NemotronHConfig


@torch.no_grad()
def randomise(model: NemotronH, seed: int) -> NemotronH:
    """Fill a model so that all its parts matter: step sizes from 0.01 to 1, an expert bias that changes choices."""
    source = torch.Generator().manual_seed(seed)

    def normal(like: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.randn(like.shape, generator=source, dtype=torch.float64).to(like.dtype) * scale

    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            parameter.copy_(torch.linspace(-4.5, 0.5, len(parameter)) + normal(parameter, 0.1))
        elif name.endswith(("norm.weight", "norm_f.weight", "D")):
            parameter.copy_(1 + normal(parameter, 0.2))
        elif parameter.dim() == 1:  # A_log, conv bias
            parameter.copy_(normal(parameter, 0.5))
        elif "embeddings" in name:
            parameter.copy_(normal(parameter, 1.0))
        else:  # keeps the size of what passes through
            parameter.copy_(normal(parameter, parameter.shape[-1] ** -0.5))
    for moe in model.moe_blocks():
        moe.gate.e_score_correction_bias.copy_(normal(moe.gate.e_score_correction_bias, 0.3))
    return model


@pytest.fixture
def make_model(small_config: Callable[..., NemotronHConfig]) -> Callable[..., NemotronH]:
    """`make_model(pattern, seed=0, dtype=torch.float32, **dimensions)`: a random model in eval mode."""

    def make(pattern: str, seed: int = 0, dtype: torch.dtype = torch.float32, **dimensions: Any) -> NemotronH:
        return randomise(NemotronH(small_config(pattern, **dimensions)).to(dtype), seed).eval()

    return make
