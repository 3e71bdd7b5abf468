"""What counts in the loss of an RL update: an update without a rollout equals one that leaves it out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemotron.recipes.nano3.stage2_rl.schema import RLConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.rl.grpo import update
from nemotron.stack.rl.rollouts import Rollout
from nemotron.stack.rl.shaping import Message, message_advantages
from nemotron.stack.training.distributed import ALONE

PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5]]
ADVANTAGES = [1.0, -0.5, 0.25]


def config(**grpo: Any) -> RLConfig:
    """Defaults of the recipe, at a length of 24 tokens and without a bound on the gradient."""
    policy: dict[str, Any] = {"model_name": Path("model"), "max_total_sequence_length": 24, "max_grad_norm": 1e9}
    policy["generation"] = {"max_new_tokens": 6}
    run = {"model": "model", "data": "data"}
    return RLConfig.model_validate({"run": run, "policy": policy, "data": {"path": "data"}, "grpo": grpo})


@pytest.fixture
def model(small_model: Callable[..., NemotronH]) -> NemotronH:
    return small_model("MEM*-", seed=3, vocab_size=40, initializer_range=0.4).double()


@pytest.fixture
def rollouts(model: NemotronH) -> list[Rollout]:
    """Drawn by the model itself: trainer and generator agree on all of them."""
    out = generate(model.eval(), PROMPTS, 6, stop_token_ids=(11,), generator=torch.Generator().manual_seed(1))
    return [
        Rollout(i, PROMPTS[i], ids, out.logprobs[i], out.entropies[i], False, 1.0, [Message(len(ids), True)])
        for i, ids in enumerate(out.tokens)
    ]


def step(model: NemotronH, cfg: RLConfig, rollouts: list[Rollout], advantages: list[float]) -> tuple[Any, Any]:
    """What one plain step of gradient descent changes in each weight, and the record of the update."""
    before, model = model.state_dict(), deepcopy(model)
    session: Any = SimpleNamespace(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), ranks=ALONE, autocast=nullcontext()
    )
    of_tokens = [[a] * len(r.completion_ids) for r, a in zip(rollouts, advantages, strict=True)]
    _, record = update(cfg, session, None, rollouts, of_tokens)
    changes = {name: weight.detach() - before[name] for name, weight in model.named_parameters()}
    return changes, record.metrics(ALONE)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert max(change.abs().max().item() for change in one.values()) > 1e-3
    for name, change in one.items():
        torch.testing.assert_close(change, other[name], rtol=1e-5, atol=1e-9)


def test_trainer_and_generator_of_one_program_agree(model: NemotronH, rollouts: list[Rollout]) -> None:
    _, metrics = step(model, config(), rollouts, ADVANTAGES)
    assert metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["max_seq_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["num_valid_samples"] == 3 and metrics["num_masked_seqs"] == metrics["num_mismatched_tokens"] == 0
    assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1.0


def test_a_completion_on_which_they_disagree_leaves_loss_and_denominator(
    model: NemotronH, rollouts: list[Rollout]
) -> None:
    expected, _ = step(model, config(), rollouts[:2], ADVANTAGES[:2])
    rollouts[2].logprobs = [logprob - 0.9 for logprob in rollouts[2].logprobs]  # a factor of 2.46, within icepop's 5
    changes, metrics = step(model, config(), rollouts, ADVANTAGES)
    assert_equal(changes, expected)
    assert metrics["num_masked_seqs"] == 1 and metrics["num_valid_samples"] == 2 and metrics["masked_correct_pct"] == 1
    assert metrics["max_seq_mult_prob_error"] == pytest.approx(2.4596, rel=1e-4)
    assert metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)  # of what is left
    assert metrics["num_mismatched_tokens"] == 0
    kept, metrics = step(model, config(seq_logprob_error_threshold=None), rollouts, ADVANTAGES)
    assert metrics["num_mismatched_tokens"] == len(rollouts[2].logprobs)
    with pytest.raises(AssertionError):
        assert_equal(kept, expected)


@pytest.mark.parametrize("what", ["truncated", "without a verdict"])
def test_truncated_and_unverified_completions_count_nowhere(
    model: NemotronH, rollouts: list[Rollout], what: str
) -> None:
    expected, _ = step(model, config(), rollouts[:2], ADVANTAGES[:2])
    if what == "truncated":
        rollouts[2].truncated = True
    else:
        rollouts[2].reward = None
    changes, metrics = step(model, config(), rollouts, ADVANTAGES)
    assert_equal(changes, expected)
    assert metrics["num_valid_samples"] == 2
    if what == "truncated":
        kept, _ = step(model, config(overlong_filtering=False), rollouts, ADVANTAGES)
        with pytest.raises(AssertionError):
            assert_equal(kept, expected)


def test_a_completion_without_gradient_counts_in_the_denominator(model: NemotronH, rollouts: list[Rollout]) -> None:
    alone, _ = step(model, config(), rollouts[:1], [1.0])
    beside, _ = step(model, config(), rollouts, [1.0, 0.0, 0.0])
    tokens = [len(rollout.completion_ids) for rollout in rollouts]
    assert_equal({name: change * tokens[0] / sum(tokens) for name, change in alone.items()}, beside)


def test_a_penalty_trains_a_completion_whose_group_has_no_gradient() -> None:
    assert message_advantages(0.0, [Message(2, True, malformed_thinking=True)], None, -5.0) == [-5.0, -5.0]
    assert message_advantages(0.0, [Message(2, False, malformed_thinking=True)], None, -5.0) == [0.0, 0.0]
