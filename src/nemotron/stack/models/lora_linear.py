"""A linear layer with a low-rank adapter (Hu et al. 2021, LoRA): a frozen weight W is used as W + (alpha / dim) B A.

A begins random, B at zero, so that training begins at the frozen model. `training/lora.py` says which layers have one.

Shapes: N outputs, K inputs; W [N, K], A [dim, K], B [N, dim].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nemotron.stack.models.kernels.linear import Linear, linear
from nemotron.stack.models.layers import at_least_fp32


class LoraLinear(Linear):
    """A frozen linear layer with an adapter: x W^T + scale (x A^T) B^T. The weight keeps its name and its dtype."""

    def __init__(self, base: nn.Linear, dim: int, alpha: float) -> None:
        nn.Module.__init__(self)  # not Linear's, which would allocate the weight once more
        self.in_features, self.out_features = base.in_features, base.out_features
        self.register_parameter("bias", None)
        self.scale = alpha / dim
        self.weight = nn.Parameter(base.weight.detach(), requires_grad=False)
        device, dtype = base.weight.device, torch.promote_types(base.weight.dtype, torch.float32)
        self.lora_A = nn.Parameter(torch.empty(dim, self.in_features, device=device, dtype=dtype))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, dim, device=device, dtype=dtype))
        nn.init.xavier_normal_(self.lora_A)  # Megatron-Bridge's default, lora_A_init_method "xavier"

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast the parts have its dtype; without it frozen weights have that of the adapters.
        return linear(x, self.weight) + self.scale * linear(linear(x, self.lora_A), self.lora_B)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """W + scale B A [N, K], added in fp32 or wider and rounded to the dtype of W once."""
        delta = self.scale * (at_least_fp32(self.lora_B) @ at_least_fp32(self.lora_A))
        return (at_least_fp32(self.weight) + delta).to(self.weight.dtype)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The layers with adapters, by their dotted names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear))
