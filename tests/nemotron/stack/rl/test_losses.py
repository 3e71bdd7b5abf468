"""The GRPO loss against closed forms and against the formulas written token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemotron.kit.schemas.rl import ClippedPGLossConfig
from nemotron.stack.rl.losses import PolicyLoss, grpo_loss

LOGP = -1.3
ICEPOP = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio": 2.5,
    "truncated_importance_sampling_ratio_min": 0.4,
}


def config(**knobs: Any) -> ClippedPGLossConfig:
    """The published clips and no other bound."""
    defaults = {"ratio_clip_max": 0.28, "kl_input_clamp_value": None, "kl_output_clamp_value": None}
    return ClippedPGLossConfig(**{**defaults, **knobs})


def one_token(ratio: float, advantage: float, importance: float = 1.0, **knobs: Any) -> tuple[PolicyLoss, float]:
    """The loss of one token with that policy ratio and importance weight, and its gradient in logp."""
    logp = torch.tensor([LOGP], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([LOGP - math.log(ratio)], dtype=torch.float64)
    generator = old - math.log(importance)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    loss = grpo_loss(logp, advantages, config(**knobs), logp_old_T=old, logp_generator_T=generator)
    (grad,) = torch.autograd.grad(loss.loss, logp)
    return loss, float(grad)


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    """At ratio 1 the loss is -A and its gradient in logp is -A: REINFORCE with a baseline."""
    for advantage in (2.0, -0.7, 0.0):
        loss, grad = one_token(1.0, advantage)
        assert loss.loss.item() == pytest.approx(-advantage)
        assert grad == pytest.approx(-advantage)
        assert torch.equal(loss.ratio_T, loss.clamped_T) and not loss.out_of_bounds_T.any()


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
    assert (result.loss.item() != pytest.approx(-ratio * advantage)) == clipped


@pytest.mark.parametrize(("importance", "kept"), [(1.0, True), (2.4, True), (0.41, True), (2.6, False), (0.39, False)])
def test_masked_importance_sampling(importance: float, kept: bool) -> None:
    """Within the bound a token is weighted by old/generator, outside it is dropped, and no gradient goes through it."""
    result, grad = one_token(1.1, -0.5, importance, **ICEPOP)
    assert result.loss.item() == pytest.approx(0.55 * importance if kept else 0.0)
    assert grad == pytest.approx(0.55 * importance if kept else 0.0)
    assert result.out_of_bounds_T.item() is not kept
    tis, _ = one_token(1.1, -0.5, importance, **ICEPOP | {"truncated_importance_sampling_type": "tis"})
    assert tis.loss.item() == pytest.approx(0.55 * min(max(importance, 0.4), 2.5))


def test_the_old_policy_carries_no_gradient_through_the_weight() -> None:
    old = torch.tensor([LOGP], requires_grad=True)
    logp = old.clone()  # as if somebody forgot to detach
    loss = grpo_loss(
        logp.detach().requires_grad_(), torch.ones(1), config(**ICEPOP),
        logp_old_T=old, logp_generator_T=torch.tensor([LOGP - 0.1]),
    ).loss  # fmt: skip
    (grad,) = torch.autograd.grad(loss, old)
    assert grad.item() == pytest.approx(math.exp(0.1))  # of the ratio 1 / old alone: + A rho w; none of w itself


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_expected_gradient_of_the_kl_is_the_gradient_of_the_kl(kind: str, on_policy: bool) -> None:
    """Over a vocabulary of four tokens the expectation is a sum: with the weight, sum p grad = d KL(p || q) / d logits.

    k2 alone is another number; its gradient, with the weight, is that of E[d^2 / 2]. Without the weight k1 has gradient
    0 and k3 that of KL(q || p).
    """
    logits = torch.tensor([0.3, -0.2, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.9, 0.1, -0.4, 0.2], dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    kl = (logp.exp() * (logp - reference if kind != "k2" else (logp - reference).square() / 2)).sum()
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)

    cfg = config(
        reference_policy_kl_type=kind, reference_policy_kl_penalty=0.04, use_on_policy_kl_approximation=on_policy
    )
    zero, frozen = torch.zeros(4, dtype=torch.float64), logp.detach()
    total = torch.zeros((), dtype=torch.float64)
    for token in range(4):  # the loss of one drawn token, times the probability of drawing it
        one = slice(token, token + 1)
        loss = grpo_loss(
            logp[one], zero[one], cfg,
            logp_old_T=frozen[one], logp_generator_T=frozen[one], logp_reference_T=reference[one],
        )  # fmt: skip
        total = total + frozen[token].exp() * loss.loss
    assert total.item() == pytest.approx(0.04 * kl.item())
    (actual,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(actual, 0.04 * expected)


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
        if 0.4 <= weight <= 2.5:
            expected -= weight * capped * advantage
        else:
            masked += 1
        expected += 0.1 * (math.exp(ref - logp) - (ref - logp) - 1)
    columns: list[Tensor] = [torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)]
    cfg = config(ratio_clip_min=low, ratio_clip_max=high, reference_policy_kl_penalty=0.1, **ICEPOP)
    logp_T, old_T, generator_T, advantages_T, reference_T = columns
    result = grpo_loss(
        logp_T, advantages_T, cfg, logp_old_T=old_T, logp_generator_T=generator_T, logp_reference_T=reference_T
    )
    assert result.loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert int(result.out_of_bounds_T.sum()) == masked


def test_a_token_far_outside_the_bound_leaves_the_loss_finite() -> None:
    """Its weight overflows to infinity in fp32; dropped means dropped."""
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    generator = torch.tensor([-120.0, -1.0])
    result = grpo_loss(logp, torch.ones(2), config(**ICEPOP), logp_old_T=logp.detach(), logp_generator_T=generator)
    assert result.loss.item() == pytest.approx(-1.0) and result.out_of_bounds_T.tolist() == [True, False]
    (grad,) = torch.autograd.grad(result.loss, logp)
    assert grad.tolist() == pytest.approx([0.0, -1.0])


def test_a_forced_ratio_is_one_and_keeps_its_gradient() -> None:
    result, grad = one_token(3.0, 2.0, force_on_policy_ratio=True)
    assert result.ratio_T.item() == 1.0 and result.loss.item() == pytest.approx(-2.0)
    assert grad == pytest.approx(-2.0)
