"""Boosting trains the block on exactly what decoding gives it, with the loss that was published, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.decoding.speculative import Drafter, Trunk
from nemotron.stack.rl.boosting import Response, ResponseRows, boosting_loss_sum, pack_responses

VOCAB = 23
MTP_PATTERNS = ["*E", "M-", "-"]


def model_with(small_config: Callable[..., NemotronHConfig], mtp_pattern: str, seed: int = 0) -> NemotronH:
    """In float64, with weights large enough for outputs that differ."""
    config = small_config(
        "M*E", vocab_size=VOCAB, num_nextn_predict_layers=1, mtp_hybrid_override_pattern=mtp_pattern,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(seed)
    return NemotronH(config).double().eval()


def responses_of(seed: int, *lengths: tuple[int, int]) -> list[Response]:
    """Responses of random tokens, (prompt, written) of these lengths."""
    source = torch.Generator().manual_seed(seed)
    return [
        Response(torch.randint(VOCAB, (prompt + written,), generator=source).tolist(), prompt)
        for prompt, written in lengths
    ]


def rows_of(responses: list[Response], num_steps: int, row_len: int = 64, seed: int = 0) -> list[ResponseRows]:
    return pack_responses(responses, row_len, 2, num_steps, torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------------------------- the steps


@torch.no_grad()
def slow_steps(model: NemotronH, ids: list[int], sources: list[list[int]]) -> list[Tensor]:
    """The definition, for one sequence: what step k makes of position t, from a table of states by (step, position)."""
    mtp, embedding = model.mtp, model.backbone.embeddings
    assert mtp is not None
    trunk = model.hidden_states(torch.tensor([ids]), None)[0][0]
    table = {(0, t): trunk[t] for t in range(len(ids))}
    outputs = []
    for k, of_positions in enumerate(sources, start=1):
        states = [trunk[0], *(table[j, t] for t, j in enumerate(of_positions) if t > 0)]
        x = mtp.merge(embedding(torch.tensor([[*ids[1:], 0]])), torch.stack(states)[None])
        for block in mtp.blocks():
            x, _ = block(x)
        outputs.append(mtp.finish(x)[0])
        table |= {(k, t + 1): outputs[-1][t] for t in range(len(ids) - 1)}
    return outputs


@pytest.mark.parametrize("mtp_pattern", MTP_PATTERNS)
def test_steps_go_on_from_the_states_that_were_drawn(
    small_config: Callable[..., NemotronHConfig], mtp_pattern: str
) -> None:
    """Packed documents, each against the definition; the last position of a document has no next token."""
    model = model_with(small_config, mtp_pattern)
    (rows,) = rows_of(responses_of(1, (3, 6), (2, 9), (1, 4)), num_steps=5)
    assert rows.sources_NBL.max() == 4 and model.mtp is not None
    hidden, _ = model.hidden_states(rows.input_ids_BL, rows.seq_idx_BL)
    next_ids = torch.zeros_like(rows.input_ids_BL)
    next_ids[:, :-1] = rows.input_ids_BL[:, 1:]
    model.train()
    steps = model.mtp.rehearse(
        model.backbone.embeddings(next_ids), hidden, rows.sources_NBL, rows.seq_idx_BL
    )  # fmt: skip
    loads = [int(moe.gate.expert_load.sum()) for moe in model.moe_blocks()]
    real = int((rows.seq_idx_BL >= 0).sum()) * model.config.num_experts_per_tok
    assert "E" not in mtp_pattern or loads[-1] == 5 * real
    model.eval()
    compared = 0
    for b, t in {(int(b), int(i)) for b, i in zip(*torch.where(rows.seq_idx_BL >= 0), strict=True)}:
        document = rows.seq_idx_BL[b] == rows.seq_idx_BL[b, t]
        places = torch.where(document)[0]
        if t != places[0]:
            continue
        ids = rows.input_ids_BL[b, places].tolist()
        expected = slow_steps(model, ids, rows.sources_NBL[:, b, places].tolist())
        for one, other in zip(steps, expected, strict=True):
            torch.testing.assert_close(one[b, places[:-1]], other[:-1], atol=1e-11, rtol=1e-11)
        compared += 1
    assert compared == 3


@pytest.mark.parametrize("mtp_pattern", MTP_PATTERNS)
@torch.no_grad()
def test_drafting_is_one_of_the_draws(small_config: Callable[..., NemotronHConfig], mtp_pattern: str) -> None:
    """The trunk's state up to the newest token but one, then step 1, 2, ...: what decoding drafts, draft by draft."""
    model, k = model_with(small_config, mtp_pattern), 4
    assert model.mtp is not None
    prompt = responses_of(2, (9, 0))[0].ids
    is_token = torch.ones(1, len(prompt) - 1, dtype=torch.bool)
    trunk, drafter = Trunk(model, is_token, 40, k), Drafter(model, is_token, 40, k)
    drafter.read(torch.tensor([prompt[1:]]), trunk.read(torch.tensor([prompt[:-1]])))
    drafts, _ = drafter.draft(lambda logits_BV: (logits_BV.argmax(-1, keepdim=True), logits_BV))

    ids = torch.tensor([prompt + drafts[0].tolist()])
    newest = len(prompt) - 2  # the last position for which decoding had the trunk's state
    sources = torch.zeros(k, 1, ids.shape[1], dtype=torch.int64)
    for step in range(k):
        for ahead in range(1, step + 1):
            sources[step, 0, newest + ahead] = ahead
    hidden, _ = model.hidden_states(ids, None)
    next_ids = torch.nn.functional.pad(ids[:, 1:], (0, 1))
    steps = model.mtp.rehearse(model.backbone.embeddings(next_ids), hidden, sources, torch.zeros_like(ids))
    assert [int(model.lm_head(out[0, newest + i]).argmax()) for i, out in enumerate(steps)] == drafts[0].tolist()
    assert len(set(drafts[0].tolist())) > 1


# ---------------------------------------------------------------------------------------------------------- the loss


def test_the_loss_is_the_mean_over_steps_of_the_kl_at_a_temperature_times_its_square(
    small_config: Callable[..., NemotronHConfig],
) -> None:
    """Against sums written out; drafted are all tokens that the model wrote but the first."""
    model, temperature = model_with(small_config, "*E"), 2.0
    responses = responses_of(3, (3, 5), (4, 2), (2, 1), (5, 7))  # one has nothing to draft
    (rows,) = rows_of(responses, num_steps=3)
    total, num_drafted = 0.0, 0
    for b in range(len(rows.input_ids_BL)):
        for document in range(int(rows.seq_idx_BL[b].max()) + 1):
            places = torch.where(rows.seq_idx_BL[b] == document)[0]
            ids = rows.input_ids_BL[b, places].tolist()
            response = next(r for r in responses if r.ids[:-1] == ids)
            p_logits = model(torch.tensor([ids])).logits[0]
            for out in slow_steps(model, ids, rows.sources_NBL[:, b, places].tolist()):
                for t in range(len(ids) - 1):
                    if t + 1 < response.num_prompt:  # the newest token is still one of the prompt
                        continue
                    p = torch.softmax(p_logits[t + 1] / temperature, -1).tolist()
                    q = torch.softmax(model.lm_head(out[t]) / temperature, -1).tolist()
                    total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) * temperature**2 / 3
                    num_drafted += 1
    assert num_drafted == 3 * (4 + 1 + 6) == 3 * sum(response.num_drafted for response in responses)
    assert boosting_loss_sum(model, rows, temperature).item() == pytest.approx(total, rel=1e-6)
    assert total > 1


def test_packing_changes_nothing(small_config: Callable[..., NemotronHConfig]) -> None:
    """Sum and gradients of responses in rows of several, and in rows of their own."""
    model = model_with(small_config, "*E")
    responses = responses_of(4, (3, 9), (7, 6), (2, 12), (4, 3), (1, 8))
    results = []
    for row_len in (14, 64):
        model.zero_grad()
        batches = rows_of(responses, num_steps=4, row_len=row_len)
        losses = [boosting_loss_sum(model, rows, 2.0) for rows in batches]
        torch.stack(losses).sum().backward()
        results.append((sum(len(rows.input_ids_BL) for rows in batches), sum(loss.item() for loss in losses)))
        results[-1] += ({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},)
    (several, one, of_several), (few, other, of_few) = results
    assert several == 4 and few == 1
    assert one == pytest.approx(other, rel=1e-6)
    assert of_several.keys() == of_few.keys()
    for name, grad in of_several.items():
        torch.testing.assert_close(grad, of_few[name], atol=1e-9, rtol=1e-6, msg=name)


def test_only_the_block_gets_a_gradient(small_config: Callable[..., NemotronHConfig]) -> None:
    model = model_with(small_config, "*E").train()
    (rows,) = rows_of(responses_of(5, (3, 9), (4, 20)), num_steps=2)
    boosting_loss_sum(model, rows, 2.0).backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.norm() > 0}
    assert reached == {name for name, _ in model.named_parameters() if name.startswith("mtp.")}


def test_steps_draw_uniformly_from_those_before_them() -> None:
    (rows,) = rows_of(responses_of(6, (3, 3000)), num_steps=4, row_len=4000)
    drawn_NT = rows.sources_NBL[:, 0, :3002]
    for step, of_step in enumerate(drawn_NT, start=1):
        shares = torch.bincount(of_step, minlength=step) / len(of_step)
        assert len(shares) == step
        assert (shares - 1 / step).abs().max() < 5 * (0.25 / 3002) ** 0.5
    assert not torch.equal(drawn_NT[2], drawn_NT[3].clamp(max=2))


@pytest.mark.parametrize(("lengths", "rows"), [([(2, 1), (5, 0)], []), ([(2, 2)], [1]), ([(3, 30)] * 5, [2, 2, 1])])
def test_rows_of_a_micro_batch(lengths: list[tuple[int, int]], rows: list[int]) -> None:
    """None without a token to draft; two rows of 40 positions a micro-batch where each response fills one."""
    packed = rows_of(responses_of(7, *lengths), num_steps=2, row_len=40)
    assert [len(micro.input_ids_BL) for micro in packed] == rows
    for micro in packed:
        assert micro.input_ids_BL.shape[1] <= 40
        assert torch.equal(micro.drafts_BL[:, :-1], micro.teaches_BL[:, 1:])


def test_a_response_that_fits_no_row_is_refused() -> None:
    with pytest.raises(ValueError, match="34 tokens does not fit a row of 32"):
        rows_of(responses_of(8, (4, 30)), num_steps=2, row_len=32)
