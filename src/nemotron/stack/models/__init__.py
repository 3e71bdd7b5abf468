"""Nemotron-H in plain PyTorch: the hybrid Mamba-2 / attention / mixture-of-experts model.

Ten files are the model, in this reading order; each is a few pages and ends where the next begins:

    config.py         pattern and dimensions
    layers.py         RMSNorm, squared ReLU, the dense MLP block `-`
    attention.py      the attention block `*`
    mamba2.py         the Mamba-2 block `M`: projections, convolution, gate
    ssd.py            its scan over a sequence, and the gradient of that
    moe.py            the mixture-of-experts block `E`: router, experts, load balancing
    shared_prompt.py  rows of a prompt with several continuations, for RL
    block.py          a block with its norm and residual
    mtp.py            multi-token prediction, for models that have it
    nemotron_h.py     the whole model: embedding, blocks, output head

Beside them, and not needed to understand the forward pass: `kernels/` (the same functions, faster), `decoding/`
(generation with a cache), `published/` (presets, sizes, model directories in Hugging Face layout) and `lora_linear.py`
(a linear layer with an adapter).

Config, presets, parameter counts and memory need no torch, which takes seconds to load: it comes with `NemotronH`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemotron.stack.models.config import NemotronHConfig

if TYPE_CHECKING:
    from nemotron.stack.models.nemotron_h import NemotronH, NemotronHOutput

__all__ = ["NemotronH", "NemotronHConfig", "NemotronHOutput"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nemotron.stack.models import nemotron_h

    return getattr(nemotron_h, name)
