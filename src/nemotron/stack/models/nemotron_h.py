"""Nemotron-H: embedding, a stack of pre-norm residual blocks given by a pattern string, final norm, output head.

Symbols: `M` Mamba-2, `*` attention, `E` mixture of experts, `-` dense MLP. Module names follow the published
checkpoints (`backbone.layers.N.mixer.…`); on disk every expert is a tensor of its own, in memory they are stacked.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nemo_runspec.errors import UserError
from nemotron.stack.models.attention import Attention, decode_mask, packing_mask
from nemotron.stack.models.cache import AttentionCache, Cache, MambaCache
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.layers import MLP, RMSNorm
from nemotron.stack.models.mamba2 import Mamba2
from nemotron.stack.models.moe import MoE

# Shapes: B batch, L length, D hidden, V vocabulary.


@dataclass
class NemotronHOutput:
    """logits [B, L, V], or [selected, V]; load_balancing_loss: mean over the `E` blocks, 0 outside training."""

    logits: Tensor
    load_balancing_loss: Tensor


class Block(nn.Module):
    """x + mixer(norm(x)); the mixer is what the pattern's symbol says."""

    def __init__(self, config: NemotronHConfig, symbol: str) -> None:
        super().__init__()
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


class Backbone(nn.Module):
    """Everything but the output head."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, symbol) for symbol in config.hybrid_override_pattern)
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)


class NemotronH(nn.Module):
    """A Nemotron-H language model; `forward` trains and scores, `prefill` and `step` decode with a cache."""

    def __init__(self, config: NemotronHConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.initialize()

    def forward(
        self, input_ids_BL: Tensor, seq_idx_BL: Tensor | None = None, select_BL: Tensor | None = None
    ) -> NemotronHOutput:
        """Logits of every position, or of the selected ones.

        Args:
            input_ids_BL: int64 [B, L].
            seq_idx_BL: int64 [B, L], document index of each token of a packed row (non-decreasing); None = one
                document a row. Attention, convolution and state never cross a change of index.
            select_BL: bool [B, L]; when given, logits are [number selected, V] in row-major order. Where the loss only
                covers answers, most of the output head and of the softmax is then never computed.
        """
        hidden_BLD, balance = self._run(input_ids_BL, seq_idx_BL, None)
        return NemotronHOutput(self.lm_head(hidden_BLD if select_BL is None else hidden_BLD[select_BL]), balance)

    def prefill(self, input_ids_BL: Tensor, is_token_BL: Tensor, capacity: int) -> tuple[Tensor, Cache]:
        """Read left-padded prompts at once. Returns logits of the last position [B, V] and the filled cache.

        Padding is treated as a document of its own (index 0, the prompt is 1), which is exactly what packing isolates.
        """
        weight = self.lm_head.weight
        cache = Cache.allocate(self.config, len(input_ids_BL), capacity, weight.dtype, weight.device)
        length = input_ids_BL.shape[1]
        cache.key_mask_BS[:, :length] = is_token_BL
        hidden_BLD, _ = self._run(input_ids_BL, is_token_BL.long(), cache)
        cache.length = length
        logits_BV: Tensor = self.lm_head(hidden_BLD[:, -1])
        return logits_BV, cache

    def step(self, input_ids_B: Tensor, cache: Cache) -> Tensor:
        """One more token a row: int64 [B] -> logits [B, V]; the cache moves on by one slot."""
        cache.key_mask_BS[:, cache.length] = True
        mask = decode_mask(cache)
        x_B1D = self.backbone.embeddings(input_ids_B).unsqueeze(1)
        for block, state in zip(self.blocks(), cache.layers, strict=True):
            normed, mixer = block.norm(x_B1D), block.mixer
            if isinstance(mixer, Mamba2) and isinstance(state, MambaCache):
                out = mixer.step(normed, state)
            elif isinstance(mixer, Attention) and isinstance(state, AttentionCache):
                out = mixer(normed, mask, state, cache.length)
            elif isinstance(mixer, MoE):
                out, _ = mixer(normed)
            else:
                out = mixer(normed)
            x_B1D = x_B1D + out
        cache.length += 1
        logits_BV: Tensor = self.lm_head(self.backbone.norm_f(x_B1D).squeeze(1))
        return logits_BV

    def _run(self, input_ids_BL: Tensor, seq_idx_BL: Tensor | None, cache: Cache | None) -> tuple[Tensor, Tensor]:
        mask = None if seq_idx_BL is None else packing_mask(seq_idx_BL)
        x_BLD = self.backbone.embeddings(input_ids_BL)
        balance: list[Tensor] = []
        for index, block in enumerate(self.blocks()):
            normed, mixer = block.norm(x_BLD), block.mixer
            state = cache.layers[index] if cache is not None else None
            if isinstance(mixer, Mamba2):
                out = mixer(normed, seq_idx_BL, state)
            elif isinstance(mixer, Attention):
                out = mixer(normed, mask, state)
            elif isinstance(mixer, MoE):
                out, block_balance = mixer(normed)
                balance.append(block_balance)
            else:
                out = mixer(normed)
            x_BLD = x_BLD + out
        loss = torch.stack(balance).mean() if balance else x_BLD.new_zeros((), dtype=torch.float32)
        return self.backbone.norm_f(x_BLD), loss

    def blocks(self) -> list[Block]:
        """The residual blocks, in order."""
        return [block for block in self.backbone.layers if isinstance(block, Block)]

    def moe_blocks(self) -> list[MoE]:
        """The `E` mixers, in order."""
        return [block.mixer for block in self.blocks() if isinstance(block.mixer, MoE)]

    def update_expert_bias(self, rate: float = 1e-3) -> None:
        """Aux-loss-free balancing: call once after each optimiser step (uses the loads routed since the last call)."""
        for moe in self.moe_blocks():
            moe.gate.update_bias(rate)

    @torch.no_grad()
    def initialize(self) -> None:
        """Initial weights as in Hugging Face's NemotronH `_init_weights`.

        Linears and embeddings ~ N(0, initializer_range); A = -(1..heads); D = 1; dt_bias such that softplus(dt_bias) is
        log-uniform in [1e-3, 1e-1]; convolutions keep PyTorch's uniform; Mamba's out_proj is scaled by 1/sqrt(blocks).
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
        """(total, active): active counts the K chosen experts of each `E` block instead of all E."""
        total = sum(p.numel() for p in self.parameters())
        idle = self.config.n_routed_experts - self.config.num_experts_per_tok
        per_expert = 2 * self.config.hidden_size * self.config.moe_intermediate_size
        return total, total - len(self.moe_blocks()) * idle * per_expert

    def save_pretrained(self, path: Path) -> None:
        """Write `config.json` and `model.safetensors` (one tensor an expert, as published) into a directory."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(
            json.dumps({"model_type": "nemotron_h", **self.config.to_dict()}, indent=2) + "\n", encoding="utf-8"
        )
        save_file(unstack_experts(self.state_dict()), path / "model.safetensors", metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, path: Path) -> NemotronH:
        """Read a directory written by `save_pretrained`.

        Raises:
            UserError: a file is missing or damaged; tensors missing, unexpected, or not of the shape the config says.
        """
        path = Path(path)
        try:
            model = cls(config := NemotronHConfig.load(path))
            tensors = stack_experts(load_file(path / "model.safetensors"), config.n_routed_experts)
        except KeyError as error:
            raise UserError(f"{path / 'model.safetensors'}: tensor {error} is missing") from error
        except (OSError, ValueError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{path}: not a model directory: {error}") from error
        expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
        for name in sorted(expected.keys() | tensors.keys()):
            found = tensors[name].shape if name in tensors else None
            if expected.get(name) != found:
                raise UserError(
                    f"{path / 'model.safetensors'}: {name} is {_shape(found)}, {_shape(expected.get(name))} expected"
                )
        model.load_state_dict(tensors)
        return model


def _shape(shape: torch.Size | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape)) or "a scalar"


_STACKED = re.compile(r"(.*\.experts)\.(up_proj|down_proj)$")
_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(up_proj|down_proj)\.weight$")


def unstack_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`experts.up_proj` [E, F, D] -> E tensors `experts.K.up_proj.weight` [F, D]; everything else unchanged."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if match := _STACKED.match(name):
            for index, weight in enumerate(tensor):
                out[f"{match[1]}.{index}.{match[2]}.weight"] = weight.clone()
        else:
            out[name] = tensor.contiguous()
    return out


def stack_experts(state: dict[str, Tensor], num_experts: int) -> dict[str, Tensor]:
    """The inverse of `unstack_experts`; experts beyond `num_experts` stay as they are. KeyError if one is missing."""
    singles = {name for name in state if (m := _SINGLE.match(name)) and int(m[2]) < num_experts}
    out = {name: tensor for name, tensor in state.items() if name not in singles}
    stems = sorted({(m[1], m[3]) for m in map(_SINGLE.match, singles) if m})
    for prefix, projection in stems:
        out[f"{prefix}.{projection}"] = torch.stack(
            [state[f"{prefix}.{index}.{projection}.weight"] for index in range(num_experts)]
        )
    return out
