"""Prefill and single-token steps give the logits of the whole sequence read at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nemotron.stack.models import NemotronH

PROMPTS = [6, 1, 13, 9, 2]  # unequal, one shorter than the convolution, one longer than a chunk (8)
NEW = 12


def check(model: NemotronH, tolerance: float = 1e-5) -> None:
    """Every row of a left-padded batch against the same row alone and whole."""
    source = torch.Generator().manual_seed(7)
    rows = [torch.randint(61, (length + NEW,), generator=source) for length in PROMPTS]
    width = max(PROMPTS)
    ids = torch.randint(61, (len(rows), width), generator=source)  # what stands in the padding must not matter
    is_token = torch.zeros(len(rows), width, dtype=torch.bool)
    for b, (row, length) in enumerate(zip(rows, PROMPTS, strict=True)):
        ids[b, width - length :], is_token[b, width - length :] = row[:length], True
    with torch.no_grad():
        whole = [model(row[None]).logits[0] for row in rows]
        logits, cache = model.prefill(ids, is_token, width + NEW)
        for t in range(NEW):
            expected = torch.stack([whole[b][length - 1 + t] for b, length in enumerate(PROMPTS)])
            torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance, msg=lambda m, t=t: f"{t}: {m}")
            logits = model.step(torch.stack([row[n + t] for row, n in zip(rows, PROMPTS, strict=True)]), cache)
    assert cache.length == width + NEW


@pytest.mark.parametrize("pattern", ["M", "*", "E", "-", "MEM*EME", "M-M*-"])
def test_decode_equals_the_whole_sequence(make_model: Callable[..., NemotronH], pattern: str) -> None:
    check(make_model(pattern))


@pytest.mark.parametrize(
    "dimensions",
    [{"conv_kernel": 1}, {"conv_kernel": 2}, {"conv_kernel": 6}, {"n_groups": 1}, {"n_groups": 4}, {"chunk_size": 3}],
    ids=str,
)
def test_decode_for_other_dimensions(make_model: Callable[..., NemotronH], dimensions: dict[str, Any]) -> None:
    check(make_model("M*M", **dimensions))


@pytest.mark.parametrize("dt_bias", [-20.0, -9.0, 3.0, 20.0])
def test_decode_agrees_for_step_sizes_of_any_size(make_model: Callable[..., NemotronH], dt_bias: float) -> None:
    """Where the step size is clamped in one path only, decoding drifts away from training."""
    model = make_model("MEM")
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            torch.nn.init.constant_(parameter, dt_bias)
    check(model, tolerance=2e-5)


def test_a_step_size_below_the_published_floor_is_not_clamped(make_model: Callable[..., NemotronH]) -> None:
    """At dt_bias = -9, dt is softplus(-9 + dt) near 1.2e-4 and not a floor of 1e-3: the state's trace shows which."""
    model = make_model("M")
    mixer = model.blocks()[0].mixer
    torch.nn.init.constant_(mixer.dt_bias, -9.0)
    with torch.no_grad():
        mixer.in_proj.weight[-model.config.mamba_num_heads :] = 0  # dt does not depend on the input
        _, cache = model.prefill(torch.tensor([[5]]), torch.ones(1, 1, dtype=torch.bool), 1)
        first = cache.layers[0].ssm.clone()
        torch.nn.init.constant_(mixer.dt_bias, 0.0)
        _, cache = model.prefill(torch.tensor([[5]]), torch.ones(1, 1, dtype=torch.bool), 1)
    ratio = first / cache.layers[0].ssm  # one token: state = dt x B^T
    expected = math.log1p(math.exp(-9.0)) / math.log(2.0)
    torch.testing.assert_close(ratio, torch.full_like(ratio, expected), rtol=1e-4, atol=0)


def test_rows_can_be_dropped_and_copied(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("MEM*EME-")
    ids = torch.randint(61, (3, 9), generator=torch.Generator().manual_seed(1))
    is_token = torch.ones(3, 9, dtype=torch.bool)
    is_token[0, :4] = False

    def after(rows: list[int]) -> Tensor:
        _, cache = model.prefill(ids, is_token, 11)
        cache.keep_rows(torch.tensor(rows))
        model.step(torch.tensor([rows[i] + 7 for i in range(len(rows))]), cache)
        return model.step(torch.tensor([rows[i] + 20 for i in range(len(rows))]), cache)

    with torch.no_grad():
        every = after([0, 1, 2])
        torch.testing.assert_close(after([2, 0]), every[[2, 0]], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(after([1, 1, 0, 0]), every[[1, 1, 0, 0]], atol=1e-6, rtol=1e-5)
