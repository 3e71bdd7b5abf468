"""Nemotron-H in plain PyTorch: the hybrid Mamba-2 / attention / mixture-of-experts model.

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
