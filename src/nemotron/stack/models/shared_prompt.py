"""Rows that hold a prompt once and several continuations of it, each computed as if it alone followed the prompt.

Completions of one prompt are trained on in such rows: the prompt is read once, and its gradient is the sum of theirs.
Document 0 of a row is the prompt, documents 1, 2, ... are its continuations, -1 is padding. Attention takes another
mask (`packing_mask`). A Mamba-2 block keeps the documents of a row apart as always, and adds what a prompt does to its
continuations: the convolution of their first tokens reaches back into it, and the recurrence is linear, so the state of
a continuation is the one from zero plus the prompt's last state, decayed.

Shapes: B batch, L length, c conv channels, K conv width, E early tokens: those whose convolution reaches back;
i inner width of a group. R continuations of all rows, M tokens of the longest with its prompt. x any further
dimensions. Others as in `ssd.py`. Next: `block.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemotron.stack.models.layers import at_least_fp32


@dataclass(frozen=True)
class SharedPrompts:
    """Where the prompts and continuations of a batch of rows stand; the same for every block.

    is_prompt_BL: bool. counts_BL: how many separate sequences a token stands for, that is all continuations of its row
    for one of a prompt, 0 for padding. begin_BL: position of the first token of each token's document. longest: tokens
    of the longest prompt. rows_E, tokens_E: the early tokens. window_EK: the K positions up to each of them, oldest
    first, -1 where a prompt does not reach back so far.
    """

    is_prompt_BL: Tensor
    counts_BL: Tensor
    begin_BL: Tensor
    longest: int
    rows_E: Tensor
    tokens_E: Tensor
    window_EK: Tensor

    @classmethod
    def find(cls, seq_idx_BL: Tensor, conv_width: int) -> SharedPrompts:
        """From document indices. Index 0 may be missing: a prompt without tokens."""
        positions_L = torch.arange(seq_idx_BL.shape[1], device=seq_idx_BL.device)
        is_prompt_BL = seq_idx_BL == 0
        is_first_BL = torch.ones_like(is_prompt_BL)
        is_first_BL[:, 1:] = seq_idx_BL.diff(dim=1) != 0
        begin_BL = torch.where(is_first_BL, positions_L, 0).cummax(dim=1).values
        offset_BL = positions_L - begin_BL
        rows_E, tokens_E = ((seq_idx_BL > 0) & (offset_BL < conv_width - 1)).nonzero(as_tuple=True)
        continuations_B1 = seq_idx_BL.max(dim=1, keepdim=True).values
        counts_BL = torch.where(is_prompt_BL, continuations_B1, (seq_idx_BL > 0).long())
        length_B = is_prompt_BL.sum(1)
        ago_K = torch.arange(conv_width - 1, -1, -1, device=seq_idx_BL.device)
        before_EK = ago_K - offset_BL[rows_E, tokens_E].unsqueeze(-1)  # positive: so many tokens before the document
        in_prompt_EK = (length_B[rows_E].unsqueeze(-1) - before_EK).clamp(min=-1)
        window_EK = torch.where(before_EK > 0, in_prompt_EK, tokens_E.unsqueeze(-1) - ago_K)
        return cls(is_prompt_BL, counts_BL, begin_BL, int(length_B.max()), rows_E, tokens_E, window_EK)

    def early_inputs(self, x_BLc: Tensor) -> Tensor:
        """What the convolution reads at the early tokens, [E, K, c], zero before the prompt."""
        place_EK = self.rows_E.unsqueeze(-1) * x_BLc.shape[1] + self.window_EK.clamp(min=0)  # in all rows, joined
        # The continuations of a prompt read the same tokens. Their gradients are added up in one order, by one thread;
        # behind x_BLc[rows, tokens] several would add as they come, with other last bits every time.
        inputs_EKc = x_BLc.flatten(0, 1).index_select(0, place_EK.flatten()).view(*place_EK.shape, x_BLc.shape[-1])
        return inputs_EKc * (self.window_EK >= 0).unsqueeze(-1)

    def read_states(self, x_BLHP: Tensor, dt_BLH: Tensor, A_H: Tensor, B_BLGN: Tensor, C_BLGN: Tensor) -> Tensor:
        """What each token of a continuation reads of its prompt's last state S, [B, L, H, P] in fp32 or wider:

            S = sum_j exp(c_end - c_j) B_j (dt_j x_j)^T over the prompt          exp(c_t - c_before) C_t S

        with c the cumulative log-decay dt A of a row, and c_before that of the position before the continuation's first
        token. c is float64: it sums over the whole row, and what is taken from it are differences.
        """
        x_BLHP, B_BLGN, C_BLGN = (at_least_fp32(t) for t in (x_BLHP, B_BLGN, C_BLGN))
        prompt, groups = slice(self.longest), B_BLGN.shape[2]
        log_decay_BLH = dt_BLH.double() * A_H
        c_BLH = log_decay_BLH.cumsum(1)
        before_BLH = (c_BLH - log_decay_BLH).gather(1, self.begin_BL.unsqueeze(-1).expand_as(c_BLH))
        is_prompt_BL1 = self.is_prompt_BL.unsqueeze(-1)
        from_begin_BLH = (c_BLH - before_BLH).masked_fill(is_prompt_BL1, float("-inf")).exp().to(x_BLHP.dtype)
        end_B1H = (log_decay_BLH * is_prompt_BL1).sum(1, keepdim=True)
        to_end_BLH = (end_B1H - c_BLH[:, prompt]).masked_fill(~is_prompt_BL1[:, prompt], float("-inf")).exp()

        u_BLHP = x_BLHP[:, prompt] * (dt_BLH[:, prompt] * to_end_BLH.to(x_BLHP.dtype)).unsqueeze(-1)
        S_BGNi = B_BLGN[:, prompt].permute(0, 2, 3, 1) @ u_BLHP.unflatten(2, (groups, -1)).flatten(3).transpose(1, 2)
        read_BGLi = C_BLGN.transpose(1, 2) @ S_BGNi
        return read_BGLi.transpose(1, 2).reshape(x_BLHP.shape) * from_begin_BLH.unsqueeze(-1)


@dataclass(frozen=True)
class SeparateRows:
    """The continuations in a row each, behind their prompts, for what does not share these: multi-token prediction.

    Their order is that of the documents. index_RM: position of each token in the shared rows, flat; -1 is padding.
    seq_idx_RM: document of each token of the new rows, 0, and 1 for padding.
    """

    index_RM: Tensor
    seq_idx_RM: Tensor

    @classmethod
    def of(cls, seq_idx_BL: Tensor) -> SeparateRows:
        """From the document indices of the shared rows."""
        positions_BL = torch.arange(seq_idx_BL.numel()).view(seq_idx_BL.shape)
        rows = [
            positions_L[(seq_idx_L == 0) | (seq_idx_L == document)]
            for positions_L, seq_idx_L in zip(positions_BL, seq_idx_BL.cpu(), strict=True)
            for document in range(1, int(seq_idx_L.max()) + 1)
        ]
        index_RM = pad_sequence(rows, batch_first=True, padding_value=-1).to(seq_idx_BL.device)
        return cls(index_RM, (index_RM < 0).long())

    def take(self, values_BLx: Tensor, fill: float) -> Tensor:
        """Values of the tokens of the shared rows, [B, L, ...], at those of the separate ones; `fill` at padding."""
        values_RMx = values_BLx.flatten(0, 1).index_select(0, self.index_RM.clamp(min=0).flatten())
        values_RMx = values_RMx.view(*self.index_RM.shape, *values_BLx.shape[2:])
        is_padding = (self.index_RM < 0).view(*self.index_RM.shape, *[1] * (values_BLx.dim() - 2))
        return values_RMx.masked_fill(is_padding, fill)
