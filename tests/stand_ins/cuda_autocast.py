"""Autocast as a CUDA GPU has it, on a CPU, whose own leaves all but products in the dtype that they come in.

It shows operations that suddenly return fp32, and what they are then mixed with. It does not show arithmetic, nor the
operations that bring their operands to one dtype there (`addcmul`, `index_put`, `scatter_add`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE of ATen/autocast_mode.h; `square` is `pow` there.
NAMES = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ square softplus
    layer_norm rms_norm group_norm norm cosine_similarity nll_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    binary_cross_entropy_with_logits cross_entropy dist cdist renorm logsumexp prod softmax log_softmax cumprod cumsum
    linalg_vector_norm vector_norm matrix_norm sum
"""
FP32 = frozenset(NAMES.split())


class CudaAutocast(TorchFunctionMode):
    """Inside `torch.autocast("cpu", torch.bfloat16)` those operations compute in fp32, as on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in FP32 and torch.is_autocast_enabled("cpu"):
            args = tuple(_fp32(value) for value in args)
            kwargs = {key: _fp32(value) for key, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _fp32(value: Any) -> Any:
    is_bf16 = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.float() if is_bf16 else value
