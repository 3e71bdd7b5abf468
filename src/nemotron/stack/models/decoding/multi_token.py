"""Several further tokens a row in one pass, of which only some may be kept: how speculative decoding works.

Tokens that were read are pending until `CachedStack.accept` says how many of each row stay. Keys and values are written
behind a row's last token, where the next pass overwrites those of tokens that were not kept. The states of `M` blocks
sum over all tokens, so the state after each pending token is held, and one of them becomes the row's. Where only one
token is read at once, it always stays, and the states change in place.

Rows can join and leave (`serving/batch.py`): `put` and `row` copy what one row has read in and out.

As in `steps.py`, weights are prepared once, and the number of operations is kept low: at small batches they are what a
pass costs. Everything between projections is the arithmetic of a single step.

Shapes: B batch, L prompt length, T tokens read at once, R = B T rows, D hidden, S key slots, Q most pending tokens.
Mamba-2: H heads, P head_dim, G groups, i inner width of a group, N state size, K conv width, c conv channels.
Attention: J key/value heads, a query heads that share one, X head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron.stack.models.attention import Attention, AttentionCache, attention_dtype, packing_mask, without_cudnn
from nemotron.stack.models.block import Block
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.decoding.cache import Cache
from nemotron.stack.models.decoding.few_choices import prepare_few_choices
from nemotron.stack.models.decoding.steps import (
    PreparedMamba2,
    Step,
    compute_dtype,
    explicit_dtypes,
    prepare_linear,
    prepare_mlp,
    prepare_moe,
    prepare_norm,
    prepare_qkv,
    recurrence,
)
from nemotron.stack.models.kernels.linear import rounded
from nemotron.stack.models.layers import MLP
from nemotron.stack.models.mamba2 import Mamba2, MambaCache
from nemotron.stack.models.moe import MoE


class CachedStack:
    """Residual blocks with their cache: the trunk, or the multi-token prediction block. Each row has its own length.

    lengths: tokens of each row that are settled, padding included. num_pending: tokens of each row that `extend` has
    read since the last `accept`.
    """

    window: Window

    def __init__(
        self, blocks: Sequence[Block], config: NemotronHConfig, is_token_BL: Tensor, capacity: int, most_pending: int
    ) -> None:
        """`config.hybrid_override_pattern` is that of the blocks; `is_token_BL`: the tokens of left-padded prompts.

        `read` comes next; without prompts (L = 0) `prepare`.
        """
        weight = next(blocks[0].parameters())
        self.blocks, self.most_pending = blocks, most_pending
        self.prompt_mask_BL = is_token_BL
        self.has_padding = not bool(is_token_BL.all())
        self.cache = Cache.allocate(config, len(is_token_BL), capacity, compute_dtype(weight), weight.device)
        self.lengths = [0] * len(is_token_BL)
        self.num_pending = 0
        self.pending_states: list[PendingStates] = []
        self.steps: list[tuple[Step, Step]] = []
        self.own_dtypes = explicit_dtypes(weight.device.type)
        self._see(capacity)

    def _see(self, capacity: int) -> None:
        """What T queries see of the slots up to the last of them, as what is added to their scores: the columns that
        end at capacity + T."""
        weight, most_pending = next(self.blocks[0].parameters()), self.most_pending
        seen_QS = torch.ones(most_pending, capacity + most_pending, dtype=torch.bool, device=weight.device)
        self.scores_QS = torch.zeros_like(seen_QS, dtype=attention_dtype(compute_dtype(weight), weight.device))
        self.scores_QS.masked_fill_(~seen_QS.tril(capacity), float("-inf"))

    def read(self, x_BLD: Tensor) -> Tensor:
        """The prompts, embedded: [B, L, D] -> [B, L, D]. Padding is a document of its own."""
        seq_idx_BL = self.prompt_mask_BL.long() if self.has_padding else None
        mask = None if seq_idx_BL is None else packing_mask(seq_idx_BL)
        for block, state in zip(self.blocks, self.cache.layers, strict=True):
            x_BLD, _ = block(x_BLD, seq_idx_BL, mask, state)
        self.lengths = [length + x_BLD.shape[1] for length in self.lengths]
        self.prepare()
        return x_BLD

    def prepare(self) -> None:
        """Get ready to `extend` rows by what the weights are now."""
        for block, state in zip(self.blocks, self.cache.layers, strict=True):
            self.steps.append((prepare_norm(block.norm.weight, block.norm.eps), self._prepare(block.mixer, state)))
        # The states of `M` blocks are held elsewhere now.
        self.cache.layers = [state if isinstance(state, AttentionCache) else None for state in self.cache.layers]

    def _prepare(self, mixer: torch.nn.Module, state: AttentionCache | MambaCache | None) -> Step:
        if isinstance(mixer, Mamba2) and isinstance(state, MambaCache):
            self.pending_states.append(PendingStates.behind(state, mixer.conv_size, self.most_pending))
            return prepare_mamba2(mixer, self.pending_states[-1], self)
        if isinstance(mixer, Attention) and isinstance(state, AttentionCache):
            return prepare_attention(mixer, state, self)
        if isinstance(mixer, MoE):
            return prepare_moe(mixer, prepare_few_choices(mixer.experts))
        assert isinstance(mixer, MLP)
        return prepare_mlp(mixer)

    def extend(self, x_BTD: Tensor) -> Tensor:
        """T further tokens a row, [B, T, D] -> [B, T, D], behind those that are pending; they are pending, too."""
        self.window = self._window(x_BTD.shape[1])
        x_RD = x_BTD.flatten(0, 1)
        with self.own_dtypes:
            for norm, mixer in self.steps:
                x_RD = x_RD + mixer(norm(x_RD))
        self.num_pending += x_BTD.shape[1]
        return x_RD.view(x_BTD.shape)

    def accept(self, counts: Sequence[int]) -> None:
        """The first `counts` (0 .. `num_pending`) of each row's pending tokens are settled, the others forgotten."""
        is_same = len(set(counts)) == 1
        kept = counts[0] if is_same else torch.tensor(counts, device=self.prompt_mask_BL.device)
        for states in self.pending_states:
            states.accept(kept)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.num_pending = 0

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop every row but `rows`. No token may be pending."""
        rows_B = torch.tensor(rows, device=self.prompt_mask_BL.device)
        self.prompt_mask_BL = self.prompt_mask_BL[rows_B]
        self.lengths = [self.lengths[row] for row in rows]
        for state in self.cache.layers:
            if isinstance(state, AttentionCache):
                state.keep_rows(rows_B)
        for states in self.pending_states:
            states.keep_rows(rows_B)

    @property
    def capacity(self) -> int:
        """Tokens that a row has room for."""
        return self.scores_QS.shape[1] - self.most_pending

    def resize(self, capacity: int) -> None:
        """Make room for so many tokens a row, or give room back."""
        for state in self.cache.layers:
            if isinstance(state, AttentionCache):
                more = (0, 0, 0, capacity - state.k.shape[2])
                state.k, state.v = F.pad(state.k, more), F.pad(state.v, more)
        self._see(capacity)

    def put(self, row: int, cache: Cache) -> None:
        """Row number `row` has now read what `cache` has, which is of one row. No token may be pending."""
        pending = iter(self.pending_states)
        for state, new in zip(self.cache.layers, cache.layers, strict=True):
            if isinstance(new, MambaCache):
                next(pending).put(row, new)
            elif isinstance(state, AttentionCache) and isinstance(new, AttentionCache):
                for cached_BJSX, new_1JSX in ((state.k, new.k), (state.v, new.v)):
                    # What is not seen is multiplied by 0: who was here before may not leave anything infinite.
                    cached_BJSX[row, :, cache.length :] = 0
                    cached_BJSX[row, :, : cache.length] = new_1JSX[0, :, : cache.length]
        self.lengths[row] = cache.length

    def row(self, row: int) -> Cache:
        """A copy of what row number `row` has read. No token may be pending."""
        pending, length = iter(self.pending_states), self.lengths[row]
        layers: list[AttentionCache | MambaCache | None] = []
        for block, state in zip(self.blocks, self.cache.layers, strict=True):
            if isinstance(state, AttentionCache):
                k_1JSX, v_1JSX = (cached[row : row + 1, :, :length].clone() for cached in (state.k, state.v))
                layers.append(AttentionCache(k_1JSX, v_1JSX))
            else:
                layers.append(next(pending).row(row) if isinstance(block.mixer, Mamba2) else None)
        return Cache(layers, length=length)

    def _window(self, num_tokens: int) -> Window:
        """Where the next T tokens of each row go, and what they see."""
        start, device = self.lengths[0] + self.num_pending, self.prompt_mask_BL.device
        if not self.has_padding and self.lengths.count(self.lengths[0]) == len(self.lengths):
            end = start + num_tokens
            scores_TS = self.scores_QS[:num_tokens, self.capacity - start : self.capacity + num_tokens]
            return Window(num_tokens, end, slice(start, end), None if num_tokens == 1 else scores_TS)
        tokens_T = torch.arange(self.num_pending, self.num_pending + num_tokens, device=device)
        slots_BT = torch.tensor(self.lengths, device=device).unsqueeze(1) + tokens_T
        num_slots, width = max(self.lengths) + self.num_pending + num_tokens, self.prompt_mask_BL.shape[1]
        seen_BTS = torch.arange(num_slots, device=device) <= slots_BT.unsqueeze(-1)
        seen_BTS[:, :, :width] &= self.prompt_mask_BL.unsqueeze(1)
        return Window(num_tokens, num_slots, slots_BT, seen_BTS.unsqueeze(1))


@dataclass(frozen=True)
class Window:
    """Where T tokens of each row stand in the cache, and what they see of its first `num_slots` slots.

    slots: the same slice for all rows, or int64 [B, T]. mask: None, or broadcast to [B, 1, T, num_slots]; bool, or what
    is added to the scores.
    """

    num_tokens: int
    num_slots: int
    slots: slice | Tensor
    mask: Tensor | None

    def write(self, cached_BJSX: Tensor, new_BTJX: Tensor) -> None:
        """Put keys or values of the T tokens into their slots."""
        new_BTJX = new_BTJX.to(cached_BJSX.dtype)  # bf16 autocast may have lowered it
        if isinstance(self.slots, slice):
            cached_BJSX[:, :, self.slots] = new_BTJX.transpose(1, 2)
        else:
            rows_B1 = torch.arange(len(self.slots), device=self.slots.device).unsqueeze(1)
            cached_BJSX[rows_B1, :, self.slots] = new_BTJX


def prepare_attention(mixer: Attention, state: AttentionCache, stack: CachedStack) -> Step:
    """`*`: T queries of each of the heads that share keys stand as a T rows of one matrix, so that no key is copied."""
    heads, kv_heads, head_dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    group = heads // kv_heads
    project, o_proj = prepare_qkv(mixer), prepare_linear(mixer.o_proj.weight, mixer.o_proj.round_input)

    def step(x_RD: Tensor) -> Tensor:
        q, k, v = project(x_RD)
        window = stack.window
        num_tokens, mask = window.num_tokens, window.mask
        window.write(state.k, k.view(-1, num_tokens, kv_heads, head_dim))
        window.write(state.v, v.view(-1, num_tokens, kv_heads, head_dim))
        if mask is not None:
            mask = mask.repeat(*[1] * (mask.dim() - 2), group, 1)
        q_BJaTX = q.view(-1, num_tokens, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        with without_cudnn(state.k.device):
            out_BJRX = F.scaled_dot_product_attention(
                q_BJaTX.flatten(2, 3).to(state.k.dtype),
                state.k[:, :, : window.num_slots],
                state.v[:, :, : window.num_slots],
                attn_mask=mask,
            )
        out_BTJaX = out_BJRX.unflatten(2, (group, num_tokens)).permute(0, 3, 1, 2, 4)
        return o_proj(out_BTJaX.reshape(-1, heads * head_dim))

    return step


@dataclass
class PendingStates:
    """States of an `M` block before the first pending token and after each of up to Q.

    conv: inputs of the convolution, fp32 [B, K-1+Q, c]: the K-1 before the first pending token, then those of each.
    ssm: fp32 [1+Q, B, G, N, i]; each as in `MambaCache`, one for each number of tokens that may be kept. With Q = 1
    there is one for all, [1, B, G, N, i]: the token stays.
    """

    conv: Tensor
    ssm: Tensor

    @classmethod
    def behind(cls, cache: MambaCache, channels: int, most_pending: int) -> PendingStates:
        """Room for so many tokens behind those that `cache` has read."""
        batch_size, *_ = cache.ssm.shape
        conv = cache.ssm.new_empty(batch_size, len(cache.conv) + most_pending, channels)
        for position, inputs_Bc in enumerate(cache.conv):
            conv[:, position] = inputs_Bc
        ssm = cache.ssm.new_empty(1 + most_pending if most_pending > 1 else 1, *cache.ssm.shape)
        ssm[0] = cache.ssm
        return cls(conv, ssm)

    @property
    def in_place(self) -> bool:
        """Whether a token that was read stays."""
        return len(self.ssm) == 1

    def accept(self, kept: int | Tensor) -> None:
        """The states after `kept` pending tokens, of all rows or int64 [B], become those before the next one."""
        if self.in_place:
            return
        width = self.conv.shape[1] - (len(self.ssm) - 1)
        if isinstance(kept, int):
            if kept:
                self.ssm[0] = self.ssm[kept]
                self.conv[:, :width] = self.conv[:, kept : kept + width].clone()
            return
        rows_B = torch.arange(len(kept), device=self.ssm.device)
        self.ssm[0] = self.ssm[kept, rows_B]
        inputs_BK = kept.unsqueeze(1) + torch.arange(width, device=self.ssm.device)
        self.conv[:, :width] = self.conv[rows_B.unsqueeze(1), inputs_BK]

    def keep_rows(self, rows_B: Tensor) -> None:
        """Drop every row but `rows` (int64 [B'])."""
        self.conv, self.ssm = self.conv.index_select(0, rows_B), self.ssm.index_select(1, rows_B)

    def put(self, row: int, cache: MambaCache) -> None:
        """The states of one row become those of row number `row`."""
        for position, inputs_1c in enumerate(cache.conv):
            self.conv[row, position] = inputs_1c[0]
        self.ssm[0, row] = cache.ssm[0]

    def row(self, row: int) -> MambaCache:
        """A copy of the states of row number `row`."""
        width = self.conv.shape[1] - max(1, len(self.ssm) - 1)
        conv_Kc = self.conv[row, :width].clone()
        return MambaCache(list(conv_Kc.unsqueeze(1).unbind(0)), self.ssm[0, row : row + 1].clone())


def prepare_mamba2(mixer: Mamba2, states: PendingStates, stack: CachedStack) -> Step:
    """`M`: convolution over the last K inputs of each token, then the recurrence, every state of which may be held."""
    block = PreparedMamba2(mixer)
    width = len(block.past_taps)

    def step(x_RD: Tensor) -> Tensor:
        first, num_tokens = stack.num_pending, stack.window.num_tokens
        z_RI, xBC_Rc, dt_RH = block.project(x_RD)
        xBC_BTc = xBC_Rc.unflatten(0, (-1, num_tokens))
        states.conv[:, first + width : first + width + num_tokens] = xBC_BTc
        conv_BTc = torch.addcmul(block.conv_bias_c, xBC_BTc, block.tap_c)
        for position, past_tap_c in enumerate(block.past_taps, start=first):
            conv_BTc.addcmul_(states.conv[:, position : position + num_tokens], past_tap_c)
        if states.in_place:
            states.conv[:, :width] = states.conv[:, 1:].clone()
        x_RI, *inputs = block.recurrence_inputs(conv_BTc.flatten(0, 1), dt_RH)
        decay_TBG1i, dtx_TBG1i, B_TBGN1, C_TBG1N = (
            each.unflatten(0, (-1, num_tokens)).transpose(0, 1) for each in inputs
        )
        held, read = states.ssm.unbind(0), []
        if states.in_place:
            read.append(recurrence(held[0], decay_TBG1i[0], dtx_TBG1i[0], B_TBGN1[0], C_TBG1N[0]))
            if mixer.round_state is not None:
                held[0].copy_(rounded(held[0], mixer.round_state))
        else:
            for token, (decay_BG1i, B_BGN1, dtx_BG1i) in enumerate(
                zip(decay_TBG1i.unbind(0), B_TBGN1.unbind(0), dtx_TBG1i.unbind(0), strict=True), start=first
            ):  # h = decay h + B (dt x)^T, one step after the other
                torch.mul(held[token], decay_BG1i, out=held[token + 1]).addcmul_(B_BGN1, dtx_BG1i)
                if mixer.round_state is not None:  # after it was read, as it is stored
                    read.append(C_TBG1N[token - first] @ held[token + 1])
                    held[token + 1].copy_(rounded(held[token + 1], mixer.round_state))
        y_TBG1i = torch.stack(read) if read else C_TBG1N @ states.ssm[first + 1 : first + 1 + num_tokens]
        return block.finish(y_TBG1i.transpose(0, 1).flatten(0, 1).contiguous(), x_RI, z_RI)

    return step
