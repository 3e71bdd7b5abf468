"""Reading on: rows whose pasts have different lengths read their next tokens in one pass, each from its own states.

What a block makes of a chunk is its forward pass behind a past. An attention block sees the keys that the row has. The
states of an `M` block before the chunk, h, add what the chunk reads of them to the scan from 0, and decay on the way:

    y_t += exp(l_1 + ... + l_t) C_t h          h' += exp(l_1 + ... + l_T) h          with l_t = dt_t A

Rows are padded on the right: no token sees what comes behind it, and dt = 0 there leaves the state alone.

Shapes: B rows, T tokens of the longest chunk, D hidden, S key slots. Mamba-2: H heads, P head_dim, G groups, i inner
width of a group, N state size, K conv width, c conv channels. Attention: A query heads, J key/value heads, X head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nemotron.stack.models.attention import Attention, AttentionCache, attend
from nemotron.stack.models.block import Block
from nemotron.stack.models.decoding.cache import Cache
from nemotron.stack.models.kernels.cuda import causal_conv_silu, scan_kernel
from nemotron.stack.models.kernels.linear import rounded
from nemotron.stack.models.layers import at_least_fp32
from nemotron.stack.models.mamba2 import Mamba2, MambaCache
from nemotron.stack.models.nemotron_h import NemotronH
from nemotron.stack.models.ssd import ssd_chunk_scan


def read_chunks(blocks: Sequence[Block], x_BTD: Tensor, caches: Sequence[Cache], counts: Sequence[int]) -> Tensor:
    """The next tokens of B rows through residual blocks: [B, T, D] -> [B, T, D].

    Args:
        blocks: in eval mode.
        caches: of one row each, with room for the chunk; they move on by it.
        counts: how many tokens each row has, 1 .. T; what stands behind them is padding, in and out.
    """
    for index, block in enumerate(blocks):
        mixer, states = block.mixer, [cache.layers[index] for cache in caches]
        if isinstance(mixer, Mamba2):
            mambas = [state for state in states if isinstance(state, MambaCache)]
            x_BTD = x_BTD + _read_mamba2(mixer, block.norm(x_BTD), mambas, counts)
        elif isinstance(mixer, Attention):
            attentions = [state for state in states if isinstance(state, AttentionCache)]
            starts = [cache.length for cache in caches]
            x_BTD = x_BTD + _read_attention(mixer, block.norm(x_BTD), attentions, starts, counts)
        else:
            x_BTD, _ = block(x_BTD)
    for cache, count in zip(caches, counts, strict=True):
        cache.length += count
    return x_BTD


def read_on(model: NemotronH, prompts: Sequence[Sequence[int]], states: list[Cache], room: int) -> tuple[Tensor, Cache]:
    """Read the rest of prompts: `states[i]`, of one row, has read `prompts[i]` but for at least its last token.

    States are taken out of their list: each goes when it has been copied.
    Returns logits of the last position [B, V] and the cache of all rows, with room for so many further tokens.
    """
    rests = [prompt[state.length :] for prompt, state in zip(prompts, states, strict=True)]
    counts, device = [len(rest) for rest in rests], model.lm_head.weight.device
    ids_BT = torch.zeros(len(rests), max(counts), dtype=torch.int64)
    for row, rest in enumerate(rests):
        ids_BT[row, : len(rest)] = torch.tensor(rest)
    rows = [states.pop(0).resized(len(prompt)) for prompt in prompts]
    x_BTD = read_chunks(model.blocks(), model.backbone.embeddings(ids_BT.to(device)), rows, counts)
    last_BD = x_BTD[torch.arange(len(rows), device=device), torch.tensor(counts, device=device) - 1]
    logits_BV: Tensor = model.lm_head(model.backbone.norm_f(last_BD))
    return logits_BV, Cache.of_rows(rows, max(map(len, prompts)) + room, device)


def _read_attention(
    mixer: Attention, x_BTD: Tensor, states: Sequence[AttentionCache], starts: Sequence[int], counts: Sequence[int]
) -> Tensor:
    """`*`: row by row, as each has another number of keys."""
    q_BATX = mixer.q_proj(x_BTD).unflatten(-1, (mixer.num_heads, mixer.head_dim)).transpose(1, 2)
    k_BJTX = mixer.k_proj(x_BTD).unflatten(-1, (mixer.num_kv_heads, mixer.head_dim)).transpose(1, 2)
    v_BJTX = mixer.v_proj(x_BTD).unflatten(-1, (mixer.num_kv_heads, mixer.head_dim)).transpose(1, 2)
    out_BATX = torch.zeros_like(q_BATX)
    for row, (state, start, count) in enumerate(zip(states, starts, counts, strict=True)):
        this, end, mask_TS = slice(row, row + 1), start + count, None
        state.k[:, :, start:end], state.v[:, :, start:end] = k_BJTX[this, :, :count], v_BJTX[this, :, :count]
        if start:
            mask_TS = torch.ones(count, end, dtype=torch.bool, device=x_BTD.device).tril(start)
        out_BATX[this, :, :count] = attend(q_BATX[this, :, :count], state.k[:, :, :end], state.v[:, :, :end], mask_TS)
    return mixer.o_proj(out_BATX.transpose(1, 2).flatten(-2))


def _read_mamba2(mixer: Mamba2, x_BTD: Tensor, states: Sequence[MambaCache], counts: Sequence[int]) -> Tensor:
    """`M`: the convolution over what stood before the chunk and the chunk, the scan from 0 and what h adds to it."""
    counts_B1 = torch.tensor(counts, device=x_BTD.device).unsqueeze(1)
    is_token_BT = torch.arange(x_BTD.shape[1], device=x_BTD.device) < counts_B1
    h_BGNi = torch.cat([state.ssm for state in states])
    z_BTI, xBC_BTc, dt_BTH = mixer.project(x_BTD)
    dt_BTH = dt_BTH * is_token_BT.unsqueeze(-1)
    width = len(states[0].conv)
    before = [
        torch.cat(inputs).unsqueeze(1).to(xBC_BTc.dtype) for inputs in zip(*(s.conv for s in states), strict=True)
    ]
    xBC_BSc = torch.cat([*before, xBC_BTc], dim=1)  # S = K - 1 + T
    conv_BTc = causal_conv_silu(xBC_BSc, mixer.conv1d.weight, mixer.conv1d.bias, None)[:, width:]
    x_BTHP, B_BTGN, C_BTGN = mixer.split(conv_BTc)
    with torch.autocast(x_BTD.device.type, enabled=False):  # the state sums over the whole past: fp32
        A_H = -torch.exp(at_least_fp32(mixer.A_log))
        scan = scan_kernel(x_BTHP) or ssd_chunk_scan
        y_BTHP, state_BHPN = scan(x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN, mixer.chunk_size, None)
        new_BGNi = state_BHPN.unflatten(1, (mixer.num_groups, -1)).permute(0, 1, 4, 2, 3).flatten(-2)
        decay_BTH = (dt_BTH * A_H).cumsum(1).exp()
        h_read_BTHP = (at_least_fp32(C_BTGN).transpose(1, 2) @ h_BGNi).transpose(1, 2).reshape(x_BTHP.shape)
        y_BTHP = y_BTHP + (h_read_BTHP * decay_BTH.unsqueeze(-1)).to(y_BTHP.dtype)
        decay_BG1i = (
            decay_BTH[:, -1].repeat_interleave(mixer.head_dim, dim=1).view(len(states), mixer.num_groups, 1, -1)
        )
        new_BGNi = rounded(new_BGNi + decay_BG1i * h_BGNi, mixer.round_state)
    rows_B1 = torch.arange(len(states), device=x_BTD.device).unsqueeze(1)
    last_BKc = xBC_BSc[rows_B1, counts_B1 + torch.arange(width, device=x_BTD.device)]
    for row, state in enumerate(states):  # copies, not views that keep those of the other rows alive
        state.conv = [inputs_1c.clone() for inputs_1c in last_BKc[row : row + 1].unbind(1)]
        state.ssm = new_BGNi[row : row + 1].clone()
    y_BTHP = y_BTHP + mixer.D.unsqueeze(-1) * x_BTHP
    return mixer.out_proj(mixer.norm(y_BTHP.flatten(-2), z_BTI))
