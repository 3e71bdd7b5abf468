"""Losses against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from nemotron.stack.training.losses import next_token_loss, selected_loss_sum, token_losses


def test_uniform_logits_cost_log_vocabulary() -> None:
    labels = torch.randint(0, 50, (3, 7))
    assert token_losses(torch.zeros(3, 7, 50), labels).flatten().tolist() == pytest.approx([math.log(50)] * 21)


def test_known_probabilities() -> None:
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]]))
    labels = torch.tensor([[0, 2]])
    assert token_losses(logits, labels).tolist()[0] == pytest.approx([math.log(2), -math.log(0.8)])
    assert next_token_loss(logits, labels).item() == pytest.approx((math.log(2) - math.log(0.8)) / 2)


def test_half_precision_logits_are_lifted_first() -> None:
    logits = torch.tensor([[[80.0, 0.0]]], dtype=torch.bfloat16)
    loss = next_token_loss(logits, torch.tensor([[1]]))
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(80.0)


def test_selected_sum_is_the_same_however_the_batch_is_cut() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 6, 9), torch.randint(0, 9, (4, 6))
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[0, :1], mask[1, 2:], mask[3] = True, True, True  # rows with 1, 4, 0 and 6 trained tokens
    whole = selected_loss_sum(logits[mask], labels[mask])
    parts = [selected_loss_sum(logits[i][mask[i]], labels[i][mask[i]]) for i in range(4)]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-6)
    probabilities = torch.softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    assert whole.item() == pytest.approx(-probabilities.log()[mask].sum().item(), rel=1e-6)


def test_a_token_of_weight_two_is_that_token_twice() -> None:
    """The sum of weighted losses over the sum of weights: a mean in which weights say how often a token counts."""
    torch.manual_seed(3)
    logits, labels = torch.randn(6, 11), torch.randint(0, 11, (6,))
    weights = torch.tensor([2.0, 1.0, 3.0, 1.0, 2.0, 1.0])
    twice = torch.repeat_interleave(torch.arange(6), weights.long())
    expected = torch.nn.functional.cross_entropy(logits[twice].double(), labels[twice])
    mean = selected_loss_sum(logits, labels, weights) / weights.sum()
    torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=0)
    ones = selected_loss_sum(logits, labels, torch.ones(6, dtype=torch.int64))
    assert ones.item() == selected_loss_sum(logits, labels).item()  # a mask is no weights: the same sum to the bit
