"""Packing changes nothing: a step on packed pairs is the gradient of DPO's formula on one answer at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemotron.kit.metrics import Progress
from nemotron.recipes.nano3.stage2_rl.dpo import reference_logprobs, update, validate
from nemotron.recipes.nano3.stage2_rl.dpo_schema import DPORunConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.rl.pairs import Answer, Pair, answer_logprobs, pack_pairs
from nemotron.stack.rl.prompts import shuffled
from nemotron.stack.training.distributed import ALONE

PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3], [5, 8]]
ANSWERS = [([7, 9, 11], [3, 11]), ([2, 3, 8, 4, 11], [6, 11]), ([2, 11], [6, 4, 3, 11]), ([3, 8, 11], [3, 11])]


def answer(prompt: list[int], ids: list[int], untrained: int = 0) -> Answer:
    """The first `untrained` tokens after the prompt are not the model's own, as what a tool answers."""
    predicts = [False] * (len(prompt) - 1 + untrained) + [True] * (len(ids) - untrained) + [False]
    return Answer([*prompt, *ids], predicts)


PAIRS = [
    Pair(answer(prompt, chosen, untrained=int(len(chosen) > 4)), answer(prompt, rejected))
    for prompt, (chosen, rejected) in zip(PROMPTS, ANSWERS, strict=True)
]


def config(row_len: int = 24, rows: int = 2, pairs: int = len(PAIRS), **dpo: Any) -> DPORunConfig:
    policy = {
        "model_name": "model", "max_total_sequence_length": row_len, "train_micro_batch_size": rows,
        "train_global_batch_size": pairs, "max_grad_norm": 1e9,
    }  # fmt: skip
    run = {"model": "model", "data": "data"}
    return DPORunConfig.model_validate({"run": run, "policy": policy, "data": {"path": "data"}, "dpo": dpo})


@pytest.fixture
def model(small_model: Callable[..., NemotronH]) -> NemotronH:
    return small_model("MEM*-", seed=3, vocab_size=40, initializer_range=0.4).double()


@pytest.fixture
def reference(small_model: Callable[..., NemotronH]) -> NemotronH:
    return small_model("MEM*-", seed=4, vocab_size=40, initializer_range=0.4).double()


def session_of(model: NemotronH) -> Any:
    return SimpleNamespace(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), ranks=ALONE, autocast=nullcontext(),
        stop=SimpleNamespace(poll=lambda: None), dealt_out=nullcontext,
        progress_of_pass=lambda label, rows: Progress(rows, label=label, only_if_slow=True),
    )  # fmt: skip


def alone(model: NemotronH, answer: Answer) -> Tensor:
    """Log-probability of an answer, summed over its tokens, from the logits of its sequence alone."""
    ids = torch.tensor([answer.ids])
    logits = model(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)).logits
    logp = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return logp[torch.tensor(answer.predicts[:-1])].sum()


@pytest.mark.parametrize(("row_len", "rows"), [(18, 1), (24, 2), (200, 1)])
def test_a_packed_step_is_the_gradient_of_the_formula(
    model: NemotronH, reference: NemotronH, row_len: int, rows: int
) -> None:
    """Rafailov et al. 2023, equation 7, and 0.2 of the chosen answer's negative log-likelihood, mean over pairs."""
    plain, beta = deepcopy(model).train(), 0.05
    losses, margins = [], []
    for pair in PAIRS:
        chosen, rejected = alone(plain, pair.chosen), alone(plain, pair.rejected)
        with torch.no_grad():
            margin = chosen - alone(reference, pair.chosen) - rejected + alone(reference, pair.rejected)
        margins.append(margin.item())
        ratio = torch.sigmoid(beta * (chosen - rejected - (chosen - rejected).detach() + margin))
        losses.append(-torch.log(ratio) - 0.2 * chosen)
    loss = torch.stack(losses).mean()
    loss.backward()

    cfg, trained = config(row_len, rows), deepcopy(model)
    references = reference_logprobs(cfg, session_of(reference), reference, PAIRS)
    norm, record = update(cfg, session_of(trained), PAIRS, references)
    metrics = record.metrics(ALONE)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["rewards_margin_mean"] == pytest.approx(sum(margins) / len(margins), rel=1e-4)
    assert metrics["accuracy"] == sum(margin > 0 for margin in margins) / len(margins)
    assert metrics["num_valid_samples"] == len(PAIRS)
    gradients = dict(plain.named_parameters())
    for name, weight in trained.named_parameters():
        change = dict(model.named_parameters())[name].detach() - weight.detach()
        expected = gradients[name].grad
        torch.testing.assert_close(
            change, torch.zeros_like(change) if expected is None else expected, rtol=1e-4, atol=1e-8
        )
    assert norm == pytest.approx(
        torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm().item(), rel=1e-4
    )


def test_the_model_has_gained_nothing_on_itself(model: NemotronH) -> None:
    cfg = config()
    session = session_of(model)
    before = [moe.gate.expert_load.clone() for moe in model.train().moe_blocks()]
    metrics = validate(cfg, session, model, PAIRS, reference_logprobs(cfg, session, model, PAIRS))
    assert metrics["rewards_chosen_mean"] == metrics["rewards_rejected_mean"] == metrics["accuracy"] == 0.0
    assert metrics["preference_loss"] == pytest.approx(0.693147, abs=1e-5)
    assert model.training  # as it was, and no token of it counts as load of an expert
    assert all(torch.equal(moe.gate.expert_load, load) for moe, load in zip(model.moe_blocks(), before, strict=True))


def test_a_pair_stays_together_and_what_a_tool_says_is_not_learned() -> None:
    batches = pack_pairs(PAIRS, 24, 1)
    assert sorted(index for batch in batches for index in batch.pairs) == [0, 1, 2, 3]
    for batch in batches:
        expected = [a for index in batch.pairs for a in (PAIRS[index].chosen, PAIRS[index].rejected)]
        assert batch.lengths_S == [sum(a.predicts) for a in expected]
        assert batch.targets_T.tolist() == [
            t for a in expected for t, p in zip(a.ids[1:], a.predicts, strict=False) if p
        ]
        assert batch.seq_idx_BL.max() >= 1
    assert 2 not in batches[[1 in batch.pairs for batch in batches].index(True)].targets_T.tolist()
    with pytest.raises(ValueError, match="a pair of 16 tokens does not fit a row of 12"):
        pack_pairs(PAIRS, 12, 1)


def test_padding_is_no_load_of_an_expert(small_model: Callable[..., NemotronH]) -> None:
    """Two rows of unequal length: as much load as the tokens of the pairs, each to its experts.

    Multi-token prediction, which nothing here trains, does not run: its experts have none.
    """
    model = small_model("MEM*-", vocab_size=40, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E")
    pairs = [PAIRS[0], PAIRS[2]]
    (batch,) = pack_pairs(pairs, 18, 2)
    assert sorted((batch.seq_idx_BL == -1).sum(1).tolist()) == [0, 16 - 11]
    answer_logprobs(model.train(), batch, nullcontext())
    tokens = sum(pair.num_tokens for pair in pairs)
    trunk, predicted = model.moe_blocks()
    assert trunk.gate.expert_load.sum() == tokens * trunk.gate.top_k
    assert not predicted.gate.expert_load.any()


def test_every_epoch_has_each_pair_once_in_another_order() -> None:
    drawn = [index for step in range(6) for index in shuffled(10, range(5 * step, 5 * step + 5), 7)]
    epochs = [drawn[:10], drawn[10:20], drawn[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
