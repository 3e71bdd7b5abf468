"""Documents packed into a row give what each gives alone, to the last digits of float64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.stack.models import NemotronH
from nemotron.stack.models.shared_prompt import SharedPrompts

PATTERNS = ["M", "*", "E", "-", "MEM*EME-"]
# Documents of one token, of a chunk (8) less and more, one over several chunks, two that end with a chunk.
ROWS = [[5, 1, 10, 24, 7, 1], [8, 16, 3, 1, 1, 19]]


def documents() -> list[list[Tensor]]:
    source = torch.Generator().manual_seed(3)
    return [[torch.randint(61, (length,), generator=source) for length in row] for row in ROWS]


def packed(rows: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    ids = torch.stack([torch.cat(row) for row in rows])
    seq_idx = [torch.cat([torch.full((len(d),), i) for i, d in enumerate(row)]) for row in rows]
    return ids, torch.stack(seq_idx)


def loss_of(logits_LV: Tensor, document: Tensor) -> Tensor:
    return F.cross_entropy(logits_LV[:-1], document[1:], reduction="sum")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_packed_rows_equal_separate_rows(make_model: Callable[..., NemotronH], pattern: str) -> None:
    model = make_model(pattern, dtype=torch.float64)
    rows = documents()
    logits_BLV = model(*packed(rows)).logits
    together = [piece for b, row in enumerate(rows) for piece in logits_BLV[b].split([len(d) for d in row])]
    alone = [model(document[None]).logits[0] for row in rows for document in row]
    flat = [document for row in rows for document in row]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)

    parameters = dict(model.named_parameters())
    grads_packed = torch.autograd.grad(
        sum(loss_of(logits, d) for logits, d in zip(together, flat, strict=True)), list(parameters.values())
    )
    grads_alone = torch.autograd.grad(
        sum(loss_of(logits, d) for logits, d in zip(alone, flat, strict=True)), list(parameters.values())
    )
    for name, one, other in zip(parameters, grads_packed, grads_alone, strict=True):
        assert other.norm() > 0, name
        assert (one - other).norm() <= 1e-12 * other.norm().clamp(min=1), name


# Prompts: none, shorter than the convolution (4), ending with a chunk, over several chunks; their continuations.
PROMPTS, CONTINUATIONS = [0, 1, 2, 16, 21], [[1, 2, 30], [7, 1, 9], [3, 12], [8, 3, 1], [2, 2, 17]]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("pattern", "conv_kernel"), [*((pattern, 4) for pattern in PATTERNS), ("M", 1)])
def test_continuations_of_a_shared_prompt_equal_separate_rows(
    make_model: Callable[..., NemotronH], pattern: str, conv_kernel: int, recompute: bool
) -> None:
    """The gradient of a prompt is the sum of those that its continuations give it."""
    model = make_model(pattern, dtype=torch.float64, conv_kernel=conv_kernel).train()
    for block in model.blocks():
        block.recompute = recompute
    source = torch.Generator().manual_seed(3)
    prompts = [torch.randint(61, (length,), generator=source) for length in PROMPTS]
    continuations = [[torch.randint(61, (n,), generator=source) for n in lengths] for lengths in CONTINUATIONS]
    width = max(len(prompt) + sum(map(len, own)) for prompt, own in zip(prompts, continuations, strict=True))
    ids, seq_idx = torch.zeros(len(prompts), width, dtype=torch.int64), torch.full((len(prompts), width), -1)
    for b, parts in enumerate([[prompt, *own] for prompt, own in zip(prompts, continuations, strict=True)]):
        row = torch.cat(parts)
        ids[b, : len(row)] = row
        seq_idx[b, : len(row)] = torch.cat([torch.full((len(part),), i) for i, part in enumerate(parts)])
    logits_BLV = model(ids, seq_idx, shared_prompt=True).logits
    loads = [moe.gate.expert_load.clone() for moe in model.moe_blocks()]
    for moe in model.moe_blocks():
        moe.gate.expert_load.zero_()
    together, alone = [], []
    for b, (prompt, own) in enumerate(zip(prompts, continuations, strict=True)):
        together += logits_BLV[b, len(prompt) :].split([*map(len, own), width - len(prompt) - sum(map(len, own))])[:-1]
        alone += [model(torch.cat([prompt, piece])[None]).logits[0, len(prompt) :] for piece in own]
    for load, moe in zip(loads, model.moe_blocks(), strict=True):
        assert torch.equal(load, moe.gate.expert_load)  # a prompt counts for each of them, padding for none
    pieces = [piece for own in continuations for piece in own]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
    parameters = dict(model.named_parameters())
    grads = [
        torch.autograd.grad(
            sum(F.cross_entropy(logits, piece, reduction="sum") for logits, piece in zip(which, pieces, strict=True)),
            list(parameters.values()),
        )
        for which in (together, alone)
    ]
    for name, one, other in zip(parameters, *grads, strict=True):
        assert other.norm() > 0, name
        assert (one - other).norm() <= 1e-12 * other.norm().clamp(min=1), name


def test_a_shared_prompt_may_be_long(make_model: Callable[..., NemotronH]) -> None:
    """In fp32, behind 3,000 tokens that forget slowly: as near to float64 as the plain forward pass is."""
    model = make_model("MM", dtype=torch.float64)
    for block in model.blocks():
        with torch.no_grad():
            block.mixer.A_log.fill_(-4.0)  # type: ignore[union-attr, operator]
    ids = torch.randint(61, (1, 3200), generator=torch.Generator().manual_seed(1))
    seq_idx = torch.zeros_like(ids)
    seq_idx[:, 3000:3100], seq_idx[:, 3100:] = 1, 2
    last = torch.cat([ids[:, :3000], ids[:, 3100:]], dim=1)
    exact = model(last).logits[0, 3000:]
    model.float()
    plain, shared = model(last).logits[0, 3000:], model(ids, seq_idx, shared_prompt=True).logits[0, 3100:]
    error, expected = (shared - exact).abs().max(), (plain - exact).abs().max()
    assert error < 3 * expected + 1e-6


@pytest.mark.parametrize("detach", [True, False])
def test_multi_token_prediction_behind_a_shared_prompt_is_that_of_separate_rows(
    make_model: Callable[..., NemotronH], detach: bool
) -> None:
    """Logits of three depths and their gradients: of two rows with three continuations, and of each row by itself."""
    model = make_model("ME*M", dtype=torch.float64, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E")
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(61, (length,), generator=generator) for length in (5, 3)]
    tails = [[torch.randint(61, (length,), generator=generator) for length in lengths] for lengths in ((4, 6), (7,))]
    shared = [torch.cat([prompt, *several]) for prompt, several in zip(prompts, tails, strict=True)]
    documents = [
        torch.cat([torch.full((len(part),), d) for d, part in enumerate([prompt, *several])])
        for prompt, several in zip(prompts, tails, strict=True)
    ]
    width = max(map(len, shared))
    ids_BL = torch.stack([F.pad(row, (0, width - len(row))) for row in shared])
    seq_idx_BL = torch.stack([F.pad(row, (0, width - len(row)), value=-1) for row in documents])
    out = model(ids_BL, seq_idx_BL, seq_idx_BL > 0, mtp_depths=3, detach_mtp=detach, shared_prompt=True)

    expected: list[list[torch.Tensor]] = [[], [], []]
    for prompt, several in zip(prompts, tails, strict=True):
        for tail in several:
            row = torch.cat([prompt, tail])[None]
            select = torch.arange(row.shape[1])[None] >= len(prompt)
            alone = model(row, None, select, mtp_depths=3, detach_mtp=detach)
            for depth, logits in enumerate(alone.mtp_logits):
                expected[depth].append(logits)
    for logits, parts in zip(out.mtp_logits, expected, strict=True):
        torch.testing.assert_close(logits, torch.cat(parts), rtol=1e-12, atol=1e-12)

    parameters = dict(model.named_parameters())
    losses = [sum(logits.logsumexp(-1).sum() for logits in each) for each in (out.mtp_logits, map(torch.cat, expected))]
    grads = [torch.autograd.grad(loss, parameters.values(), allow_unused=True) for loss in losses]
    for name, one, other in zip(parameters, *grads, strict=True):
        assert (one is None) == (other is None) and (one is not None or detach or name.startswith("mtp")), name
        assert one is None or not detach or name.startswith("mtp"), name
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="needs seq_idx_BL and select_BL"):
        model(ids_BL, seq_idx_BL, mtp_depths=1, shared_prompt=True)


def test_select_gives_the_logits_of_those_positions(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("MEM*EME-", dtype=torch.float64)
    ids, seq_idx = packed(documents())
    select = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    with torch.no_grad():
        torch.testing.assert_close(model(ids, seq_idx, select).logits, model(ids, seq_idx).logits[select])


def test_the_gradient_of_a_shared_prompts_last_tokens_is_the_same_every_time() -> None:
    """As large as in RL, where several threads take part: all continuations of a prompt read these tokens."""
    seq_idx_BL = torch.zeros(8, 384, dtype=torch.int64)
    for b, row in enumerate(seq_idx_BL):  # of unequal lengths, so that a thread's part ends within a row
        for start in range(150 - 9 * b, 384, 14 + b):
            row[start:] += 1
    prompts = SharedPrompts.find(seq_idx_BL, conv_width=4)
    source = torch.Generator().manual_seed(0)
    x_BLc = torch.randn(8, 384, 320, generator=source, requires_grad=True)
    weight_EKc = torch.randn(*prompts.window_EK.shape, 320, generator=source)
    before, grads = torch.get_num_threads(), []
    try:
        for count in (1, 2, 2, 2, 2, 2, 2):
            torch.set_num_threads(count)
            grads += torch.autograd.grad((prompts.early_inputs(x_BLc) * weight_EKc).sum(), x_BLc)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(grads[0], grad) for grad in grads)
