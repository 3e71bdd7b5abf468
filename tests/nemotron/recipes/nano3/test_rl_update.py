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

from nemo_runspec.errors import UserError
from nemotron.recipes.nano3.stage2_rl.schema import RLConfig
from nemotron.stack.environments import Solution, Task
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.rl.grpo import Batch, load_policy, log_samples, update
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


@pytest.mark.parametrize(("group", "number"), [(16, 4), (2, 3), (1, 4), (4, 24)])
def test_the_samples_of_all_steps_together_show_every_prompt(
    group: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = ["math", "choice", "text"]
    tasks = [Task(families[i // 2], f"prompt {i}", "", {}, Solution("", "")) for i in range(6)]
    rollouts = [
        Rollout(i, [1], [100 * i + n], [0.0], 0.0, False, 1.0, [Message(1, True)])
        for i in range(6)
        for n in range(group)
    ]
    tokenizer: Any = SimpleNamespace(decode=lambda ids, skip_special_tokens: str(ids))

    def logged(step: int, number: int = number) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        log: Any = SimpleNamespace(log=lambda step, **record: records.append(record))
        log_samples(log, step, Batch(tasks, rollouts, [], families), tokenizer, number)
        return records

    steps = [logged(step) for step in range(1, 7)]
    assert all(len({record["completion"] for record in records}) == min(number, 6 * group) for records in steps)
    assert {record["prompt"] for records in steps for record in records} == {task.prompt for task in tasks}
    assert len({record["prompt"] for record in steps[0]}) == min(number, 6)  # of a step: spread over the batch
    assert logged(3) == steps[2] and logged(3, 0) == []
    log_samples(None, 1, Batch([], [], [], families), tokenizer, number)  # type: ignore[arg-type]


def test_a_penalty_trains_a_completion_whose_group_has_no_gradient() -> None:
    assert message_advantages(0.0, [Message(2, True, malformed_thinking=True)], None, -5.0) == [-5.0, -5.0]
    assert message_advantages(0.0, [Message(2, False, malformed_thinking=True)], None, -5.0) == [0.0, 0.0]


# --- Multi-token prediction -------------------------------------------------------------------------------------------


@pytest.fixture
def mtp_model(small_model: Callable[..., NemotronH]) -> NemotronH:
    """The trunk of `model`, and a block that predicts further ahead."""
    dims = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E", "mtp_num_layers": 2}
    return small_model("MEM*-", seed=3, vocab_size=40, initializer_range=0.4, **dims).double()


def with_mtp(depths: int, detach: bool = True) -> RLConfig:
    cfg = config()
    cfg.policy.mtp_num_layers, cfg.policy.mtp_detach_heads = depths, detach
    return cfg


def mtp_rollouts(model: NemotronH) -> list[Rollout]:
    out = generate(model.eval(), PROMPTS, 6, stop_token_ids=(11,), generator=torch.Generator().manual_seed(1))
    return [
        Rollout(i, PROMPTS[i], ids, out.logprobs[i], out.entropies[i], False, 1.0, [Message(len(ids), True)])
        for i, ids in enumerate(out.tokens)
    ]


def test_without_depths_the_block_of_multi_token_prediction_stays_and_the_trunk_moves(mtp_model: NemotronH) -> None:
    changes, metrics = step(mtp_model, with_mtp(0), mtp_rollouts(mtp_model), ADVANTAGES)
    assert "mtp_loss" not in metrics
    assert all((change == 0).all() == name.startswith("mtp.") for name, change in changes.items() if "gate" not in name)


def test_detached_heads_move_the_block_and_leave_the_trunk_to_the_last_bit_as_without_them(
    mtp_model: NemotronH,
) -> None:
    rollouts = mtp_rollouts(mtp_model)
    off, _ = step(mtp_model, with_mtp(0), rollouts, ADVANTAGES)
    detached, metrics = step(mtp_model, with_mtp(2), rollouts, ADVANTAGES)
    attached, _ = step(mtp_model, with_mtp(2, detach=False), rollouts, ADVANTAGES)
    assert metrics["mtp_loss"] > 1
    for name, change in detached.items():
        assert torch.equal(change, off[name]) != name.startswith("mtp.") or "gate" in name, name
    assert detached["mtp.layers.0.eh_proj.weight"].abs().max() > 1e-4
    for name in ("lm_head.weight", "backbone.embeddings.weight", "backbone.layers.0.mixer.in_proj.weight"):
        assert not torch.equal(attached[name], off[name])


def test_what_detached_heads_learn_does_not_depend_on_advantages(mtp_model: NemotronH) -> None:
    """Without an advantage a completion moves no trunk, and is as good to predict further ahead as any other."""
    rollouts = mtp_rollouts(mtp_model)
    expected, _ = step(mtp_model, with_mtp(2), rollouts, ADVANTAGES)
    for advantages in ([1.0, 0.0, 0.0], [0.0, 0.0, 0.0]):
        changes, metrics = step(mtp_model, with_mtp(2), rollouts, advantages)
        of_block = [name for name in changes if name.startswith("mtp.")]
        assert_equal({name: expected[name] for name in of_block}, {name: changes[name] for name in of_block})
        assert metrics["trained_tokens"] > 0 and metrics["mtp_loss"] > 1
    assert not any(change.any() for name, change in changes.items() if name not in of_block)


@pytest.mark.parametrize("dropped", [False, True])
def test_the_loss_is_a_mean_over_depths_of_sums_over_sampled_tokens_over_their_number(
    mtp_model: NemotronH, dropped: bool
) -> None:
    """Against each completion behind its prompt in a plain forward pass. Two of one prompt share it in the update.

    `dropped`: a completion on which trainer and generator disagree is in neither sum nor number.
    """
    rollouts = mtp_rollouts(mtp_model)
    rollouts[1].prompt_ids, rollouts[1].prompt_index = rollouts[0].prompt_ids, 0
    rollouts[1].logprobs = logprobs_of(mtp_model, rollouts[1])
    if dropped:
        rollouts[2].logprobs = [logprob - 0.9 for logprob in rollouts[2].logprobs]
    changes, metrics = step(mtp_model, with_mtp(2), rollouts, ADVANTAGES)

    kept = rollouts[:2] if dropped else rollouts
    nats, count = [torch.zeros((), dtype=torch.float64) for _ in range(2)], 0
    for rollout in kept:
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        out = mtp_model.train()(ids, mtp_depths=2, detach_mtp=True)
        first = len(rollout.prompt_ids)
        for depth, logits in enumerate(out.mtp_logits, start=1):
            for position in range(first, ids.shape[1]):
                before = position - depth - 1  # depth k at t predicts token t + k + 1
                if before >= 0:
                    nats[depth - 1] = nats[depth - 1] - logits[0, before].log_softmax(-1)[ids[0, position]]
                    count += 1
    tokens = sum(len(rollout.completion_ids) for rollout in kept)
    assert metrics["mtp_loss"] == pytest.approx(float(sum(nats).detach()) / count, rel=1e-6)
    mtp_model.zero_grad()
    (0.3 * (nats[0] + nats[1]) / 2 / tokens).backward()
    for name, parameter in mtp_model.named_parameters():
        if name.startswith("mtp.") and parameter.grad is not None and "gate" not in name:
            torch.testing.assert_close(changes[name], -parameter.grad, rtol=1e-5, atol=1e-9)


def logprobs_of(model: NemotronH, rollout: Rollout) -> list[float]:
    """Of the completion behind its prompt."""
    ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
    with torch.no_grad():
        logp = model.eval()(ids).logits[0].log_softmax(-1)
    start = len(rollout.prompt_ids)
    return [float(logp[start + i - 1, token]) for i, token in enumerate(rollout.completion_ids)]


def test_a_model_without_the_block_is_refused(model: NemotronH, tmp_path: Path) -> None:
    model.float().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"policy\.mtp_num_layers 2: .* has no multi-token prediction"):
        load_policy(with_mtp(2), tmp_path, torch.device("cpu"))
