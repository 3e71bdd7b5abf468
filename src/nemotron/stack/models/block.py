"""One residual block of the pattern: x + mixer(norm(x)). Next: `mtp.py`, or `nemotron_h.py` for a model without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nemotron.stack.models.attention import Attention, AttentionCache
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.layers import MLP, RMSNorm
from nemotron.stack.models.mamba2 import Mamba2, MambaCache
from nemotron.stack.models.moe import MoE
from nemotron.stack.models.shared_prompt import SharedPrompts

# Shapes: B batch, L length, D hidden.


class Block(nn.Module):
    """x + mixer(norm(x)); the mixer is what the pattern's symbol says."""

    def __init__(self, config: NemotronHConfig, symbol: str) -> None:
        super().__init__()
        self.recompute = False  # activation checkpointing, see training/sharding.py
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer: nn.Module
        if symbol == "M":
            self.mixer = Mamba2(config)
        elif symbol == "*":
            self.mixer = Attention(config)
        elif symbol == "E":
            self.mixer = MoE(config)
        else:
            self.mixer = MLP(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        x_BLD: Tensor,
        seq_idx_BL: Tensor | None = None,
        attention_mask: Tensor | None = None,
        state: AttentionCache | MambaCache | None = None,
        prompts: SharedPrompts | None = None,
        counts_BL: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Whole sequences. Returns the block's output [B, L, D] and the load-balancing loss of an `E` block, else None.

        Args:
            x_BLD: [B, L, D].
            seq_idx_BL: document index of each token; `M` blocks never cross a change of it.
            attention_mask: bool [B, 1, L, L] for `*` blocks (`packing_mask`), None = plain causal.
            state: of an `M` or `*` block, filled with what decoding goes on from.
            prompts: of rows whose documents all go on from the first one; the mask says so to `*` blocks.
            counts_BL: how often each token counts in the load of experts; None: once.
        """
        if not (self.recompute and state is None and torch.is_grad_enabled()):
            return self._run(x_BLD, seq_idx_BL, attention_mask, state, prompts, counts_BL)
        out_BLD, balance = checkpoint(
            self._run, x_BLD, seq_idx_BL, attention_mask, state, prompts, counts_BL, use_reentrant=False,
            preserve_rng_state=False,  # nothing here is random
            early_stop=False,  # sharded weights are freed when all modules of the block have run
            context_fn=lambda: (nullcontext(), self._second_pass()),
        )  # fmt: skip
        return out_BLD, balance

    @contextmanager
    def _second_pass(self) -> Iterator[None]:
        """While a block is recomputed in the backward pass: its tokens have been counted as load once."""
        if isinstance(self.mixer, MoE):
            self.mixer.gate.counts_load = False
        try:
            yield
        finally:
            if isinstance(self.mixer, MoE):
                self.mixer.gate.counts_load = True

    def _run(
        self,
        x_BLD: Tensor,
        seq_idx_BL: Tensor | None,
        attention_mask: Tensor | None,
        state: AttentionCache | MambaCache | None,
        prompts: SharedPrompts | None,
        counts_BL: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        normed, mixer, balance = self.norm(x_BLD), self.mixer, None
        if isinstance(mixer, Mamba2):
            assert not isinstance(state, AttentionCache)
            out = mixer(normed, seq_idx_BL, state, prompts)
        elif isinstance(mixer, Attention):
            out = mixer(normed, attention_mask, state)
        elif isinstance(mixer, MoE):
            out, balance = mixer(normed, counts_BL)
        else:
            out = mixer(normed)
        return x_BLD + out, balance
