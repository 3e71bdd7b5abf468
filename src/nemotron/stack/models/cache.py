"""What a model remembers between decoding steps: keys and values of `*` blocks, conv and SSM states of `M` blocks.

Rows of a batch are left-padded to one length, so that all rows write their next key at the same slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemotron.stack.models.config import NemotronHConfig


@dataclass
class AttentionCache:
    """Keys and values of one `*` block, [B, num_key_value_heads, capacity, head_dim]; `length` slots are filled."""

    k: Tensor
    v: Tensor


@dataclass
class MambaCache:
    """States of one `M` block: `conv` the last conv_kernel - 1 inputs [B, K-1, conv], `ssm` fp32 [B, H, P, N]."""

    conv: Tensor
    ssm: Tensor


@dataclass
class Cache:
    """Cache of a whole model for a batch of B rows and up to `capacity` tokens a row (padding included)."""

    layers: list[AttentionCache | MambaCache | None]
    key_mask_BS: Tensor  # [B, capacity] True where a slot holds a real token
    length: int = field(default=0)

    @classmethod
    def allocate(
        cls, config: NemotronHConfig, batch_size: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> Cache:
        """Reserve the cache once, so that decoding writes in place and never grows a tensor."""
        layers: list[AttentionCache | MambaCache | None] = []
        for symbol in config.hybrid_override_pattern:
            if symbol == "*":
                shape = (batch_size, config.num_key_value_heads, capacity, config.head_dim)
                layers.append(
                    AttentionCache(
                        torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
                    )
                )
            elif symbol == "M":
                conv = torch.zeros(
                    batch_size, config.conv_kernel - 1, config.mamba_conv_size, dtype=dtype, device=device
                )
                shape = (batch_size, config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size)
                ssm = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
                layers.append(MambaCache(conv, ssm))
            else:
                layers.append(None)
        return cls(layers, torch.zeros(batch_size, capacity, dtype=torch.bool, device=device))

    def keep_rows(self, rows: Tensor) -> None:
        """Drop every row but `rows` (int64 [B']): finished sequences stop costing compute."""
        self.key_mask_BS = self.key_mask_BS[rows]
        for layer in self.layers:
            if isinstance(layer, AttentionCache):
                layer.k, layer.v = layer.k[rows], layer.v[rows]
            elif isinstance(layer, MambaCache):
                layer.conv, layer.ssm = layer.conv[rows], layer.ssm[rows]
