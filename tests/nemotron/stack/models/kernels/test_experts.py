"""The routed experts and their gradient against three plain lines, however their rows are padded and multiplied."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.stack.models.kernels import experts as module
from nemotron.stack.models.kernels import linear
from nemotron.stack.models.kernels.experts import Implementation, RoutedExperts, choose_implementation, dispatch
from nemotron.stack.models.kernels.linear import HAS_ONEDNN, onednn_serves

TOKENS, EXPERTS, WIDTH, INNER = 256, 4, 12, 20
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def onednn_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MKL_IS_FASTER", False)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def choices(rows_of_first: int) -> Tensor:
    """Two of four experts a token: expert 0 gets a given number of rows of those of expert 1."""
    chosen = torch.stack([torch.full((TOKENS,), 1), torch.arange(TOKENS) % 2 + 2], dim=1)
    chosen[:rows_of_first, 0] = 0
    return chosen


def compare(chosen: Tensor, dtype: torch.dtype, tolerance: float, width: int = WIDTH, inner: int = INNER) -> None:
    """Output and gradients beside every expert applied to every token and weighted, by autograd in fp32."""
    x, weights = random(TOKENS, width, seed=0), random(TOKENS, 2, seed=1)
    up, down = random(EXPERTS, inner, width, seed=2), random(EXPERTS, width, inner, seed=3)
    upstream = random(TOKENS, width, seed=4).detach()
    out = RoutedExperts.apply(x.to(dtype), weights, chosen, up.to(dtype), down.to(dtype), None)
    assert out.dtype == dtype
    every = torch.einsum("edf,tef->ted", down, F.relu(torch.einsum("efd,td->tef", up, x)).square())
    gates = torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, weights)
    expected = torch.einsum("te,ted->td", gates, every)
    leaves = (x, weights, up, down)
    actual = [out, *torch.autograd.grad(out, leaves, upstream.to(dtype))]
    for one, other in zip(actual, [expected, *torch.autograd.grad(expected, leaves, upstream)], strict=True):
        assert (one.float() - other).norm() < tolerance * other.norm()


@pytest.mark.parametrize("fast", [pytest.param(True, marks=needs_onednn), False])
@pytest.mark.parametrize("rows_of_first", [0, 1, 64, 150])
def test_fp32_with_and_without_padded_rows(monkeypatch: pytest.MonkeyPatch, fast: bool, rows_of_first: int) -> None:
    monkeypatch.setattr(module, "onednn_serves", lambda x: fast and onednn_serves(x))
    compare(choices(rows_of_first), torch.float32, 1e-6)


@pytest.mark.parametrize("rows_of_first", [0, 1, 64, 150])
@pytest.mark.parametrize("most_padding", [3, 0], ids=["all at once", "one by one"])
def test_bf16(monkeypatch: pytest.MonkeyPatch, rows_of_first: int, most_padding: int) -> None:
    monkeypatch.setattr(module, "MAX_PADDING", most_padding)
    compare(choices(rows_of_first), torch.bfloat16, 0.01)


@pytest.mark.parametrize("rows_of_first", [0, 1, 64, 150])
def test_bf16_as_a_gpu_multiplies_it(monkeypatch: pytest.MonkeyPatch, rows_of_first: int) -> None:
    monkeypatch.setattr(module, "choose_implementation", lambda *of: (1, "grouped_mm"))
    compare(choices(rows_of_first), torch.bfloat16, 0.01, 16, 24)  # it reads 16 bytes at once


def test_every_choice_has_a_row_among_those_of_its_expert() -> None:
    chosen = choices(100)
    ways: list[tuple[int, Implementation]] = [(1, "grouped_mm"), (1, "eager"), (64, "eager"), (16, "batched_mm")]
    for multiple, implementation in ways:
        rows = dispatch(chosen, EXPERTS, multiple, implementation)
        expert_S = torch.full((len(rows.token_S),), -1)
        if rows.capacity:
            expert_S = torch.arange(len(rows.token_S)) // rows.capacity
        if rows.ends_E is not None:
            expert_S = torch.bucketize(torch.arange(len(rows.token_S)), rows.ends_E, right=True)
        for expert, of_expert in rows.slices:
            assert (of_expert.stop - of_expert.start) % multiple == 0
            expert_S[of_expert] = expert
        assert torch.equal(expert_S[rows.slot_TK], chosen)
        assert torch.equal(rows.token_S[rows.slot_TK], torch.arange(TOKENS).unsqueeze(1).expand(-1, 2))
        assert len(rows.slot_TK.unique()) == chosen.numel()
    assert rows.capacity == 160  # of the 156 rows of expert 1
    assert len(rows.token_S) == 160 * EXPERTS and rows.slices == []


def test_crowded_experts_are_multiplied_one_by_one() -> None:
    """Of 64 experts two have 48 rows each: with 64 times 48 rows, 31 of 32 would be padding."""
    crowded = torch.tensor([[5, 9]]).expand(48, -1)
    assert dispatch(crowded, 64, 16, "batched_mm").capacity == 0
    assert dispatch(crowded % 2, 2, 16, "batched_mm").capacity == 96  # all choices are of expert 1
    assert choose_implementation(torch.ones(1, 1, dtype=torch.bfloat16), 1, 8) == (16, "batched_mm")
    assert choose_implementation(torch.ones(1, 1, dtype=torch.float64), 1000, 8) == (1, "eager")
