"""State of a model between decoding steps: keys and values of `*` blocks, conv and SSM states of `M` blocks.

Rows of a batch are left-padded to one length, so that all rows write their next key at the same slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.stack.models.attention import AttentionCache, attention_dtype
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.mamba2 import MambaCache


@dataclass
class Cache:
    """Cache of a whole model for a batch of B rows and up to `capacity` tokens a row (padding included).

    key_mask_BS: bool [B, capacity], False where a slot holds padding; None when no row is padded. step: what
    `steps.step` calls, prepared by its first call.
    """

    layers: list[AttentionCache | MambaCache | None]
    key_mask_BS: Tensor | None = None
    length: int = 0
    step: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def allocate(
        cls, config: NemotronHConfig, batch_size: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> Cache:
        """Reserve the cache once, so that decoding writes in place and never grows a tensor."""
        layers: list[AttentionCache | MambaCache | None] = []
        for symbol in config.hybrid_override_pattern:
            if symbol == "*":
                shape = (batch_size, config.num_key_value_heads, capacity, config.head_dim)
                k, v = (torch.zeros(shape, dtype=attention_dtype(dtype, device), device=device) for _ in range(2))
                layers.append(AttentionCache(k, v))
            elif symbol == "M":
                conv = [
                    torch.zeros(batch_size, config.mamba_conv_size, dtype=dtype, device=device)
                    for _ in range(config.conv_kernel - 1)
                ]
                shape = (batch_size, config.n_groups, config.ssm_state_size, config.mamba_inner_size // config.n_groups)
                ssm = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
                layers.append(MambaCache(conv, ssm))
            else:
                layers.append(None)
        return cls(layers)

    def resized(self, capacity: int) -> Cache:
        """A copy with room for so many tokens; no row may be padded, nor have read more."""
        layers: list[AttentionCache | MambaCache | None] = []
        for layer in self.layers:
            if isinstance(layer, AttentionCache):
                k, v = (F.pad(t[:, :, : self.length], (0, 0, 0, capacity - self.length)) for t in (layer.k, layer.v))
                layers.append(AttentionCache(k, v))
            else:
                layers.append(layer.clone() if isinstance(layer, MambaCache) else None)
        return Cache(layers, length=self.length)

    def keep_rows(self, rows: Tensor) -> None:
        """Drop every row but `rows` (int64 [B']): finished sequences stop costing compute."""
        if self.key_mask_BS is not None:
            self.key_mask_BS = self.key_mask_BS[rows]
        for layer in self.layers:
            if layer is not None:
                layer.keep_rows(rows)
