"""The GRPO loss against closed forms and against the formulas written token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemotron.stack.rl.losses import PolicyLoss, grpo_loss

LOGP = -1.3


def one_token(ratio: float, advantage: float, importance: float = 1.0, **knobs: Any) -> tuple[PolicyLoss, float]:
    """The loss of one token with that policy ratio and importance weight, and its gradient in logp."""
    logp = torch.tensor([LOGP], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([LOGP - math.log(ratio)], dtype=torch.float64)
    generator = old - math.log(importance)
    loss = grpo_loss(logp, old, generator, torch.tensor([advantage], dtype=torch.float64), **knobs)
    (grad,) = torch.autograd.grad(loss.loss, logp)
    return loss, float(grad)


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    """At ratio 1 the loss is -A and its gradient in logp is -A: REINFORCE with a baseline."""
    for advantage in (2.0, -0.7, 0.0):
        loss, grad = one_token(1.0, advantage)
        assert loss.loss.item() == pytest.approx(-advantage)
        assert grad == pytest.approx(-advantage)
        assert int(loss.clipped) == 0 and int(loss.masked) == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.27, 1.0, -1.27, -1.27, 0),  # d ratio / d logp = ratio
        (1.29, 1.0, -1.28, 0.0, 1),  # above the upper bound, which is the looser one
        (0.81, -1.0, 0.81, 0.81, 0),
        (0.79, -1.0, 0.80, 0.0, 1),  # below the lower bound
        (0.5, 1.0, -0.5, -0.5, 0),  # a good token that became unlikely is never clipped
        (2.0, -1.0, 2.0, 2.0, 0),  # nor a bad one that became likely
        (1.29, 3.0, -3.84, 0.0, 1),
    ],
)
def test_clip_is_one_sided_and_asymmetric(
    ratio: float, advantage: float, loss: float, slope: float, clipped: int
) -> None:
    result, grad = one_token(ratio, advantage)
    assert result.loss.item() == pytest.approx(loss)
    assert grad == pytest.approx(slope, abs=1e-12)
    assert int(result.clipped) == clipped


@pytest.mark.parametrize(("importance", "kept"), [(1.0, True), (1.9, True), (0.51, True), (2.1, False), (0.49, False)])
def test_masked_importance_sampling(importance: float, kept: bool) -> None:
    """Within the bound a token is weighted by old/generator, outside it is dropped, and no gradient goes through it."""
    result, grad = one_token(1.1, -0.5, importance, importance_bound=2.0)
    assert result.loss.item() == pytest.approx(0.55 * importance if kept else 0.0)
    assert grad == pytest.approx(0.55 * importance if kept else 0.0)
    assert int(result.masked) == (0 if kept else 1)


def test_the_old_policy_carries_no_gradient_through_the_weight() -> None:
    old = torch.tensor([LOGP], requires_grad=True)
    logp = old.clone()  # as if somebody forgot to detach
    loss = grpo_loss(logp.detach().requires_grad_(), old, torch.tensor([LOGP - 0.1]), torch.ones(1)).loss
    (grad,) = torch.autograd.grad(loss, old)
    assert grad.item() == pytest.approx(math.exp(0.1))  # of the ratio 1 / old alone: + A rho w; none of w itself


def test_k3_value_and_gradient() -> None:
    """k3 = exp(ref - logp) - (ref - logp) - 1, its slope 1 - exp(ref - logp); summed, weighted, never negative."""
    difference = torch.tensor([-1.2, -0.1, 0.0, 0.3, 0.9], dtype=torch.float64)
    logp = torch.full((5,), LOGP, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(5, dtype=torch.float64)
    result = grpo_loss(logp, logp.detach(), logp.detach(), zero, logp_reference_T=LOGP + difference, kl_penalty=0.04)
    expected = [math.exp(d) - d - 1 for d in difference.tolist()]
    assert result.kl.item() == pytest.approx(sum(expected)) and min(expected) >= 0
    assert result.loss.item() == pytest.approx(0.04 * sum(expected))
    (grad,) = torch.autograd.grad(result.loss, logp)
    torch.testing.assert_close(grad, 0.04 * (1 - difference.exp()))


numbers = st.floats(-1.5, 1.5, allow_nan=False)
token = st.tuples(numbers, numbers, numbers, st.floats(-3, 3, allow_nan=False), numbers)


@settings(max_examples=200)
@given(tokens=st.lists(token, min_size=1, max_size=8), low=st.floats(0.05, 0.5), high=st.floats(0.05, 0.9))
def test_equals_the_formula_token_by_token(
    tokens: list[tuple[float, float, float, float, float]], low: float, high: float
) -> None:
    expected, masked = 0.0, 0
    for logp, old, gen, advantage, ref in tokens:
        ratio, weight = math.exp(logp - old), math.exp(old - gen)
        capped = min(ratio, 1 + high) if advantage > 0 else max(ratio, 1 - low)
        if 1 / 2.5 <= weight <= 2.5:
            expected -= weight * capped * advantage
        else:
            masked += 1
        expected += 0.1 * (math.exp(ref - logp) - (ref - logp) - 1)
    columns: list[Tensor] = [torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)]
    result = grpo_loss(
        *columns[:4], ratio_clip_min=low, ratio_clip_max=high, importance_bound=2.5, logp_reference_T=columns[4],
        kl_penalty=0.1,
    )  # fmt: skip
    assert result.loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert int(result.masked) == masked


def test_a_token_far_outside_the_bound_leaves_the_loss_finite() -> None:
    """Its weight overflows to infinity in fp32; dropped means dropped."""
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    result = grpo_loss(logp, logp.detach(), torch.tensor([-120.0, -1.0]), torch.tensor([1.0, 1.0]))
    assert result.loss.item() == pytest.approx(-1.0) and int(result.masked) == 1
    (grad,) = torch.autograd.grad(result.loss, logp)
    assert grad.tolist() == pytest.approx([0.0, -1.0])
