"""`*`: causal grouped-query attention without any positional embedding (Mamba layers carry the order).

Next: `mamba2.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.kernels.linear import Linear

# Shapes: B batch, L length, D hidden, A query heads, J key/value heads, X head_dim.


@dataclass
class AttentionCache:
    """What decoding needs of the tokens so far: keys and values, [B, num_key_value_heads, capacity, head_dim].

    They are kept in the dtype in which they are read at every step, `attention_dtype`.
    """

    k: Tensor
    v: Tensor

    def keep_rows(self, rows: Tensor) -> None:
        """Drop every row but `rows` (int64 [B'])."""
        self.k, self.v = self.k.index_select(0, rows), self.v.index_select(0, rows)


class Attention(nn.Module):
    """Softmax(q k^T / sqrt(head_dim)) v, q heads share k/v heads in groups of A / J."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, q_size)
        self.k_proj = Linear(config.hidden_size, kv_size)
        self.v_proj = Linear(config.hidden_size, kv_size)
        self.o_proj = Linear(q_size, config.hidden_size)

    def forward(
        self, x_BLD: Tensor, attention_mask: Tensor | None = None, cache: AttentionCache | None = None
    ) -> Tensor:
        """Whole sequences: training, and prefill when a cache is given.

        Args:
            x_BLD: [B, L, D].
            attention_mask: bool [B, 1, L, L], True where a query may look; None means plain causal.
            cache: its first L slots receive keys and values.
        """
        q_BALX = self.q_proj(x_BLD).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        k_BJLX = self.k_proj(x_BLD).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        v_BJLX = self.v_proj(x_BLD).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        if cache is not None:
            cache.k[:, :, : x_BLD.shape[1]] = k_BJLX
            cache.v[:, :, : x_BLD.shape[1]] = v_BJLX
        out_BALX = attend(q_BALX, k_BJLX, v_BJLX, attention_mask)
        return self.o_proj(out_BALX.transpose(1, 2).flatten(-2))


def attention_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which attention to keys of `dtype` is computed. On a CPU bf16 becomes fp32.

    There PyTorch 2.13 takes up to twice as long in bf16 for one query a row, and three times as long for the gradient.
    """
    return torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype


def without_cudnn(device: torch.device) -> AbstractContextManager[None]:
    """Around attention: PyTorch would choose cuDNN's on an H200, which plans for 22 ms at each new number of keys.

    In decoding that is every token.
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def attend(q_BALX: Tensor, k_BJLX: Tensor, v_BJLX: Tensor, mask: Tensor | None) -> Tensor:
    """`scaled_dot_product_attention` [B, A, L, X], causal without a mask."""
    q, k, v = (t.to(attention_dtype(t.dtype, t.device)) for t in (q_BALX, k_BJLX, v_BJLX))
    shares_keys = not (k.device.type == "cuda" and (mask is not None or k.dtype == torch.float32))
    if not shares_keys:
        # FlashAttention takes no mask and no fp32. Memory-efficient attention takes both, but each query head needs
        # keys and values of its own. Without either kernel all scores would be in memory.
        copies = q.shape[1] // k.shape[1]
        k, v = (t.unsqueeze(2).expand(-1, -1, copies, -1, -1).flatten(1, 2) for t in (k, v))
    with torch.autocast("cpu", enabled=False), without_cudnn(k.device):
        out_BALX = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=shares_keys
        )
    return out_BALX.to(q_BALX.dtype)


def packing_mask(seq_idx_BL: Tensor, shared_prompt: bool = False) -> Tensor:
    """Causal mask that also keeps documents of a packed row apart: bool [B, 1, L, L] from document indices [B, L].

    With `shared_prompt` all documents see document 0.
    """
    seen_BLL = seq_idx_BL.unsqueeze(-1) == seq_idx_BL.unsqueeze(-2)
    if shared_prompt:
        seen_BLL |= (seq_idx_BL == 0).unsqueeze(-2)
    return seen_BLL.tril_().unsqueeze(1)
