"""Multi-token prediction (DeepSeek-V3 section 2.2), as Nemotron 3 Super has it: one block, applied once a depth.

The trunk's output h_t (after the final norm) predicts token t+1. Depth k = 1, 2, ... predicts token t+k+1:

    h^0_t = h_t
    h^k_t = final_layernorm(blocks(eh_proj([enorm(embedding(token t+k)) ; hnorm(h^{k-1}_t)])))

and the shared output head reads h^k. The block's weights are the same at every depth (`mtp_use_repeated_layer` in
Megatron-Core), so at inference it can be applied more often than training did (see `decoding/speculative.py`).

Shapes: B batch, L length, D hidden, N steps of a draft, T = L - shift positions. Next: `nemotron_h.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemotron.stack.models.attention import packing_mask
from nemotron.stack.models.block import Block
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.kernels.linear import Linear
from nemotron.stack.models.layers import RMSNorm


class MTPLayer(Block):
    """A residual block of the MTP module; the first one also merges its two inputs, the last one also ends with a norm.

    That norms and projection sit inside the first and last layer is how the published checkpoints name them.
    """

    def __init__(self, config: NemotronHConfig, symbol: str, first: bool, last: bool) -> None:
        super().__init__(config, symbol)
        size, eps = config.hidden_size, config.layer_norm_epsilon
        if first:
            self.enorm = RMSNorm(size, eps)
            self.hnorm = RMSNorm(size, eps)
            self.eh_proj = Linear(2 * size, size)
        if last:
            self.final_layernorm = RMSNorm(size, eps)


class MTP(nn.Module):
    """The shared multi-token prediction block, `mtp.layers.{i}` over the symbols of `mtp_hybrid_override_pattern`."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        pattern = config.mtp_hybrid_override_pattern
        self.layers = nn.ModuleList(
            MTPLayer(config, symbol, first=i == 0, last=i == len(pattern) - 1) for i, symbol in enumerate(pattern)
        )

    def blocks(self) -> list[MTPLayer]:
        """The residual blocks, in order."""
        return [layer for layer in self.layers if isinstance(layer, MTPLayer)]

    def merge(self, embedded_BLD: Tensor, hidden_BLD: Tensor) -> Tensor:
        """Input of the first block, from the next token's embedding and the hidden state so far: both [B, L, D]."""
        first = self.blocks()[0]
        out: Tensor = first.eh_proj(torch.cat([first.enorm(embedded_BLD), first.hnorm(hidden_BLD)], dim=-1))
        return out

    def finish(self, x_BLD: Tensor) -> Tensor:
        """Norm after the last block: what the output head and the next depth read."""
        out: Tensor = self.blocks()[-1].final_layernorm(x_BLD)
        return out

    def forward(
        self,
        input_ids_BL: Tensor,
        hidden_BLD: Tensor,
        embedding: nn.Embedding,
        num_depths: int,
        seq_idx_BL: Tensor | None = None,
        counts_BL: Tensor | None = None,
        detach: bool = False,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Hidden states of the depths 1 .. num_depths, and the load-balancing losses of every `E` block at every depth.

        Args:
            input_ids_BL: the trunk's input, int64 [B, L].
            hidden_BLD: the trunk's output after its final norm.
            embedding: the trunk's embedding.
            seq_idx_BL: document index of packed rows; no depth looks into another document.
            counts_BL: how often each token counts in the load of experts, 0 for padding; None: once.
            detach: no gradient reaches trunk and embedding (`mtp_detach_heads`): the block learns, the model stays.

        Returns:
            hidden [B, L, D] a depth. Depth k means something where token t+k exists in t's document; the last k
            positions of each document have no such token, read token 0 instead and must not be trained on. Nothing
            before them depends on them.
        """
        mask = None if seq_idx_BL is None else packing_mask(seq_idx_BL)
        hidden_BLD = hidden_BLD.detach() if detach else hidden_BLD
        hiddens: list[Tensor] = []
        balances: list[Tensor] = []
        for depth in range(1, num_depths + 1):
            embedded_BLD = embedding(shift_left(input_ids_BL, depth, seq_idx_BL, fill=0))
            x_BLD = self.merge(embedded_BLD.detach() if detach else embedded_BLD, hidden_BLD)
            for block in self.blocks():
                x_BLD, balance = block(x_BLD, seq_idx_BL, mask, counts_BL=counts_BL)
                if balance is not None:
                    balances.append(balance)
            hidden_BLD = self.finish(x_BLD)
            hiddens.append(hidden_BLD)
        return hiddens, balances

    def rehearse(
        self,
        next_embedded_BLD: Tensor,
        hidden_BLD: Tensor,
        sources_NBL: Tensor,
        seq_idx_BL: Tensor,
    ) -> list[Tensor]:
        """What the block makes of its own outputs, as in drafting: hidden states of N steps, each [B, L, D].

        At every step position t reads token t+1, together with one state of the tokens up to t, and predicts token t+2.
        That state is the trunk's h_t (source 0), or what an earlier step j made at position t-1, where it had read
        token t (source j). (In `forward`, depth k reads j = k-1 at all positions, and its numbering of positions trails
        by k-1.) A document's first position reads the trunk.

        Args:
            next_embedded_BLD: the embedding of token t+1 at position t; anything where there is none.
            hidden_BLD: the trunk's output after its final norm.
            sources_NBL: int64 [N, B, L], of step k = 1 .. N from 0 to k-1.
            seq_idx_BL: document index of packed rows; -1 is padding, which does not count in the load of experts.
        """
        mask, counts_BL = packing_mask(seq_idx_BL), (seq_idx_BL >= 0).long()
        is_first_BL1 = torch.ones_like(seq_idx_BL, dtype=torch.bool).unsqueeze(-1)
        is_first_BL1[:, 1:, 0] = seq_idx_BL[:, 1:] != seq_idx_BL[:, :-1]
        states, hiddens = [hidden_BLD], list[Tensor]()
        for sources_BL in sources_NBL:
            x_BLD = states[0]
            for source, state_BLD in enumerate(states[1:], start=1):
                x_BLD = torch.where((sources_BL == source).unsqueeze(-1), state_BLD, x_BLD)
            x_BLD = self.merge(next_embedded_BLD, x_BLD)
            for block in self.blocks():
                x_BLD, _ = block(x_BLD, seq_idx_BL, mask, counts_BL=counts_BL)
            hiddens.append(self.finish(x_BLD))
            states.append(torch.where(is_first_BL1, hidden_BLD, F.pad(hiddens[-1][:, :-1], (0, 0, 1, 0))))
        return hiddens


def shift_left(values_BL: Tensor, shift: int, seq_idx_BL: Tensor | None, fill: int) -> Tensor:
    """values[t + shift] at position t where that is a token of the same document, else `fill`. Shape [B, L] stays."""
    length = values_BL.shape[1]
    out_BL = torch.full_like(values_BL, fill)
    if shift >= length:
        return out_BL
    later_BT = values_BL[:, shift:]
    if seq_idx_BL is not None:
        same_BT = seq_idx_BL[:, shift:] == seq_idx_BL[:, : length - shift]
        later_BT = torch.where(same_BT, later_BT, out_BL[:, shift:])
    out_BL[:, : length - shift] = later_BT
    return out_BL
