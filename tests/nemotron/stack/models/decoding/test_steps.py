"""Prefill and single-token steps give the logits of the whole sequence read at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding import cache as cache_module
from nemotron.stack.models.decoding import steps as decode
from nemotron.stack.models.decoding.steps import prefill, step
from nemotron.stack.models.kernels import linear
from nemotron.stack.models.kernels.linear import HAS_ONEDNN

PROMPTS = [6, 1, 13, 9, 2]  # unequal, one shorter than the convolution, one longer than a chunk (8)
NEW = 12


def check(
    model: NemotronH, tolerance: float = 1e-5, lengths: list[int] = PROMPTS, can_be_replayed: bool = False
) -> None:
    """Every row of a left-padded batch against the same row alone and whole."""
    source = torch.Generator().manual_seed(7)
    rows = [torch.randint(61, (length + NEW,), generator=source) for length in lengths]
    width = max(lengths)
    ids = torch.randint(61, (len(rows), width), generator=source)  # what stands in the padding must not matter
    is_token = torch.zeros(len(rows), width, dtype=torch.bool)
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids[b, width - length :], is_token[b, width - length :] = row[:length], True
    with torch.no_grad():
        whole = [model(row[None]).logits[0] for row in rows]
        logits, cache = prefill(model, ids, is_token, width + NEW)
        for t in range(NEW):
            expected = torch.stack([whole[b][length - 1 + t] for b, length in enumerate(lengths)])
            torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance, msg=lambda m, t=t: f"{t}: {m}")
            if can_be_replayed:
                cache.slot_1 = torch.tensor([cache.length])
            before = [tensor.data_ptr() for tensor in cache.tensors()]
            logits = step(model, torch.stack([row[n + t] for row, n in zip(rows, lengths, strict=True)]), cache)
            if can_be_replayed:
                assert [tensor.data_ptr() for tensor in cache.tensors()] == before, "memory of the cache has moved"
    assert cache.length == width + NEW


@pytest.mark.parametrize("pattern", ["M", "*", "E", "-", "MEM*EME", "M-M*-"])
def test_decode_equals_the_whole_sequence(make_model: Callable[..., NemotronH], pattern: str) -> None:
    check(make_model(pattern))


@pytest.mark.parametrize("pattern", ["M", "*", "MEM*EME"])
@pytest.mark.parametrize("lengths", [[4], [4] * 3, PROMPTS], ids=["a-row", "rows-without-padding", "padded-rows"])
def test_steps_that_can_be_replayed(
    make_model: Callable[..., NemotronH], monkeypatch: pytest.MonkeyPatch, pattern: str, lengths: list[int]
) -> None:
    """Those of a GPU: the slot is a tensor, keys are read up to a growing power of two, and states stay in place."""
    monkeypatch.setattr(cache_module, "MIN_WINDOW", 2)
    check(make_model(pattern), lengths=lengths, can_be_replayed=True)


@pytest.mark.parametrize(
    "dimensions",
    [{"conv_kernel": 1}, {"conv_kernel": 2}, {"conv_kernel": 6}, {"n_groups": 1}, {"n_groups": 4}, {"chunk_size": 3}],
    ids=str,
)
def test_decode_for_other_dimensions(make_model: Callable[..., NemotronH], dimensions: dict[str, Any]) -> None:
    check(make_model("M*M", **dimensions))


@pytest.mark.parametrize(
    "dimensions", [{"moe_latent_size": 7}, {"num_experts_per_tok": 1}, {"num_experts_per_tok": 5}], ids=str
)
@pytest.mark.parametrize("lengths", [[4], [4] * 3, PROMPTS], ids=["a-row", "rows-without-padding", "padded-rows"])
def test_decode_for_other_experts(
    make_model: Callable[..., NemotronH], dimensions: dict[str, Any], lengths: list[int]
) -> None:
    """A single row goes another way through the experts than several."""
    check(make_model("E*", **dimensions), lengths=lengths)


def test_a_state_larger_than_the_cache_of_a_core(
    make_model: Callable[..., NemotronH], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is updated some rows at a time: here two, two and one."""
    model = make_model("ME")
    heads = model.config.mamba_inner_size * model.config.ssm_state_size
    monkeypatch.setattr(decode, "STATE_BLOCK", 2 * heads * 4 + 1)
    check(model)


@pytest.mark.skipif(not HAS_ONEDNN, reason="this build of torch has no oneDNN")
@pytest.mark.parametrize(("size", "weights"), [(0, 1 << 60), (1 << 60, 0)], ids=["large-batch", "large-weights"])
def test_decode_through_onednn(
    make_model: Callable[..., NemotronH], monkeypatch: pytest.MonkeyPatch, size: int, weights: int
) -> None:
    monkeypatch.setattr(linear, "MKL_IS_FASTER", False)
    monkeypatch.setattr(decode, "ONEDNN_SIZE", size)
    monkeypatch.setattr(decode, "ONEDNN_WEIGHTS", weights)
    used: list[int] = []
    plain = decode.matmul_nt
    monkeypatch.setattr(decode, "matmul_nt", lambda x, weight: (used.append(len(x)), plain(x, weight))[1])
    check(make_model("MEM*E-"), lengths=[3] * 16)
    assert set(used) == {16}
    used.clear()
    check(make_model("MEM*E-"))
    assert set(used) == (set() if weights else {len(PROMPTS)})  # five rows: only the size of the weights can ask for it


def test_decode_under_autocast(make_model: Callable[..., NemotronH]) -> None:
    """Weights in bf16, states, norms and attention in fp32: within what bf16 rounds of a whole pass under autocast."""
    model = make_model("MEM*E-")
    ids = torch.randint(61, (4, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole = model(ids).logits
        logits, cache = prefill(model, ids[:, :5], torch.ones(4, 5, dtype=torch.bool), 9)
        for t in range(5, 9):
            logits = step(model, ids[:, t], cache)
            error = (logits - whole[:, t]).float().norm() / whole[:, t].float().norm()
            assert error < 0.03, t
    mamba, attention = cache.layers[0], cache.layers[3]
    assert mamba.ssm.dtype == attention.k.dtype == torch.float32
    with torch.no_grad():
        exact = model(ids).logits[:, -1]
    assert 1e-4 < (logits - exact).norm() / exact.norm() < 0.1  # it was bf16


def test_a_new_prefill_sees_new_weights(make_model: Callable[..., NemotronH]) -> None:
    """Steps prepare the weights once a generation; nothing of it may outlive the generation."""
    model = make_model("M*E")
    check(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    check(model)


@pytest.mark.parametrize("dt_bias", [-20.0, -9.0, 3.0, 20.0])
def test_decode_agrees_for_step_sizes_of_any_size(make_model: Callable[..., NemotronH], dt_bias: float) -> None:
    """Where the step size is clamped in one path only, decoding drifts away from training."""
    model = make_model("MEM")
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            torch.nn.init.constant_(parameter, dt_bias)
    check(model, tolerance=2e-5)


def test_rows_can_be_dropped_and_copied(make_model: Callable[..., NemotronH]) -> None:
    model = make_model("MEM*EME-")
    ids = torch.randint(61, (3, 9), generator=torch.Generator().manual_seed(1))
    is_token = torch.ones(3, 9, dtype=torch.bool)
    is_token[0, :4] = False

    def after(rows: list[int]) -> Tensor:
        _, cache = prefill(model, ids, is_token, 11)
        cache.keep_rows(torch.tensor(rows))
        step(model, torch.tensor([rows[i] + 7 for i in range(len(rows))]), cache)
        return step(model, torch.tensor([rows[i] + 20 for i in range(len(rows))]), cache)

    with torch.no_grad():
        every = after([0, 1, 2])
        torch.testing.assert_close(after([2, 0]), every[[2, 0]], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(after([1, 1, 0, 0]), every[[1, 1, 0, 0]], atol=1e-6, rtol=1e-5)
