"""Shared by all recipe scripts: artifact types, the run, metrics, lineage, pipes, scales, chat templates. No torch.

Names are loaded on first use, so that `nemotron artifacts lineage` does not wait for pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemotron.kit.artifact import (
        Artifact,
        Checkpoint,
        Dataset,
        Model,
        Preferences,
        PretrainBlend,
        Producer,
        Results,
        RLPrompts,
        SFTPack,
        Source,
    )
    from nemotron.kit.lineage import set_lineage_tracker
    from nemotron.kit.metrics import MetricsLog, Progress
    from nemotron.kit.pipes import print_complete, read_pipe
    from nemotron.kit.run import Run, current_run, open_run
    from nemotron.kit.scale import apply_scale

__all__ = [
    "Artifact",
    "Checkpoint",
    "Dataset",
    "MetricsLog",
    "Model",
    "Preferences",
    "PretrainBlend",
    "Producer",
    "Progress",
    "RLPrompts",
    "Results",
    "Run",
    "SFTPack",
    "Source",
    "apply_scale",
    "current_run",
    "open_run",
    "print_complete",
    "read_pipe",
    "set_lineage_tracker",
]

_HOMES = {
    "lineage": ("set_lineage_tracker",),
    "metrics": ("MetricsLog", "Progress"),
    "pipes": ("print_complete", "read_pipe"),
    "run": ("Run", "current_run", "open_run"),
    "scale": ("apply_scale",),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "artifact")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
