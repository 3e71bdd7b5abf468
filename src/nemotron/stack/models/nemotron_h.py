"""Nemotron-H: embedding, a stack of pre-norm residual blocks given by a pattern string, final norm, output head.

Symbols: `M` Mamba-2, `*` attention, `E` mixture of experts, `-` dense MLP. Module names follow the published
checkpoints (`backbone.layers.N.mixer.…`); on disk every expert is a separate tensor, in memory they are stacked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nemo_runspec.errors import UserError
from nemotron.stack.models.attention import AttentionCache, packing_mask
from nemotron.stack.models.block import Block
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.kernels.linear import Linear, linear
from nemotron.stack.models.layers import RMSNorm
from nemotron.stack.models.mamba2 import MambaCache
from nemotron.stack.models.moe import MoE
from nemotron.stack.models.mtp import MTP, shift_left
from nemotron.stack.models.published import hub
from nemotron.stack.models.published.config_json import is_quantized, load_config, read_config
from nemotron.stack.models.published.parameters import count_mtp_parameters, count_parameters
from nemotron.stack.models.shared_prompt import SeparateRows, SharedPrompts

# Shapes: B batch, L length, D hidden, V vocabulary.


@dataclass
class NemotronHOutput:
    """What `forward` returns.

    logits: [B, L, V], or [selected, V]. load_balancing_loss: sum over the `E` blocks, as in Megatron-Core, where one of
    multi-token prediction counts with its mean over the depths; 0 outside training. mtp_logits: those of depth 1, 2,
    ... of multi-token prediction (`losses.mtp_loss` takes them), each [B, L, V] or [selected of that depth, V]; empty
    where it did not run.
    """

    logits: Tensor
    load_balancing_loss: Tensor
    mtp_logits: list[Tensor] = field(default_factory=list)


class Embedding(nn.Embedding):
    """`nn.Embedding` that draws nothing on the meta device, where torch would import its compiler for it (1 s)."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Backbone(nn.Module):
    """Everything but the output head."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, symbol) for symbol in config.hybrid_override_pattern)
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)


class NemotronH(nn.Module):
    """A Nemotron-H language model. `forward` trains and scores; `decoding/` generates, with a cache."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.mtp = MTP(config) if config.num_nextn_predict_layers else None
        self.initialize()

    def forward(
        self,
        input_ids_BL: Tensor,
        seq_idx_BL: Tensor | None = None,
        select_BL: Tensor | None = None,
        mtp_depths: int | None = None,
        detach_mtp: bool = False,
        shared_prompt: bool = False,
    ) -> NemotronHOutput:
        """Logits of every position, or of the selected ones.

        Args:
            input_ids_BL: int64 [B, L].
            seq_idx_BL: int64 [B, L], document index of each token of a packed row (non-decreasing); None = one
                document a row. Attention, convolution and state never cross a change of index. Index -1, at the end,
                is padding, which does not count in the load of experts.
            select_BL: bool [B, L]; when given, logits are [number selected, V] in row-major order. Where the loss only
                covers answers, most of the output head and of the softmax is then never computed.
            mtp_depths: how often to apply the multi-token prediction block, for a model that has one. None: the
                config's `mtp_num_layers` in training, else 0. Depth k at position t predicts token t+k+1; with
                `select_BL` its logits are those of the positions t whose t+k is selected, in the same document.
            detach_mtp: gradients of `mtp_logits` reach the multi-token prediction block only, not embedding, trunk and
                head (`mtp_detach_heads` of Megatron-Core; pretraining lets them through).
            shared_prompt: document 0 of each row is a prompt, and documents 1, 2, ... each go on from it as if they
                alone followed (`shared_prompt.py`). Multi-token prediction needs `select_BL` then, and its logits are
                in the order of `SeparateRows`.
        """
        hidden_BLD, balances = self.hidden_states(input_ids_BL, seq_idx_BL, shared_prompt=shared_prompt)
        logits = self.lm_head(hidden_BLD if select_BL is None else hidden_BLD[select_BL])
        mtp_logits: list[Tensor] = []
        if mtp_depths is None:
            mtp_depths = self.config.mtp_num_layers if self.training else 0
        if self.mtp is not None and mtp_depths > 0:
            counts_BL = None if seq_idx_BL is None else (seq_idx_BL >= 0).long()
            if shared_prompt:
                # What a depth reads at the end of a prompt is the continuation: there is nothing to share.
                if seq_idx_BL is None or select_BL is None:
                    raise ValueError("multi-token prediction behind a shared prompt needs seq_idx_BL and select_BL")
                rows = SeparateRows.of(seq_idx_BL)
                input_ids_BL, hidden_BLD = rows.take(input_ids_BL, 0), rows.take(hidden_BLD, 0)
                select_BL, seq_idx_BL = rows.take(select_BL, False), rows.seq_idx_RM
                counts_BL = (rows.seq_idx_RM == 0).long()
            hiddens, mtp_balances = self.mtp(
                input_ids_BL, hidden_BLD, self.backbone.embeddings, mtp_depths, seq_idx_BL, counts_BL, detach_mtp
            )
            balances += [balance / mtp_depths for balance in mtp_balances]
            for depth, hidden in enumerate(hiddens, start=1):
                if select_BL is not None:
                    hidden = hidden[shift_left(select_BL, depth, seq_idx_BL, fill=False)]
                weight = self.lm_head.weight
                mtp_logits.append(linear(hidden, weight.detach()) if detach_mtp else self.lm_head(hidden))
        balance = torch.stack(balances).sum() if balances else hidden_BLD.new_zeros((), dtype=torch.float32)
        return NemotronHOutput(logits, balance, mtp_logits)

    def hidden_states(
        self,
        input_ids_BL: Tensor,
        seq_idx_BL: Tensor | None,
        states: Sequence[AttentionCache | MambaCache | None] | None = None,
        shared_prompt: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """The backbone: hidden states after the final norm [B, L, D], and the load-balancing loss of each `E` block.

        `states`, one a block, receive what decoding goes on from after the last token.
        """
        mask = None if seq_idx_BL is None else packing_mask(seq_idx_BL, shared_prompt)
        prompts: SharedPrompts | None = None
        counts_BL = None if seq_idx_BL is None else (seq_idx_BL >= 0).long()
        if shared_prompt:
            assert seq_idx_BL is not None and states is None
            prompts = SharedPrompts.find(seq_idx_BL, self.config.conv_kernel)
            counts_BL = prompts.counts_BL
        x_BLD = self.backbone.embeddings(input_ids_BL)
        balances: list[Tensor] = []
        for index, block in enumerate(self.blocks()):
            state = states[index] if states is not None else None
            x_BLD, balance = block(x_BLD, seq_idx_BL, mask, state, prompts, counts_BL)
            if balance is not None:
                balances.append(balance)
        return self.backbone.norm_f(x_BLD), balances

    def blocks(self) -> list[Block]:
        """The residual blocks, in order."""
        return [block for block in self.backbone.layers if isinstance(block, Block)]

    def moe_blocks(self) -> list[MoE]:
        """The `E` mixers, in order; those of the multi-token prediction stand last."""
        blocks = self.blocks() + (list(self.mtp.blocks()) if self.mtp is not None else [])
        return [block.mixer for block in blocks if isinstance(block.mixer, MoE)]

    def update_expert_bias(self, rate: float = 1e-3) -> None:
        """Aux-loss-free balancing: call once after each optimiser step (uses the loads routed since the last call)."""
        for moe in self.moe_blocks():
            moe.gate.update_bias(rate)

    @torch.no_grad()
    def initialize(self) -> None:
        """Initial weights as in Hugging Face's NemotronH `_init_weights`, out_proj apart.

        Linears and embeddings ~ N(0, initializer_range); A = -(1..heads); D = 1; dt_bias such that softplus(dt_bias) is
        log-uniform in [1e-3, 1e-1]; convolutions keep PyTorch's uniform; Mamba's out_proj is scaled by 1/sqrt(blocks),
        here as all linears from the normal distribution, there from PyTorch's uniform one.
        """
        config, num_blocks = self.config, len(self.config.hybrid_override_pattern)
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if parameter.dim() >= 2 and "conv1d" not in name:
                parameter.normal_(0.0, config.initializer_range)
            if name.endswith("out_proj.weight"):
                parameter.div_(math.sqrt(num_blocks))
            elif name.endswith("A_log"):
                parameter.copy_(torch.arange(1, config.mamba_num_heads + 1).float().log())
            elif name.endswith("dt_bias"):
                low, high = math.log(1e-3), math.log(1e-1)
                dt = torch.exp(torch.rand(config.mamba_num_heads) * (high - low) + low).clamp(min=1e-4)
                parameter.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus

    def num_parameters(self) -> tuple[int, int]:
        """(total, active): all parameters, and those that one token of plain decoding uses.

        Active are the K chosen experts of each `E` block, embedding and head included; the multi-token prediction block
        counts in the total only. `parameters.py` has the parts.
        """
        model, mtp = count_parameters(self.config), count_mtp_parameters(self.config)
        return model.total + mtp.total, model.active

    def save_pretrained(
        self,
        path: Path,
        dtype: torch.dtype | str | None = None,
        max_shard_size: int = hub.MAX_SHARD_SIZE,
        others: Mapping[str, Any] | None = None,
    ) -> None:
        """Write `config.json` and the weights into a directory, in the published layout; see `hub.save_model`."""
        hub.save_model(Path(path), self.config, self.state_dict(), hub.parse_dtype(dtype), max_shard_size, others)

    @classmethod
    def from_pretrained(
        cls, path: Path, dtype: torch.dtype | str | None = torch.float32, device: torch.device | str = "cpu"
    ) -> NemotronH:
        """Read a directory in the published layout: one of `save_pretrained`, of transformers, or a published model.

        The model is in training mode, as a new one is: call `eval()` to score with it. Quantised weights are refused:
        `quantization.export.load_model` reads them.

        Args:
            dtype: of the parameters, also as a word ("bfloat16"). fp32 is what training and the CPU want; None and
                "auto" keep the dtypes of the files.
            device: where the weights are read to; never more than one tensor of them lies elsewhere.

        Raises:
            UserError: a file is missing, damaged or a pickle; the config asks for something that this model does not
                have, or its weights are quantised; tensors are missing, unexpected, or not of the shape that it says.
        """
        path = Path(path)
        config = load_config(path)
        with torch.device("meta"):
            model = cls(config)
        if is_quantized(read_config(path)):
            raise UserError(f"{path}: its weights are quantised", "take the model that it was made from")
        hub.load_weights(model, path, hub.parse_dtype(dtype), device)
        return model
