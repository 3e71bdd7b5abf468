"""The chunked scan against the recurrence it stands for, and the convolution against PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemotron.stack.models.kernels.conv import CausalConv
from nemotron.stack.models.ssd import ssd_chunk_scan


def scan_inputs(seed: int, length: int, heads: int = 4, groups: int = 2) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    dt = F.softplus(normal(2, length, heads) * 3 - 1)  # from about 1e-3 to 6: from no decay to all of it
    A = -torch.exp(normal(heads))
    return normal(2, length, heads, 3), dt, A, normal(2, length, groups, 5), normal(2, length, groups, 5)


def recurrence(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, seq_idx: Tensor | None) -> tuple[Tensor, Tensor]:
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T, y_t = h_t C_t, one token and one head at a time."""
    batch, length, heads, head_dim = x.shape
    per_group = heads // B.shape[2]
    y = torch.zeros_like(x)
    state = x.new_zeros(batch, heads, head_dim, B.shape[3])
    for b in range(batch):
        for h in range(heads):
            g = h // per_group
            for t in range(length):
                if seq_idx is not None and t and seq_idx[b, t] != seq_idx[b, t - 1]:
                    state[b, h] = 0
                state[b, h] = torch.exp(dt[b, t, h] * A[h]) * state[b, h]
                state[b, h] += dt[b, t, h] * torch.outer(x[b, t, h], B[b, t, g])
                y[b, t, h] = state[b, h] @ C[b, t, g]
    return y, state


def document_index(lengths: list[int], length: int) -> Tensor:
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return torch.cat([row, torch.full((length,), len(lengths))])[:length]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    length=st.integers(1, 20),
    chunk=st.integers(1, 24),
    layout=st.sampled_from([(4, 1), (4, 2), (4, 4), (3, 3), (1, 1)]),
    rows=st.none() | st.tuples(*[st.lists(st.integers(1, 9), min_size=1, max_size=6)] * 2),
)
def test_chunked_scan_is_the_recurrence(
    seed: int, length: int, chunk: int, layout: tuple[int, int], rows: tuple[list[int], list[int]] | None
) -> None:
    inputs = scan_inputs(seed, length, *layout)
    seq_idx = None if rows is None else torch.stack([document_index(row, length) for row in rows])
    y, state = ssd_chunk_scan(*inputs, chunk, seq_idx)
    y_expected, state_expected = recurrence(*inputs, seq_idx)
    torch.testing.assert_close(y, y_expected, atol=1e-12, rtol=1e-11)
    torch.testing.assert_close(state, state_expected, atol=1e-12, rtol=1e-11)


@pytest.mark.parametrize(("chunk", "packed"), [(1, True), (3, False), (3, True), (6, True)])
def test_scan_gradient(chunk: int, packed: bool) -> None:
    """Of y and of the last state, against finite differences."""
    inputs = [tensor.requires_grad_() for tensor in scan_inputs(1, 6)]
    seq_idx = torch.stack([document_index([4, 1], 6), document_index([2, 3], 6)]) if packed else None
    assert torch.autograd.gradcheck(lambda *tensors: ssd_chunk_scan(*tensors, chunk, seq_idx), inputs)


def test_scan_stays_finite_in_fp32_when_a_step_forgets_everything() -> None:
    """dt A of -500 a token: the decay underflows, and its logarithm adds up to -32,000."""
    x, _, _, B, C = (tensor.float() for tensor in scan_inputs(0, 64))
    dt = torch.full((2, 64, 4), 100.0, requires_grad=True)
    A = torch.full((4,), -5.0, requires_grad=True)
    y, _ = ssd_chunk_scan(x, dt, A, B, C, 64)
    scores = (B * C).sum(-1).repeat_interleave(2, dim=2)  # only the token itself is left: y_t = dt (B_t . C_t) x_t
    torch.testing.assert_close(y, 100 * scores.unsqueeze(-1) * x, rtol=1e-4, atol=1e-2)
    grad_dt, grad_A = torch.autograd.grad(y.sum(), (dt, A))
    expected = scores * x.sum(-1)
    torch.testing.assert_close(grad_dt, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
    assert not grad_A.any()


@pytest.mark.parametrize("shift", [-5.0, 0.0, 5.0])
def test_scan_gradients_in_fp32_equal_those_in_float64(shift: float) -> None:
    """Whether heads remember a hundred tokens or none: rates A from 1 to 64, step sizes around softplus(shift)."""
    source = torch.Generator().manual_seed(0)
    x, B, C, upstream = (torch.randn(1, 256, n, 8, generator=source) for n in (64, 8, 8, 64))
    dt, A = F.softplus(torch.randn(1, 256, 64, generator=source) + shift), -torch.arange(1.0, 65)
    grads = []
    for dtype in (torch.float32, torch.float64):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (x, dt, A, B, C)]
        grads.append(torch.autograd.grad(ssd_chunk_scan(*inputs, 128)[0], inputs, upstream.to(dtype)))
    for name, one, other in zip(("x", "dt", "A", "B", "C"), *grads, strict=True):
        # dt A sums up to 4e4 within a chunk at shift 5, where fp32 is 2e-3 apart: 1.02e-4 for A on an Intel Xeon.
        assert (one - other).norm() < 2e-4 * other.norm(), name


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 3, 11])
def test_convolution_is_conv1d(width: int, length: int) -> None:
    source = torch.Generator().manual_seed(width)
    x = torch.randn(2, length, 6, generator=source, dtype=torch.float64)
    weight = torch.randn(6, 1, width, generator=source, dtype=torch.float64)
    bias = torch.randn(6, generator=source, dtype=torch.float64)
    expected = F.conv1d(x.transpose(1, 2), weight, bias, padding=width - 1, groups=6)[..., :length].transpose(1, 2)
    torch.testing.assert_close(CausalConv.apply(x, weight, bias, None), expected)
    seq_idx = document_index([max(1, length // 2)], length).expand(2, -1)
    cut = int((seq_idx[0] == 0).sum())
    parts = [CausalConv.apply(part, weight, bias, None) for part in (x[:, :cut], x[:, cut:]) if part.shape[1]]
    torch.testing.assert_close(CausalConv.apply(x, weight, bias, seq_idx), torch.cat(parts, dim=1))


@pytest.mark.parametrize("width", [1, 3, 4])
@pytest.mark.parametrize("length", [2, 7])
@pytest.mark.parametrize("packed", [False, True])
def test_convolution_gradient(width: int, length: int, packed: bool) -> None:
    source = torch.Generator().manual_seed(width + length)
    x, weight, bias = (
        torch.randn(*shape, generator=source, dtype=torch.float64, requires_grad=True)
        for shape in ((2, length, 3), (3, 1, width), (3,))
    )
    seq_idx = torch.stack([document_index([1, 3], length), document_index([2], length)]) if packed else None
    assert torch.autograd.gradcheck(lambda *inputs: CausalConv.apply(*inputs, seq_idx), (x, weight, bias))
