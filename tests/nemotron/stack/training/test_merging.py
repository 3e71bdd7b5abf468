"""Merging: weights of a decay by hand; a run whose gradients do not depend on its weights, decayed and merged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from nemo_runspec.errors import UserError
from nemotron.kit.schemas.optimizer import OptimizerConfig, SchedulerConfig
from nemotron.stack.training.merging import merge, merge_weights, retained_steps
from nemotron.stack.training.optim import build_optimizer, lr_at, set_lr


def test_weights_are_the_falls_of_the_rate() -> None:
    # One step an interval, four steps: the rate is 1 - sqrt(i / 4) at step i, so 0.5, 0.2929, 0.1340, 0.
    rates = [1.0, *(1 - math.sqrt(i / 4) for i in (1, 2, 3, 4))]
    expected = [before - after for before, after in zip(rates, [*rates[1:], 0.0], strict=True)]
    assert merge_weights(4, 1, "minus_sqrt", 0.0) == pytest.approx(expected)
    assert expected[-1] == 0  # the last step of that decay has no rate
    assert merge_weights(5, 1, "linear", 0.0) == pytest.approx([0.2] * 5 + [0.0])  # a plain mean
    # Longer intervals take the mean rate of their steps; the last checkpoint then counts.
    means = [sum(1 - math.sqrt(i / 6) for i in steps) / 3 for steps in ((1, 2, 3), (4, 5, 6))]
    assert merge_weights(2, 3, "minus_sqrt", 0.0) == pytest.approx([1 - means[0], means[0] - means[1], means[1]])
    assert merge_weights(2, 3, "minus_sqrt", 1.0) == pytest.approx([0, 0, 1])  # a rate that does not fall


@pytest.mark.parametrize("num_intervals", [1, 4, 30])
@pytest.mark.parametrize("style", ["minus_sqrt", "linear", "cosine"])
def test_weights_are_a_mean(num_intervals: int, style: str) -> None:
    weights = merge_weights(num_intervals, 7, style, 0.01)
    assert len(weights) == num_intervals + 1 and sum(weights) == pytest.approx(1) and min(weights) >= 0


def trained(lrs: list[float]) -> list[torch.Tensor]:
    """The weight before each update and after the last, of AdamW on a loss that is linear in it: gradients are data."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1, bias=False).double()
    optimizer = build_optimizer(model, OptimizerConfig(lr=1.0, min_lr=0.0, adam_beta2=0.95, weight_decay=0.0))
    inputs = torch.randn(len(lrs), 4, 6, dtype=torch.float64)
    states = [model.weight.detach().clone()]
    for lr, batch in zip(lrs, inputs, strict=True):
        set_lr(optimizer, lr)
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(model.weight.detach().clone())
    return states


def test_checkpoints_of_a_constant_rate_merge_into_the_decayed_run() -> None:
    """The moments are the same in both runs, as they know nothing of the rate: so merging is exact here."""
    steps, lr = 24, 3e-3
    optimizer = OptimizerConfig(lr=lr, min_lr=0.01 * lr, adam_beta2=0.95, weight_decay=0.0)
    scheduler = SchedulerConfig(lr_wsd_decay_iters=steps, lr_wsd_decay_style="minus_sqrt")
    decayed = trained([lr_at(step, steps, optimizer, scheduler) for step in range(steps)])[-1]
    constant = trained([lr] * steps)
    weights = merge_weights(steps, 1, "minus_sqrt", 0.01)
    merged = merge([{"weight": state} for state in constant], weights)["weight"]
    assert torch.allclose(merged, decayed, rtol=0, atol=1e-15)
    assert (constant[-1] - decayed).abs().max() > 1e-3


def test_dtypes_stay_and_other_tensors_are_refused(tmp_path: Path) -> None:
    states = [{"a": torch.full((2,), value), "b": torch.tensor([value]).half()} for value in (1.0, 4.0)]
    merged = merge(states, [0.25, 0.75])
    assert merged["a"].tolist() == [3.25, 3.25] and merged["a"].dtype == torch.float32
    assert merged["b"].item() == 3.25 and merged["b"].dtype == torch.float16
    with pytest.raises(ValueError, match=r"\['b'\]"):
        merge([states[0], {"a": states[1]["a"]}], [0.5, 0.5])
    with pytest.raises(ValueError):
        merge(states, [1.0])
    with pytest.raises(UserError, match="no weights of earlier steps"):
        retained_steps(tmp_path)
