"""The least that may be published as a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_model(folder: Path, value: float = 1.0) -> Path:
    """`config.json` and weights of two equal values in `folder`, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    save_file({"weight": np.full(2, value, np.float32)}, folder / "model.safetensors")
    return folder
