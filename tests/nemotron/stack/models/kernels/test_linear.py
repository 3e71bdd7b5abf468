"""Matmuls through oneDNN equal PyTorch's own, gradients included, and are only chosen where shapes stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nemotron.stack.models.kernels import linear as module
from nemotron.stack.models.kernels.linear import HAS_ONEDNN, matmul_nt

needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def onednn_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MKL_IS_FASTER", False)


def random(*shape: int, seed: int = 0, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


@needs_onednn
@pytest.mark.parametrize(("rows", "inner", "outer"), [(256, 24, 40), (256, 40, 24), (320, 128, 8), (512, 1, 1)])
def test_forward_and_gradients_equal_those_of_pytorch(rows: int, inner: int, outer: int) -> None:
    x, weight = random(4, rows // 4, inner, grad=True), random(outer, inner, seed=1, grad=True)
    upstream = random(4, rows // 4, outer, seed=2)
    out, expected = module.linear(x, weight), F.linear(x, weight)
    assert type(out.grad_fn).__name__ == "OneDnnLinearBackward" and out._base is None  # a view would upset FSDP2
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for actual, reference in zip(
        torch.autograd.grad(out, (x, weight), upstream),
        torch.autograd.grad(expected, (x, weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-4)


@needs_onednn
def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    x, weight = random(256, 8, grad=True), random(4, 8, seed=1)
    (dx,) = torch.autograd.grad(module.linear(x, weight).sum(), x)
    torch.testing.assert_close(dx, weight.sum(0).expand(256, 8))
    out = module.linear(x.detach(), weight.requires_grad_())
    (dw,) = torch.autograd.grad(out.sum(), weight)
    torch.testing.assert_close(dw, x.detach().sum(0).expand(4, 8), rtol=1e-4, atol=1e-4)


@needs_onednn
@pytest.mark.parametrize("transposed", ["neither", "left", "right", "both"])
@pytest.mark.parametrize(("m", "n"), [(6, 96), (96, 6)])
def test_either_factor_may_be_a_transposed_view(transposed: str, m: int, n: int) -> None:
    a, b = random(m, 64), random(n, 64, seed=1)
    left = a.T.contiguous().T if transposed in ("left", "both") else a
    right = b.T.contiguous().T if transposed in ("right", "both") else b
    torch.testing.assert_close(matmul_nt(left, right), a @ b.T, rtol=1e-5, atol=1e-5)
    out = torch.empty(m, n)
    assert matmul_nt(left, right, out) is out
    torch.testing.assert_close(out, a @ b.T, rtol=1e-5, atol=1e-5)


def test_on_intel_every_shape_is_mkls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MKL_IS_FASTER", True)
    x, weight = random(256, 8, grad=True), random(4, 8)
    out = module.linear(x, weight)
    assert type(out.grad_fn).__name__ != "OneDnnLinearBackward"
    assert torch.equal(out, F.linear(x, weight))


@pytest.mark.parametrize(
    ("rows", "dtype", "autocast"),
    [(257, torch.float32, False), (64, torch.float32, False), (256, torch.float64, False), (256, torch.float32, True)],
    ids=["a shape that will not come again", "few rows", "float64", "autocast"],
)
def test_pytorch_keeps_what_does_not_suit(rows: int, dtype: torch.dtype, autocast: bool) -> None:
    x, weight = random(rows, 8, grad=True).to(dtype), random(4, 8).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = module.linear(x, weight)
        assert type(out.grad_fn).__name__ != "OneDnnLinearBackward"
        assert torch.equal(out, F.linear(x, weight))
