"""A reward is that of an answer alone, whatever stands beside it; the loss is that of Bradley and Terry."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from nemotron.stack.models import NemotronH
from nemotron.stack.rl.advantages import group_advantages
from nemotron.stack.rl.reward_model import answer_rewards, bradley_terry_loss

GROUPS = [([3, 1, 4, 1, 5], [[9, 2], [6, 5, 3, 5, 8], [11]]), ([2, 7], [[1, 8, 2, 8], [3]])]


@pytest.fixture
def model(small_model: Callable[..., NemotronH]) -> NemotronH:
    return small_model("M-M*-", seed=3, vocab_size=40, initializer_range=0.4).double().eval()


def test_a_reward_is_the_mean_log_probability_of_the_answer(model: NemotronH) -> None:
    alone = []
    for prompt, answers in GROUPS:
        for answer in answers:
            logp_LV = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
            alone.append(sum(logp_LV[len(prompt) - 1 + t, token] for t, token in enumerate(answer)) / len(answer))
    rewards_S = answer_rewards(model, GROUPS, beta=2.5)
    torch.testing.assert_close(rewards_S, 2.5 * torch.stack(alone))
    assert rewards_S.std() > 0.1


def test_equal_answers_have_equal_rewards(model: NemotronH) -> None:
    """To the last bit: GRPO divides by their deviation, which makes 1e-6 an advantage of millions."""
    answers = [[7, 30, 2]] * 4 + [[21, 5, 16, 8, 2]] + [[7, 30, 2]] * 3
    groups = [(list(range(3, 3 + length)), answers) for length in range(20, 28)]
    with torch.no_grad():
        rewards_S = answer_rewards(model.float(), groups, beta=1.0)
    for i, rewards_N in enumerate(rewards_S.split(8)):
        assert rewards_N[[0, 1, 2, 3, 5, 6, 7]].unique().numel() == 1, i
        advantages_PN = group_advantages(rewards_N[None], torch.ones(1, 8, dtype=torch.bool))
        assert advantages_PN.abs().max() < 50


def test_the_loss_is_that_of_the_formula() -> None:
    rewards_S = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    loss = bradley_terry_loss(rewards_S, [(0, 1), (1, 2)])
    first, second = (1 / (1 + math.exp(-margin)) for margin in (1.5, -3.0))
    assert loss.item() == pytest.approx(-(math.log(first) + math.log(second)) / 2)
    loss.backward()
    assert rewards_S.grad is not None
    expected = [(first - 1) / 2, (1 - first) / 2 + (second - 1) / 2, (1 - second) / 2]
    assert rewards_S.grad.tolist() == pytest.approx(expected)
