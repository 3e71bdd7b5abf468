"""The smaller model: of every weight the slices of the units that stay, chosen by importance. Next: `distillation.py`.

Nothing is rescaled, as in Minitron (arXiv 2407.14679). Taking neurons of an MLP, query heads or whole blocks out is the
same as setting what they add to 0. Channels of the hidden size and of Mamba are also what an RMS is taken over: with D'
of D channels left, the pruned norm is the full one, its weight times sqrt(D'/D) and its eps times D'/D, of an input
that is 0 where channels were cut. In Mamba's gated norm D and D' are the widths of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nemo_runspec.errors import UserError
from nemotron.stack.compression.importance import Importance, refuse_what_is_not_pruned
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.nemotron_h import NemotronH

# Shapes: D hidden, F width of the MLP, A query heads, X their head_dim, J key/value heads, H Mamba heads, P their
# head_dim, G groups, N state size. A prime, as in "D' of D", is what stays.


@dataclass(frozen=True)
class Target:
    """The shape to prune to. `blocks` are the indices that stay, in ascending order.

    Key/value heads, Mamba groups and state size stay what they are: heads leave each group in equal number.
    """

    blocks: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    mamba_num_heads: int
    mamba_head_dim: int
    num_attention_heads: int

    @classmethod
    def whole(cls, config: NemotronHConfig) -> Target:
        """Everything stays; `dataclasses.replace` cuts from there."""
        return cls(
            tuple(range(len(config.hybrid_override_pattern))),
            config.hidden_size, config.intermediate_size,
            config.mamba_num_heads, config.mamba_head_dim, config.num_attention_heads,
        )  # fmt: skip

    def config(self, full: NemotronHConfig) -> NemotronHConfig:
        """The config of the pruned model.

        Raises:
            UserError: blocks that do not exist or are out of order, a width above the full model's or below 1, or heads
                that cannot be shared out evenly.
        """
        pattern = full.hybrid_override_pattern
        if not self.blocks or sorted(set(self.blocks) & set(range(len(pattern)))) != list(self.blocks):
            raise UserError(
                f"blocks {list(self.blocks)}: ascending indices from 0 to {len(pattern) - 1} expected",
                f"the pattern is {pattern}",
            )
        widths = {name: getattr(self, name) for name in WIDTHS}
        for name, width in widths.items():
            if not 1 <= width <= getattr(full, name):
                raise UserError(f"{name} {width}: 1 to {getattr(full, name)} expected", "pruning only takes away")
        try:
            return replace(full, hybrid_override_pattern="".join(pattern[i] for i in self.blocks), **widths)
        except ValueError as error:  # heads and groups
            raise UserError(str(error), "heads leave each group in equal number") from error


WIDTHS = ("hidden_size", "intermediate_size", "mamba_num_heads", "mamba_head_dim", "num_attention_heads")


@dataclass(frozen=True)
class Units:
    """Which units stay, as int64 indices into the full model, most important first (within its group, for heads).

    Any narrower choice is then a beginning of a wider one. Dictionaries go by the block's index in the full model.
    """

    hidden_D: Tensor
    ffn_F: dict[int, Tensor]
    attention_A: dict[int, Tensor]
    mamba_H: dict[int, Tensor]
    mamba_P: dict[int, Tensor]


def choose_units(importance: Importance, target: Target, config: NemotronHConfig) -> Units:
    """The most important units, as many as the target has; of equal ones those that come first.

    Hidden channels are the same in all blocks, since the residual stream joins them. Each block ranks its own neurons,
    query heads inside their GQA group, and Mamba channels and heads as in arXiv 2504.11409: channels once for all heads
    of a block, by the L2 norm over heads; then heads inside their group, by the L2 norm over the channels that stay.
    """
    mamba_H, mamba_P = {}, {}
    for index, scores_HP in importance.mamba_HP.items():
        mamba_P[index] = _top(scores_HP.norm(dim=0), 1, target.mamba_head_dim)
        scores_H = scores_HP[:, mamba_P[index]].norm(dim=1)
        mamba_H[index] = _top(scores_H, config.n_groups, target.mamba_num_heads)
    return Units(
        hidden_D=_top(importance.hidden_D, 1, target.hidden_size),
        ffn_F={i: _top(scores_F, 1, target.intermediate_size) for i, scores_F in importance.ffn_F.items()},
        attention_A={
            i: _top(scores_A, config.num_key_value_heads, target.num_attention_heads)
            for i, scores_A in importance.attention_A.items()
        },
        mamba_H=mamba_H,
        mamba_P=mamba_P,
    )


def _top(scores_N: Tensor, num_groups: int, count: int) -> Tensor:
    """Indices of the `count` largest, the same number from each group of neighbours; groups keep their order."""
    scores_GN = scores_N.unflatten(0, (num_groups, -1))
    order_GN = scores_GN.argsort(dim=1, descending=True, stable=True)[:, : count // num_groups]
    first_G = torch.arange(num_groups, device=scores_N.device) * scores_GN.shape[1]
    return (order_GN + first_G[:, None]).flatten()


@torch.no_grad()
def prune(model: NemotronH, importance: Importance, target: Target) -> NemotronH:
    """The target's model, in training mode, with copies of the weights that stay. The full model does not change.

    Raises:
        UserError: a target that does not fit the model; a model with experts or multi-token prediction.
    """
    full = model.config
    refuse_what_is_not_pruned(full)
    config = target.config(full)
    units = choose_units(importance, target, full)
    weights, hidden = model.state_dict(), units.hidden_D
    pruned = {
        "backbone.embeddings.weight": weights["backbone.embeddings.weight"][:, hidden],
        "backbone.norm_f.weight": weights["backbone.norm_f.weight"][hidden],
        "lm_head.weight": weights["lm_head.weight"][:, hidden],
    }
    for new, old in enumerate(target.blocks):
        prefix = f"backbone.layers.{old}."
        block = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        symbol = full.hybrid_override_pattern[old]
        if symbol == "M":
            mixer = _mamba(block, full, hidden, units.mamba_H[old], units.mamba_P[old])
        elif symbol == "*":
            mixer = _attention(block, full, hidden, units.attention_A[old])
        else:
            mixer = _mlp(block, hidden, units.ffn_F[old])
        mixer["norm.weight"] = block["norm.weight"][hidden]
        pruned |= {f"backbone.layers.{new}.{name}": w for name, w in mixer.items()}
    with torch.device("meta"):  # no weights that are overwritten at once, and no random numbers drawn
        student = NemotronH(config)
    student.load_state_dict(pruned, assign=True)
    return student


def _mamba(
    block: dict[str, Tensor], full: NemotronHConfig, hidden_D: Tensor, heads_H: Tensor, channels_P: Tensor
) -> dict[str, Tensor]:
    """in_proj's rows are z [H P] | x [H P] | B [G N] | C [G N] | dt [H]; the convolution's channels are x | B | C."""
    inner, conv = full.mamba_inner_size, full.mamba_conv_size
    inner_I = _within_heads(heads_H, channels_P, full.mamba_head_dim)
    states = torch.arange(inner, conv, device=heads_H.device)  # B and C, behind x
    conv_c = torch.cat([inner_I, states])
    in_proj = torch.cat([inner_I, inner + conv_c, inner + conv + heads_H])
    return {
        "mixer.in_proj.weight": block["mixer.in_proj.weight"][in_proj][:, hidden_D],
        "mixer.conv1d.weight": block["mixer.conv1d.weight"][conv_c],
        "mixer.conv1d.bias": block["mixer.conv1d.bias"][conv_c],
        "mixer.A_log": block["mixer.A_log"][heads_H],
        "mixer.D": block["mixer.D"][heads_H],
        "mixer.dt_bias": block["mixer.dt_bias"][heads_H],
        "mixer.norm.weight": block["mixer.norm.weight"][inner_I],
        "mixer.out_proj.weight": block["mixer.out_proj.weight"][hidden_D][:, inner_I],
    }


def _attention(block: dict[str, Tensor], full: NemotronHConfig, hidden_D: Tensor, heads_A: Tensor) -> dict[str, Tensor]:
    """Query heads leave q_proj and o_proj; keys and values lose hidden channels only."""
    queries = _within_heads(heads_A, torch.arange(full.head_dim, device=heads_A.device), full.head_dim)
    return {
        "mixer.q_proj.weight": block["mixer.q_proj.weight"][queries][:, hidden_D],
        "mixer.k_proj.weight": block["mixer.k_proj.weight"][:, hidden_D],
        "mixer.v_proj.weight": block["mixer.v_proj.weight"][:, hidden_D],
        "mixer.o_proj.weight": block["mixer.o_proj.weight"][hidden_D][:, queries],
    }


def _mlp(block: dict[str, Tensor], hidden_D: Tensor, neurons_F: Tensor) -> dict[str, Tensor]:
    return {
        "mixer.up_proj.weight": block["mixer.up_proj.weight"][neurons_F][:, hidden_D],
        "mixer.down_proj.weight": block["mixer.down_proj.weight"][hidden_D][:, neurons_F],
    }


def _within_heads(heads: Tensor, channels: Tensor, head_dim: int) -> Tensor:
    """Indices of these channels of these heads where heads lie one after the other."""
    return (heads[:, None] * head_dim + channels).flatten()
