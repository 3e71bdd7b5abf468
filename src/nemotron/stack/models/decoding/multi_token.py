"""Several further tokens a row in one pass, of which only some may be kept: how speculative decoding verifies.

Keys and values are written behind a row's last token, where the next pass overwrites those that were rejected. The
states of `M` blocks sum over all tokens, so they are updated only once it is known how many tokens are kept.

Shapes: B batch, L prompt length, T tokens read at once, D hidden, S key slots. Mamba-2: H heads, P head_dim, G groups,
h = H / G, N state size, K conv width, c conv channels. Attention: A query heads, J key/value heads, X head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.stack.models.attention import Attention, AttentionCache, packing_mask
from nemotron.stack.models.block import Block
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.decoding.cache import Cache
from nemotron.stack.models.layers import at_least_fp32
from nemotron.stack.models.mamba2 import Mamba2, MambaCache
from nemotron.stack.models.moe import MoE


class CachedStack:
    """Residual blocks with their cache: the trunk, or the multi-token prediction block. Each row has its own length."""

    def __init__(self, blocks: Sequence[Block], config: NemotronHConfig, is_token_BL: Tensor, capacity: int) -> None:
        """`config.hybrid_override_pattern` is that of the blocks; `is_token_BL`: the tokens of left-padded prompts."""
        weight = next(blocks[0].parameters())
        self.blocks = blocks
        self.prompt_mask_BL = is_token_BL
        self.states = Cache.allocate(config, len(is_token_BL), capacity, weight.dtype, weight.device).layers
        self.length_B = torch.zeros(len(is_token_BL), dtype=torch.int64, device=weight.device)
        self.pending: list[PendingTokens | None] = []

    def read(self, x_BLD: Tensor) -> Tensor:
        """The prompts, embedded: [B, L, D] -> [B, L, D]. Padding is a document of its own."""
        seq_idx_BL = self.prompt_mask_BL.long()
        mask = packing_mask(seq_idx_BL)
        for block, state in zip(self.blocks, self.states, strict=True):
            x_BLD, _ = block(x_BLD, seq_idx_BL, mask, state)
        self.length_B = self.length_B + x_BLD.shape[1]
        return x_BLD

    def extend(self, x_BTD: Tensor) -> Tensor:
        """T further tokens a row, [B, T, D] -> [B, T, D]. Only those that `accept` names are kept."""
        num_tokens, width = x_BTD.shape[1], self.prompt_mask_BL.shape[1]
        slots_BT = self.length_B.unsqueeze(1) + torch.arange(num_tokens, device=x_BTD.device)
        num_slots = int(self.length_B.max()) + num_tokens
        seen_BTS = torch.arange(num_slots, device=x_BTD.device) <= slots_BT.unsqueeze(-1)
        seen_BTS[:, :, :width] &= self.prompt_mask_BL.unsqueeze(1)
        self.pending = []
        for block, state in zip(self.blocks, self.states, strict=True):
            normed, mixer, pending = block.norm(x_BTD), block.mixer, None
            if isinstance(mixer, Mamba2) and isinstance(state, MambaCache):
                out, pending = extend_mamba2(mixer, normed, state)
            elif isinstance(mixer, Attention) and isinstance(state, AttentionCache):
                out = extend_attention(mixer, normed, seen_BTS.unsqueeze(1), state, slots_BT)
            elif isinstance(mixer, MoE):
                out, _ = mixer(normed)
            else:
                out = mixer(normed)
            x_BTD = x_BTD + out
            self.pending.append(pending)
        return x_BTD

    def accept(self, count_B: Tensor) -> None:
        """The first `count` tokens (int64 [B], 0 .. T) of the last `extend` are kept; other slots are reused."""
        for pending, state in zip(self.pending, self.states, strict=True):
            if pending is not None and isinstance(state, MambaCache):
                pending.accept(state, count_B)
        self.length_B = self.length_B + count_B

    def fork(self) -> CachedStack:
        """A copy to draft with, then discarded. Both may write slots behind a row's length; states are copied."""
        ahead = copy(self)
        ahead.states = [state.clone() if isinstance(state, MambaCache) else state for state in self.states]
        return ahead

    def keep_rows(self, rows: Tensor) -> None:
        """Drop every row but `rows` (int64 [B'])."""
        self.prompt_mask_BL, self.length_B = self.prompt_mask_BL[rows], self.length_B[rows]
        for state in self.states:
            if state is not None:
                state.keep_rows(rows)


def extend_attention(
    mixer: Attention, x_BTD: Tensor, attention_mask: Tensor, cache: AttentionCache, slots_BT: Tensor
) -> Tensor:
    """T further tokens a row at once, rows of different lengths: [B, T, D] -> [B, T, D].

    Args:
        x_BTD: [B, T, D].
        attention_mask: bool [B, 1, T, S] over the first S slots, True where a query may look.
        cache: receives keys and values before it is read.
        slots_BT: int64 [B, T], where each row writes.
    """
    q_BATX = mixer.q_proj(x_BTD).unflatten(-1, (mixer.num_heads, mixer.head_dim)).transpose(1, 2)
    rows_B1 = torch.arange(len(slots_BT), device=slots_BT.device).unsqueeze(1)
    for cached_BJSX, projection in ((cache.k, mixer.k_proj), (cache.v, mixer.v_proj)):
        new_BTJX = projection(x_BTD).unflatten(-1, (mixer.num_kv_heads, mixer.head_dim))
        cached_BJSX[rows_B1, :, slots_BT] = new_BTJX.to(cached_BJSX.dtype)  # autocast may have lowered it
    num_slots = attention_mask.shape[-1]
    out_BATX = F.scaled_dot_product_attention(
        q_BATX, cache.k[:, :, :num_slots], cache.v[:, :, :num_slots], attn_mask=attention_mask, enable_gqa=True
    )
    out_BTD: Tensor = mixer.o_proj(out_BATX.transpose(1, 2).flatten(-2))
    return out_BTD


def extend_mamba2(mixer: Mamba2, x_BTD: Tensor, cache: MambaCache) -> tuple[Tensor, PendingTokens]:
    """T further tokens a row at once, [B, T, D] -> [B, T, D], of which only some may be kept.

    The cache is read, not changed: `PendingTokens.accept` advances its states by the tokens that are kept. One chunk
    of the scan, with a state before it: y_i = exp(c_i) C_i h + sum_(j <= i) exp(c_i - c_j) (C_i B_j) dt_j x_j.
    """
    z_BTI, xBC_BTc, dt_BTH = mixer.project(x_BTD)
    inputs_BSc = torch.cat([*(x_Bc.unsqueeze(1) for x_Bc in cache.conv), xBC_BTc], dim=1)
    windows_BTcK = inputs_BSc.unfold(1, mixer.conv1d.weight.shape[-1], 1)
    xBC_BTc = F.silu((windows_BTcK * mixer.conv1d.weight.squeeze(1)).sum(-1) + mixer.conv1d.bias)
    x_BTHP, B_BTGN, C_BTGN = mixer.split(xBC_BTc)
    with torch.autocast(x_BTD.device.type, enabled=False):  # as in the scan
        heads = (mixer.num_groups, mixer.num_heads // mixer.num_groups)  # H = G h: heads of a group share B and C
        B_BGTN, C_BGTN = (at_least_fp32(t).transpose(1, 2) for t in (B_BTGN, C_BTGN))
        dtx_BGhTP = (at_least_fp32(x_BTHP) * dt_BTH.unsqueeze(-1)).unflatten(2, heads).permute(0, 2, 3, 1, 4)
        c_BTH = (dt_BTH * -torch.exp(at_least_fp32(mixer.A_log))).cumsum(1)
        c_BGhT = c_BTH.transpose(1, 2).unflatten(1, heads)
        future_TT = torch.ones(x_BTD.shape[1], x_BTD.shape[1], dtype=torch.bool, device=x_BTD.device).triu(1)
        decay_BGhTT = (c_BGhT.unsqueeze(-1) - c_BGhT.unsqueeze(-2)).masked_fill_(future_TT, float("-inf")).exp_()
        among_BGhTP = (decay_BGhTT * (C_BGTN @ B_BGTN.transpose(-1, -2)).unsqueeze(2)) @ dtx_BGhTP
        from_state_BGhTP = (C_BGTN @ cache.ssm).unflatten(-1, (-1, mixer.head_dim)).transpose(2, 3)
        y_BGhTP = torch.addcmul(among_BGhTP, from_state_BGhTP, c_BGhT.exp().unsqueeze(-1))
    y_BTHP = y_BGhTP.permute(0, 3, 1, 2, 4).flatten(2, 3).to(x_BTHP.dtype) + mixer.D.unsqueeze(-1) * x_BTHP
    out_BTD: Tensor = mixer.out_proj(mixer.norm(y_BTHP.flatten(-2), z_BTI))
    return out_BTD, PendingTokens(inputs_BSc, c_BGhT, dtx_BGhTP, B_BGTN)


@dataclass
class PendingTokens:
    """T tokens that `extend_mamba2` has read but not yet written into the states.

    inputs: of the convolution, the cached ones first [B, K-1+T, c]. c: log-decay up to and with each token
    [B, G, h, T]. dtx: dt x [B, G, h, T, P]. B: [B, G, T, N]. H = G h.
    """

    inputs: Tensor
    c: Tensor
    dtx: Tensor
    B: Tensor

    def accept(self, cache: MambaCache, counts_B: Tensor) -> None:
        """Advance the states by the first `counts` tokens of each row (int64 [B], 0 .. T) and forget the others.

        h = exp(c_n) h + sum_(j <= n) exp(c_n - c_j) dt_j x_j B_j^T for the last accepted token n: the state is written
        once, whatever the number of tokens.
        """
        row_B = torch.arange(len(counts_B), device=counts_B.device)
        cache.conv = [self.inputs[row_B, counts_B + i] for i in range(len(cache.conv))]
        count_B111 = counts_B.view(-1, 1, 1, 1)
        last_BGh1 = F.pad(self.c, (1, 0)).take_along_dim(count_B111, dim=-1)  # no token, no decay
        rejected_B11T = torch.arange(self.c.shape[-1], device=counts_B.device) >= count_B111
        to_last_BGhT = (last_BGh1 - self.c).masked_fill_(rejected_B11T, float("-inf")).exp_()
        added_BGNi = self.B.transpose(-1, -2) @ (self.dtx * to_last_BGhT.unsqueeze(-1)).transpose(2, 3).flatten(3)
        decay_BG1i = last_BGh1.exp().expand(-1, -1, -1, self.dtx.shape[-1]).flatten(2).unsqueeze(2)
        cache.ssm.mul_(decay_BG1i).add_(added_BGNi)
