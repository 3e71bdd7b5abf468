"""Activation checkpointing (Chen et al. 2016): keep a block's input only, and compute the block again for its gradient.

A third more arithmetic for much less memory. Results stay the same to the bit: the second pass does what the first did.
Names are Megatron-Core's `recompute_granularity` and `recompute_modules`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from nemotron.stack.models import NemotronH

SYMBOLS = {"mamba": "M", "attention": "*", "moe": "E", "mlp": "-"}


def recompute_activations(
    model: NemotronH, granularity: Literal["full", "selective"] | None, modules: Iterable[str] = ("mamba",)
) -> None:
    """Choose the blocks whose activations are recomputed in the backward pass.

    Args:
        granularity: "full" every block, "selective" those of the kinds in `modules`, None none.
        modules: of `SYMBOLS`: mamba, attention, moe, mlp. ValueError for another.
    """
    if unknown := sorted(set(modules) - set(SYMBOLS)):
        raise ValueError(f"recompute_modules {unknown}: {', '.join(SYMBOLS)} expected")
    chosen = {None: "", "full": "M*E-", "selective": "".join(SYMBOLS[name] for name in modules)}[granularity]
    symbols, blocks = model.config.hybrid_override_pattern, model.blocks()
    if model.mtp is not None:
        symbols, blocks = symbols + model.config.mtp_hybrid_override_pattern, [*blocks, *model.mtp.blocks()]
    for symbol, block in zip(symbols, blocks, strict=True):
        block.recompute = symbol in chosen
