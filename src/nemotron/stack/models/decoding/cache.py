"""State of a model between decoding steps: keys and values of `*` blocks, conv and SSM states of `M` blocks.

Rows of a batch are left-padded to one length, so that all rows write their next key at the same slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.stack.models.attention import AttentionCache, attention_dtype
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.mamba2 import MambaCache

# Slots that a replayed step reads at least: it is recorded again whenever it needs twice as many.
MIN_WINDOW = 256


@dataclass
class Cache:
    """Cache of a whole model for a batch of B rows and up to `capacity` tokens a row (padding included).

    key_mask_BS: bool [B, capacity], False where a slot holds padding; None when no row is padded. step: what
    `steps.step` calls, prepared by its first call. slot_1: `length` as a tensor, int64, where steps are such as can be
    replayed (`replay.py`); else None.
    """

    layers: list[AttentionCache | MambaCache | None]
    key_mask_BS: Tensor | None = None
    length: int = 0
    step: Callable[[Tensor], Tensor] | None = None
    slot_1: Tensor | None = None

    @property
    def capacity(self) -> int | None:
        """Tokens a row that keys have room for; None without `*` blocks."""
        return next((layer.k.shape[2] for layer in self.layers if isinstance(layer, AttentionCache)), None)

    @property
    def window(self) -> int:
        """How many slots a replayed step reads: a power of two above `length`, or all."""
        window, capacity = max(MIN_WINDOW, 1 << self.length.bit_length()), self.capacity
        return window if capacity is None else min(window, capacity)

    def tensors(self) -> Iterator[Tensor]:
        """All that a step reads and writes, but the weights."""
        for layer in self.layers:
            if isinstance(layer, AttentionCache):
                yield from (layer.k, layer.v)
            elif isinstance(layer, MambaCache):
                yield from (*layer.conv, layer.ssm)
        if self.key_mask_BS is not None:
            yield self.key_mask_BS
        if self.slot_1 is not None:
            yield self.slot_1

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

    def row(self, row: int, padding: int) -> Cache:
        """A copy of what one row has read, without the `padding` slots before it."""
        this, layers = slice(row, row + 1), list[AttentionCache | MambaCache | None]()
        for layer in self.layers:
            if isinstance(layer, AttentionCache):
                k, v = (t[this, :, padding : self.length].clone() for t in (layer.k, layer.v))
                layers.append(AttentionCache(k, v))
            elif isinstance(layer, MambaCache):
                layers.append(MambaCache([inputs[this].clone() for inputs in layer.conv], layer.ssm[this].clone()))
            else:
                layers.append(None)
        return Cache(layers, length=self.length - padding)

    @classmethod
    def of_rows(cls, rows: Sequence[Cache], capacity: int, device: torch.device) -> Cache:
        """One batch of rows that have read unequally much, left-padded, with room for `capacity` tokens each."""
        length = max(row.length for row in rows)
        layers: list[AttentionCache | MambaCache | None] = []
        for states in zip(*(row.layers for row in rows), strict=True):
            attentions = [state for state in states if isinstance(state, AttentionCache)]
            mambas = [state for state in states if isinstance(state, MambaCache)]
            if attentions:
                _, num_heads, _, head_dim = attentions[0].k.shape
                k, v = (attentions[0].k.new_zeros(len(rows), num_heads, capacity, head_dim) for _ in range(2))
                for index, (row, state) in enumerate(zip(rows, attentions, strict=True)):
                    k[index, :, length - row.length : length] = state.k[0, :, : row.length]
                    v[index, :, length - row.length : length] = state.v[0, :, : row.length]
                layers.append(AttentionCache(k, v))
            elif mambas:
                conv = [torch.cat(inputs) for inputs in zip(*(state.conv for state in mambas), strict=True)]
                layers.append(MambaCache(conv, torch.cat([state.ssm for state in mambas])))
            else:
                layers.append(None)
        cache = cls(layers, length=length)
        if any(row.length < length for row in rows):
            padding_B1 = torch.tensor([[length - row.length] for row in rows], device=device)
            cache.key_mask_BS = torch.arange(capacity, device=device) >= padding_B1
        return cache

    def keep_rows(self, rows: Tensor) -> None:
        """Drop every row but `rows` (int64 [B']): finished sequences stop costing compute."""
        if self.key_mask_BS is not None:
            self.key_mask_BS = self.key_mask_BS[rows]
        for layer in self.layers:
            if layer is not None:
                layer.keep_rows(rows)
