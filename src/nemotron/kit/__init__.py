"""Shared by all recipe scripts: artifact types, the run, metrics, lineage, pipes, scales, chat templates. No torch.

Names are loaded on first use, so that `nemotron artifacts lineage` does not wait for pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemotron.kit.artifact import Artifact as Artifact
    from nemotron.kit.artifact import Checkpoint as Checkpoint
    from nemotron.kit.artifact import Dataset as Dataset
    from nemotron.kit.artifact import Model as Model
    from nemotron.kit.artifact import Preferences as Preferences
    from nemotron.kit.artifact import PretrainBlend as PretrainBlend
    from nemotron.kit.artifact import Producer as Producer
    from nemotron.kit.artifact import QuantizedModel as QuantizedModel
    from nemotron.kit.artifact import Results as Results
    from nemotron.kit.artifact import RLPrompts as RLPrompts
    from nemotron.kit.artifact import SFTPack as SFTPack
    from nemotron.kit.artifact import Source as Source
    from nemotron.kit.lineage import MlflowTracker as MlflowTracker
    from nemotron.kit.lineage import WandbTracker as WandbTracker
    from nemotron.kit.lineage import set_lineage_tracker as set_lineage_tracker
    from nemotron.kit.metrics import MetricsLog as MetricsLog
    from nemotron.kit.metrics import Progress as Progress
    from nemotron.kit.pipes import print_complete as print_complete
    from nemotron.kit.pipes import read_pipe as read_pipe
    from nemotron.kit.run import Run as Run
    from nemotron.kit.run import current_run as current_run
    from nemotron.kit.run import open_run as open_run
    from nemotron.kit.scale import apply_scale as apply_scale
    from nemotron.kit.scale import share_of as share_of
    from nemotron.kit.schemas.group import Scale as Scale
    from nemotron.kit.schemas.group import Seed as Seed
    from nemotron.kit.schemas.group import UserPath as UserPath

_HOMES = {
    "artifact": "Artifact Checkpoint Dataset Model Preferences PretrainBlend Producer QuantizedModel Results RLPrompts "
    "SFTPack Source",
    "lineage": "MlflowTracker WandbTracker set_lineage_tracker",
    "metrics": "MetricsLog Progress",
    "pipes": "print_complete read_pipe",
    "run": "Run current_run open_run",
    "scale": "apply_scale share_of",
    "schemas.group": "Scale Seed UserPath",
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
