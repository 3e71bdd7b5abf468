"""A row's states are those of its tokens alone: however its prompt was read, whoever sat beside it, wherever it sat."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemotron.stack.models import NemotronH
from nemotron.stack.models.attention import AttentionCache
from nemotron.stack.models.decoding.cache import Cache
from nemotron.stack.models.decoding.steps import prefill
from nemotron.stack.models.mamba2 import MambaCache
from nemotron.stack.serving.batch import Batch, Row
from nemotron.stack.serving.prompt_cache import RowState
from nemotron.stack.serving.sampling import Choice, Sampling

PATTERNS = pytest.mark.parametrize(
    ("pattern", "mtp", "dimensions"),
    [
        ("MEM*E-", "*E", {}),
        ("M*", "M-", {"conv_kernel": 1, "n_groups": 1}),
        ("*M-", "-", {"conv_kernel": 6, "n_groups": 4}),
    ],
)


def row_of(prompt: list[int], new_tokens: int = 10**6, **settings: Any) -> Row:
    return Row(prompt, Choice(Sampling(new_tokens, (), **({"temperature": 0} | settings)), 61))


def tokens_of(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(61) for _ in range(count)]


def read(batch: Batch, row: Row, chunk: int) -> RowState:
    """All but the last token of the row, `chunk` at a time."""
    end = len(row.tokens) - 1
    state = batch.new_state(end)
    prompt, row = row.tokens, Row(row.tokens, row.choice)
    while left := end - state.trunk.length:
        batch.read([row], [state], [min(chunk, left)])
    assert state.trunk.length == len(prompt) - 1
    return state


def assert_same(one: RowState, other: RowState) -> None:
    """Up to the rounding of float64; the sums of a state are of size 10."""
    pairs: list[tuple[Cache | None, Cache | None]] = [(one.trunk, other.trunk), (one.drafter, other.drafter)]
    for a, b in pairs:
        assert (a is None) == (b is None)
        if a is None or b is None:
            continue
        assert a.length == b.length
        for layer, expected in zip(a.layers, b.layers, strict=True):
            assert type(layer) is type(expected)
            if isinstance(layer, AttentionCache) and isinstance(expected, AttentionCache):
                for got, want in ((layer.k, expected.k), (layer.v, expected.v)):
                    torch.testing.assert_close(got[:, :, : a.length], want[:, :, : a.length], atol=1e-10, rtol=1e-10)
            elif isinstance(layer, MambaCache) and isinstance(expected, MambaCache):
                torch.testing.assert_close(layer.conv, expected.conv, atol=1e-10, rtol=1e-10)
                torch.testing.assert_close(layer.ssm, expected.ssm, atol=1e-10, rtol=1e-10)
    if one.hidden_D is not None or other.hidden_D is not None:
        torch.testing.assert_close(one.hidden_D, other.hidden_D, atol=1e-10, rtol=1e-10)


@PATTERNS
@torch.inference_mode()
def test_chunks_leave_the_states_of_one_reading(
    small_model: Callable[..., NemotronH], pattern: str, mtp: str, dimensions: dict[str, Any]
) -> None:
    """Against `prefill`, which reads with the scan from 0; several rows at once, each from where it is."""
    dimensions = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": mtp} | dimensions
    model = small_model(pattern, 2, **dimensions).double().eval()
    batch = Batch(model, 2)
    rows = [row_of(tokens_of(seed, length)) for seed, length in enumerate((38, 3, 21, 20))]
    whole = [read(batch, row, 100) for row in rows]
    for row, state in zip(rows, whole, strict=True):
        ids = torch.tensor([row.prompt[:-1]])
        _, cache = prefill(model, ids, torch.ones_like(ids, dtype=torch.bool), ids.shape[1])
        assert_same(RowState(state.trunk), RowState(cache))
    for chunk in (1, 7):
        for row, state in zip(rows, whole, strict=True):
            assert_same(read(batch, row, chunk), state)
    together = [batch.new_state(len(row.prompt) - 1) for row in rows]
    for counts in ([5, 1, 9, 2], [20, 1, 8, 17], [12, 0, 3, 0]):
        reading = [index for index, count in enumerate(counts) if count]
        batch.read([rows[i] for i in reading], [together[i] for i in reading], [counts[i] for i in reading])
    for one, other in zip(together, whole, strict=True):
        assert_same(one, other)


@PATTERNS
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@torch.inference_mode()
def test_rows_that_join_and_leave_keep_to_themselves(
    small_model: Callable[..., NemotronH], pattern: str, mtp: str, dimensions: dict[str, Any], num_drafts: int
) -> None:
    """After every step a row has the states of a fresh reading of its tokens; 40 rows come and go, 20 at most at once.

    Drafted hidden states are those of the block's own reading, too.
    """
    dimensions = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": mtp} | dimensions
    model = small_model(pattern, 3, **dimensions).double().eval()
    batch, source = Batch(model, num_drafts), random.Random(num_drafts)
    slots = set()
    for arrival in range(40):
        row = row_of(tokens_of(arrival, source.randint(1, 12)), temperature=source.choice((0.0, 1.0)), seed=arrival)
        batch.join(row, read(batch, row, 50))
        while len(batch.rows) > 20 or (batch.rows and source.random() < 0.3):
            batch.leave(source.choice(batch.rows))
        if batch.rows:
            for stepped, tokens in batch.step():
                assert [token.id for token in tokens] == stepped.choice.tokens[-len(tokens) :]
            slots.add(len(batch.slots))
            row = source.choice(batch.rows)
            state = batch.state(row)
            assert state.trunk.length == len(row.tokens) - 1
            assert_same(state, read(batch, row, 50))
    assert max(slots) > 8 and all(count in (1, 2, 4, 8, 16, 32) for count in slots)
    for row in batch.rows:
        batch.leave(row)
    assert batch.slots == [None]


@torch.inference_mode()
def test_a_kept_state_goes_on_unchanged(small_model: Callable[..., NemotronH]) -> None:
    """What joins, and what is read on from a resized copy, leaves the original as it was."""
    model = small_model("M*-", 4, num_nextn_predict_layers=1).double().eval()
    batch = Batch(model, 1)
    row = row_of(tokens_of(0, 12))
    kept = read(batch, row, 50)
    before = kept.resized(11)
    longer = row_of([*row.prompt, *tokens_of(1, 9)])
    state = kept.resized(20)
    batch.read([longer], [state], [9])
    assert_same(state, read(batch, longer, 50))
    batch.join(row, kept)
    for _ in range(5):
        batch.step()
    assert_same(kept, before)
