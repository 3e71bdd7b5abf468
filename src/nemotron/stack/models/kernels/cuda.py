"""The two hot parts of a Mamba-2 block: CUDA kernels where they are installed, plain PyTorch elsewhere.

The kernels are those of the Mamba authors, `causal-conv1d` and `mamba-ssm`: optional, compiled for one version of torch
and CUDA, and not needed on a CPU. Both ways compute the same function.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.stack.models.kernels.conv import CausalConv


def causal_conv_silu(x_BLc: Tensor, weight_c1K: Tensor, bias_c: Tensor, seq_idx_BL: Tensor | None) -> Tensor:
    """silu of the causal depthwise convolution, [B, L, c] -> [B, L, c]; stops at document boundaries."""
    kernel, (channels, _, width) = _kernel("causal_conv1d", "causal_conv1d_fn", x_BLc), weight_c1K.shape
    if kernel is None or not 2 <= width <= 4 or channels % 8:  # what the kernel has
        return F.silu(CausalConv.apply(x_BLc, weight_c1K, bias_c, seq_idx_BL))
    if any(jump % 8 for jump in (x_BLc.stride(0), x_BLc.stride(1), x_BLc.storage_offset())):
        x_BLc = x_BLc.contiguous()  # it reads 8 channels at once; x is a slice, and a neighbour's width may be odd
    out: Tensor = kernel(  # in its channel-last layout, the only one that knows documents
        x_BLc.transpose(1, 2),
        weight_c1K.squeeze(1).to(x_BLc.dtype),
        bias_c.to(x_BLc.dtype),
        seq_idx=_int32(seq_idx_BL),
        activation="silu",
    )
    return out.transpose(1, 2)


def scan_kernel(x_BLHP: Tensor) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The scan with the arguments and results of `ssd_chunk_scan`; None where no kernel serves x."""
    kernel = _kernel("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", x_BLHP)
    if kernel is None:
        return None

    def scan(*arguments: Any) -> tuple[Tensor, Tensor]:
        *inputs, seq_idx_BL = arguments
        y_BLHP, state_BHPN = kernel(*inputs, seq_idx=_int32(seq_idx_BL), return_final_states=True)
        return y_BLHP, state_BHPN

    return scan


def _kernel(module: str, function: str, x: Tensor) -> Callable[..., Any] | None:
    """The kernel that may be used on `x`, None where it is not installed, or x is no CUDA tensor."""
    if _device_type(x) != "cuda" or x.dtype == torch.float64:
        return None
    return _imported(module, function)


def _device_type(x: Tensor) -> str:
    return x.device.type


@functools.cache
def _imported(module: str, function: str) -> Callable[..., Any] | None:
    try:
        kernel: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except ImportError:
        return None
    return kernel


def _int32(seq_idx_BL: Tensor | None) -> Tensor | None:
    return None if seq_idx_BL is None else seq_idx_BL.to(torch.int32).contiguous()
