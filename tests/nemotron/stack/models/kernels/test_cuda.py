"""The optional CUDA kernels: called as documented where they are installed, and equal to plain PyTorch."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.stack.models import NemotronH
from nemotron.stack.models.kernels import cuda as kernels
from nemotron.stack.models.ssd import ssd_chunk_scan


class Installed:
    """Stand-ins for both packages, with the parameters and layouts that their docstrings state."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def causal_conv1d_fn(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
        initial_states: Any = None, return_final_states: bool = False, final_states_out: Any = None,
        activation: str | None = None,
    ) -> Tensor:  # fmt: skip
        """x [batch, dim, seqlen], weight [dim, width], seq_idx int32 [batch, seqlen] with a channel-last x."""
        self.calls.append("conv")
        assert activation == "silu" and weight.dim() == 2 and x.shape[1] == len(weight)
        assert x.dtype == weight.dtype
        # What the CUDA source checks of the channel-last layout, and what reading 16 bytes at once needs.
        assert all(n % 8 == 0 for n in (x.shape[1], x.stride(0), x.stride(2), x.storage_offset())) and x.stride(1) == 1
        if seq_idx is not None:
            assert seq_idx.dtype == torch.int32 and seq_idx.shape == x[:, 0].shape and seq_idx.is_contiguous()
        width, out = weight.shape[1], torch.zeros_like(x)
        for shift in range(width):
            part = x[..., : x.shape[2] - shift]
            if seq_idx is not None:
                part = part * (seq_idx[:, shift:] == seq_idx[:, : x.shape[2] - shift]).unsqueeze(1)
            out = out + F.pad(part, (shift, 0)) * weight[:, width - 1 - shift, None]
        return F.silu(out + bias[:, None]) if bias is not None else F.silu(out)

    def mamba_chunk_scan_combined(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Any = None, z: Any = None,
        dt_bias: Any = None, initial_states: Any = None, seq_idx: Tensor | None = None, cu_seqlens: Any = None,
        dt_softplus: bool = False, dt_limit: Any = (0.0, float("inf")), return_final_states: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """x [batch, seqlen, nheads, headdim], dt [batch, seqlen, nheads], B and C [batch, seqlen, ngroups, dstate]."""
        self.calls.append("scan")
        assert return_final_states and not dt_softplus and D is z is dt_bias is initial_states is None
        assert seq_idx is None or seq_idx.dtype == torch.int32
        return ssd_chunk_scan(x, dt, A, B, C, 5, seq_idx)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    """Both packages importable, and the CPU taken for a CUDA device."""
    found = Installed()
    for name in (
        "causal_conv1d",
        "mamba_ssm",
        "mamba_ssm.ops",
        "mamba_ssm.ops.triton",
        "mamba_ssm.ops.triton.ssd_combined",
    ):
        module = types.ModuleType(name)
        module.causal_conv1d_fn = found.causal_conv1d_fn  # type: ignore[attr-defined]
        module.mamba_chunk_scan_combined = found.mamba_chunk_scan_combined  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    kernels._imported.cache_clear()
    monkeypatch.setattr(kernels, "_device_type", lambda x: "cuda")
    yield found
    kernels._imported.cache_clear()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads", [(8, 3), (4, 6), (4, 7)], ids=["aligned", "odd stride", "odd offset"])
def test_both_kernels_are_used_and_equal_plain_pytorch(
    make_model: Callable[..., NemotronH],
    installed: Installed,
    monkeypatch: pytest.MonkeyPatch,
    packed: bool,
    heads: tuple[int, int],
) -> None:
    sizes = {"mamba_num_heads": heads[0], "mamba_head_dim": heads[1], "ssm_state_size": 4 if heads[1] != 7 else 5}
    model = make_model("MM", **sizes)
    ids = torch.randint(61, (2, 21), generator=torch.Generator().manual_seed(0))
    seq_idx = torch.arange(21).div(6, rounding_mode="floor").expand(2, -1) if packed else None
    with_kernels = model(ids, seq_idx).logits
    assert installed.calls == ["conv", "scan"] * 2
    monkeypatch.setattr(kernels, "_kernel", lambda *_: None)
    plain = model(ids, seq_idx).logits
    assert len(installed.calls) == 4
    torch.testing.assert_close(with_kernels, plain, rtol=1e-4, atol=1e-5)


def test_shapes_without_a_kernel_and_float64_stay_plain(
    make_model: Callable[..., NemotronH], installed: Installed
) -> None:
    ids = torch.arange(9).unsqueeze(0)
    make_model("M", conv_kernel=5, ssm_state_size=4)(ids)
    assert installed.calls == ["scan"]
    model = make_model("M", ssm_state_size=5)
    assert model.config.mamba_conv_size % 8 == 4
    model(ids)
    assert installed.calls == ["scan"] * 2
    make_model("M", ssm_state_size=4, dtype=torch.float64)(ids)
    assert installed.calls == ["scan"] * 2


def test_nothing_is_imported_for_a_cpu(make_model: Callable[..., NemotronH], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_imported", lambda module, function: pytest.fail(f"imports {module}"))
    make_model("M")(torch.arange(9).unsqueeze(0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and `pytest -m gpu`")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_logits_and_gradients_are_those_of_the_cpu(
    make_model: Callable[..., NemotronH], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, packed: bool
) -> None:
    """With whatever kernels are installed there, and without them."""
    sizes = {"head_dim": 16, "mamba_head_dim": 16, "ssm_state_size": 16, "hidden_size": 64, "moe_intermediate_size": 16}
    model = make_model("MEM*EME-", **sizes)
    ids = torch.randint(61, (2, 48), generator=torch.Generator().manual_seed(0))
    seq_idx = torch.arange(48).div(20, rounding_mode="floor").expand(2, -1) if packed else None

    def loss_and_gradients(device: str, dtype: torch.dtype) -> tuple[float, Tensor]:
        model.to(device).zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = model(ids.to(device), None if seq_idx is None else seq_idx.to(device)).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten().to(device))
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None])

    loss, gradients = loss_and_gradients("cpu", torch.float32)
    loss_tolerance, gradient_tolerance = (1e-4, 1e-3) if dtype == torch.float32 else (0.02, 0.2)
    for are_used in (True, False):
        if not are_used:
            monkeypatch.setattr(kernels, "_kernel", lambda *_: None)
        found, found_gradients = loss_and_gradients("cuda", dtype)
        assert found == pytest.approx(loss, rel=loss_tolerance)
        assert (found_gradients - gradients).norm() < gradient_tolerance * gradients.norm()
