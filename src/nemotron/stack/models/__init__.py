"""Nemotron-H in plain PyTorch: the hybrid Mamba-2 / attention / mixture-of-experts model."""

from nemotron.stack.models.config import NemotronHConfig
from nemotron.stack.models.nemotron_h import NemotronH, NemotronHOutput

__all__ = ["NemotronH", "NemotronHConfig", "NemotronHOutput"]
