"""Blockwise FP8 training as published for Nemotron Nano 2 (arXiv 2508.14444) and DeepSeek-V3 (arXiv 2412.19437, 3.3).

All values are E4M3: sign, 4 exponent bits, 3 mantissa bits, largest value 448. Weights share an fp32 scale in blocks of
128x128, activations and gradients in tiles of 128 values along the dimension that a product sums over:

    y = x W^T       x in tiles along K      W in blocks
    dx = dy W       dy in tiles along N     W in blocks, the same values
    dW = dy^T x     dy and x in tiles along T

x and dy are thus rounded twice, each time from the value before FP8. Sums are fp32, weights and optimiser stay fp32.

Shapes: T tokens, K inputs, N outputs, [M, K] any matrix.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron.kit.schemas.architecture import fp8_layers
from nemotron.stack.models import NemotronH
from nemotron.stack.models.kernels.linear import Linear

E4M3_MAX = 448.0
WEIGHT_BLOCK = (128, 128)
ALONG_ROWS = (1, 128)  # a tile is 128 values of one row
ALONG_COLUMNS = (128, 1)  # a tile is 128 values of one column


def quantize(x_MK: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """E4M3 values [M, K] and fp32 scales [ceil(M / rows), ceil(K / columns)], one a block of `block` = (rows, columns).

    scale = max |x| of the block / 448, value = x / scale in fp32, rounded to the nearest E4M3 value, ties to even; what
    is below half of the smallest one, 2^-9, becomes 0. Where a dimension is no multiple of the block's, the last block
    is smaller.

    A block of zeros has scale 1 and stays zero. One whose scale would be 0 in fp32, max |x| of 2^-141.2 or less,
    becomes zero. A block with an infinite value or a NaN comes back from `dequantize` as NaN throughout: the loss then
    says so.
    """
    x_MK = x_MK.float()
    (num_rows, num_columns), (rows, columns) = x_MK.shape, block
    padded_MK = F.pad(x_MK.abs(), (0, -num_columns % columns, 0, -num_rows % rows))
    amax = padded_MK.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))
    scales = amax / E4M3_MAX
    scales = scales.masked_fill(scales == 0, 1.0)
    values_MK = x_MK / _spread(scales, block, x_MK)
    # A scale that is subnormal in fp32 can be too small by a third. The cast alone saturates in some versions only.
    return values_MK.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales


def dequantize(values_MK: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """value x scale in fp32 [M, K], from what `quantize` gives for the same block."""
    return values_MK.float() * _spread(scales, block, values_MK)


def round_to_fp8(x_MK: Tensor, block: tuple[int, int]) -> Tensor:
    """What is left of x in E4M3 with a scale a block, as fp32 [M, K]."""
    return dequantize(*quantize(x_MK, block), block)


def _spread(scales: Tensor, block: tuple[int, int], like_MK: Tensor) -> Tensor:
    """The scale of each value, [M, K]."""
    for dim, (count, size) in enumerate(zip(block, like_MK.shape, strict=True)):
        scales = scales.repeat_interleave(count, dim).narrow(dim, 0, size)
    return scales


class BlockwiseFp8(torch.autograd.Function):
    """y = x W^T with the three products of the module's docstring: [..., K] and [N, K] -> [..., N], in the dtype of x.

    The product of two E4M3 values is exact in fp32; value x scale is rounded to fp32 before it, by 2^-24 at most.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        x_TK = x.reshape(-1, x.shape[-1])
        left, right_NK = round_to_fp8(x_TK, ALONG_ROWS).view(x.shape), round_to_fp8(weight_NK, WEIGHT_BLOCK)
        return fp32_product(left, right_NK.T).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        dy_TN, x_TK = grads[0].reshape(-1, len(weight_NK)), x.reshape(-1, x.shape[-1])
        dx = dw_NK = None
        if ctx.needs_input_grad[0]:
            dx_TK = fp32_product(round_to_fp8(dy_TN, ALONG_ROWS), round_to_fp8(weight_NK, WEIGHT_BLOCK))
            dx = dx_TK.view(x.shape).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw_NK = fp32_product(round_to_fp8(dy_TN, ALONG_COLUMNS).T, round_to_fp8(x_TK, ALONG_COLUMNS))
            dw_NK = dw_NK.to(weight_NK.dtype)
        return dx, dw_NK


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """a b in fp32, under autocast, too, which would round the factors to bf16."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


class Fp8Linear(Linear):
    """`Linear` whose products are in FP8 wherever bf16 mixed precision is on (`torch.autocast`), and fp32 elsewhere.

    So validation in the training loop sees FP8, and whoever evaluates or publishes the model afterwards the fp32
    weights. The input is rounded to bf16 first, which is what flows between layers; the output is bf16.
    """

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if not torch.is_autocast_enabled(device):
            return super().forward(x)
        out: Tensor = BlockwiseFp8.apply(x.to(torch.get_autocast_dtype(device)), self.weight)
        return out


def train_in_fp8(
    model: NemotronH, num_layers_at_start_in_bf16: int | None = None, num_layers_at_end_in_bf16: int | None = None
) -> list[str]:
    """Replace the linear layers of all blocks but the first and last few by `Fp8Linear`, in place; returns their names.

    None: the first and last 4, as in Nano 2.

    These are in_proj and out_proj of `M`, q, k, v and o_proj of `*`, up and down_proj of `-`. Embedding, output head,
    multi-token prediction, norms, convolution and scan stay as they are, and so do parameters and their names:
    optimiser and checkpoints do not see the difference. Call it before the model is sharded.

    Raises:
        ValueError: the pattern has `E` blocks, or no block is left between the first and the last ones.
    """
    pattern = model.config.hybrid_override_pattern
    names = []
    for index in fp8_layers(pattern, num_layers_at_start_in_bf16, num_layers_at_end_in_bf16):
        mixer = model.blocks()[index].mixer
        for name, linear in list(mixer.named_children()):
            if isinstance(linear, Linear):
                with torch.device("meta"):  # no memory, and no random numbers drawn: it gets the weight that is there
                    replacement = Fp8Linear(linear.in_features, linear.out_features)
                replacement.weight = linear.weight
                setattr(mixer, name, replacement.train(linear.training))
                names.append(f"backbone.layers.{index}.mixer.{name}")
    return names
