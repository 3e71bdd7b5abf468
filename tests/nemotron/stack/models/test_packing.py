"""Documents packed into a row give what each gives alone, to the last digits of float64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.stack.models import NemotronH

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


def test_select_gives_the_logits_of_those_positions(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("MEM*EME-", dtype=torch.float64)
    ids, seq_idx = packed(documents())
    select = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    with torch.no_grad():
        torch.testing.assert_close(model(ids, seq_idx, select).logits, model(ids, seq_idx).logits[select])
