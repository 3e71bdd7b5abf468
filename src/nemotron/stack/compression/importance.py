"""What each unit of a model matters, from activations on calibration rows (Minitron, arXiv 2407.14679, section 2).

Widths need forward passes only, one a batch. The score of a unit is sqrt(sum over rows of (mean over positions of
|activation|)^2): the mean within a row, the L2 norm over rows, so that it does not depend on how rows are batched.
Depth is scored in two ways, by what the logits lose without a block, and by how little a block turns its input.

Rows hold one document each, or several that read each other: nothing here looks at boundaries. Next: `search.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_runspec.errors import UserError
from nemotron.stack.models.attention import Attention
from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.layers import MLP, at_least_fp32
from nemotron.stack.models.mamba2 import Mamba2
from nemotron.stack.models.nemotron_h import NemotronH

# Shapes: B batch, L length, D hidden, V vocabulary, F width of the MLP, A query heads, X their head_dim, H Mamba heads,
# P their head_dim, I = H P.

Record = Callable[[str, int, Tensor], None]


@dataclass(frozen=True)
class Importance:
    """Scores, float64, larger matters more. Dictionaries go by the index of the block in the pattern.

    hidden_D: of the residual stream's channels. ffn_F: of the neurons of each `-` block. attention_A: of the query
    heads of each `*` block. mamba_HP: of the heads' channels of each `M` block; heads and channels are ranked from it.
    """

    hidden_D: Tensor
    ffn_F: dict[int, Tensor]
    attention_A: dict[int, Tensor]
    mamba_HP: dict[int, Tensor]


def refuse_what_is_not_pruned(config: NemotronHConfig) -> None:
    """UserError: a model with experts or with multi-token prediction."""
    if "E" in config.hybrid_override_pattern:
        raise UserError(
            f"hybrid_override_pattern {config.hybrid_override_pattern}: experts (E) are not pruned",
            "compress a model of M, * and - blocks, as Nemotron Nano 2 is",
        )
    if config.num_nextn_predict_layers:
        raise UserError(
            "num_nextn_predict_layers 1: multi-token prediction is not pruned",
            "compress a model without it (num_nextn_predict_layers 0)",
        )


@torch.no_grad()
def measure_importance(model: NemotronH, batches: Iterable[Tensor]) -> Importance:
    """Scores of all widths from one pass over `batches`, int64 token ids [B, L] each.

    - hidden: the output of each block's norm, summed over blocks; the final norm is not among them
    - FFN neurons: the input of `down_proj`
    - query heads: the input of `o_proj`, then the L2 norm over head_dim
    - Mamba heads and channels: the x part of `in_proj`'s output only, before the convolution (arXiv 2504.11409)

    Raises:
        UserError: experts, multi-token prediction, or no batch.
    """
    refuse_what_is_not_pruned(model.config)
    squares: dict[tuple[str, int], Tensor] = {}  # sum over rows of the squared mean, float64

    def record(name: str, index: int, x_BLN: Tensor) -> None:
        square_N = at_least_fp32(x_BLN).abs().mean(1).double().square().sum(0)
        squares[name, index] = squares[name, index] + square_N if (name, index) in squares else square_N

    handles = []
    for index, block in enumerate(model.blocks()):
        handles.append(block.norm.register_forward_hook(_on_output(record, "hidden", index)))
        mixer = block.mixer
        if isinstance(mixer, MLP):
            handles.append(mixer.down_proj.register_forward_pre_hook(_on_input(record, "ffn", index)))
        elif isinstance(mixer, Attention):
            handles.append(mixer.o_proj.register_forward_pre_hook(_on_input(record, "attention", index)))
        elif isinstance(mixer, Mamba2):
            x_part = slice(mixer.inner_size, 2 * mixer.inner_size)  # z | x | B | C | dt
            handles.append(mixer.in_proj.register_forward_hook(_on_output(record, "mamba", index, x_part)))
    try:
        for input_ids_BL in batches:
            model.hidden_states(input_ids_BL, None)
    finally:
        for handle in handles:
            handle.remove()
    if not squares:
        raise UserError("no calibration rows", "importances are measured on one batch of token ids at least")

    scores: dict[str, dict[int, Tensor]] = {"hidden": {}, "ffn": {}, "attention": {}, "mamba": {}}
    for (name, index), square_N in squares.items():
        scores[name][index] = square_N.sqrt()
    config = model.config
    return Importance(
        hidden_D=torch.stack(list(scores["hidden"].values())).sum(0),
        ffn_F=scores["ffn"],
        attention_A={i: s.unflatten(0, (-1, config.head_dim)).norm(dim=-1) for i, s in scores["attention"].items()},
        mamba_HP={i: s.unflatten(0, (-1, config.mamba_head_dim)) for i, s in scores["mamba"].items()},
    )


def _on_output(record: Record, name: str, index: int, part: slice = slice(None)) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        record(name, index, output[..., part])

    return hook


def _on_input(record: Record, name: str, index: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        record(name, index, args[0])

    return hook


@dataclass(frozen=True)
class Removal:
    """A block that was taken out, and the mean squared error of the logits without it and those before it."""

    block: int
    error: float


@torch.no_grad()
def removal_errors(model: NemotronH, batches: Iterable[Tensor], removed: Sequence[int] = ()) -> dict[int, float]:
    """Of each block that is not yet removed: mean squared error of the logits without it, against the whole model's.

    Blocks are skipped, and nothing is trained. The mean is over all logits of all batches (int64 [B, L] each).
    """
    refuse_what_is_not_pruned(model.config)
    blocks = [i for i in range(len(model.config.hybrid_override_pattern)) if i not in removed]
    sums, count = dict.fromkeys(blocks, 0.0), 0
    for input_ids_BL in batches:
        x_BLD = model.backbone.embeddings(input_ids_BL)
        whole_BLV = _logits(model, x_BLD, range(len(model.config.hybrid_override_pattern)))
        count += whole_BLV.numel()
        for position, block in enumerate(blocks):  # x is the input of this block, which all that precede it share
            logits_BLV = _logits(model, x_BLD, blocks[position + 1 :])
            sums[block] += (logits_BLV - whole_BLV).square_().sum(dtype=torch.float64).item()
            x_BLD, _ = model.blocks()[block](x_BLD)
    if not count:
        raise UserError("no calibration rows", "errors are measured on one batch of token ids at least")
    return {block: total / count for block, total in sums.items()}


def _logits(model: NemotronH, x_BLD: Tensor, blocks: Sequence[int]) -> Tensor:
    """What the given blocks, the final norm and the head make of x, [B, L, V], fp32 at least."""
    for block in blocks:
        x_BLD, _ = model.blocks()[block](x_BLD)
    return at_least_fp32(model.lm_head(model.backbone.norm_f(x_BLD)))


def remove_iteratively(
    model: NemotronH,
    batches: Sequence[Tensor],
    count: int,
    at_least: Mapping[str, int] | None = None,
    errors: Mapping[int, float] | None = None,
) -> list[Removal]:
    """Take out, `count` times, the block without which the logits change least; measure the others again each time.

    Nemotron Nano 2 (arXiv 2508.14444, section on pruning) went from 62 blocks to 56 so. An error is that of all blocks
    removed so far against the whole model.

    Args:
        at_least: how many blocks of a symbol have to stay, as in {"*": 4}.
        errors: of the first time, `removal_errors` of the whole model, where the caller has measured them.

    Raises:
        UserError: more blocks to remove than may go.
    """
    pattern, removals = model.config.hybrid_override_pattern, list[Removal]()
    for _ in range(count):
        removed = [removal.block for removal in removals]
        left = "".join(symbol for i, symbol in enumerate(pattern) if i not in removed)
        fixed = {symbol for symbol in left if left.count(symbol) <= (at_least or {}).get(symbol, 0)}
        if len(left) == 1 or set(left) <= fixed:
            raise UserError(
                f"{count} blocks to remove from {pattern}, and only {len(removals)} may go",
                "remove fewer, or let fewer stay of each symbol; one block stays at least",
            )
        if removed or errors is None:
            errors = removal_errors(model, batches, removed)
        best = min((i for i in errors if pattern[i] not in fixed), key=errors.__getitem__)
        removals.append(Removal(best, errors[best]))
    return removals


@torch.no_grad()
def cosine_distances(model: NemotronH, batches: Iterable[Tensor]) -> dict[int, float]:
    """Of each block: sum over tokens of 1 - cos(its input, its output). One pass, where removal takes one a block.

    A block that scores low hardly turns the residual stream (arXiv 2403.03853, section 3.1, "block influence").
    """
    refuse_what_is_not_pruned(model.config)
    sums = dict.fromkeys(range(len(model.config.hybrid_override_pattern)), 0.0)
    for input_ids_BL in batches:
        x_BLD = model.backbone.embeddings(input_ids_BL)
        for index, block in enumerate(model.blocks()):
            out_BLD, _ = block(x_BLD)
            # In float64: cos is near 1, and 1 - cos loses the digits that it has in common with 1.
            sums[index] += (1 - F.cosine_similarity(x_BLD.double(), out_BLD.double(), dim=-1)).sum().item()
            x_BLD = out_BLD
    return sums


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation, in [-1, 1]: Pearson's of the ranks, where equal values share their mean rank.

    NaN where all values of one side are equal. Says whether two scores of depth would remove the same blocks. scipy has
    it, too, and is no dependency.
    """
    ranks = []
    for values in (first, second):
        x_N = torch.tensor(values, dtype=torch.float64)
        below_N, equal_N = (x_N > x_N[:, None]).sum(0), (x_N == x_N[:, None]).sum(0)
        ranks.append(below_N + (equal_N + 1) / 2)
    return float(torch.corrcoef(torch.stack(ranks).double())[0, 1])
