"""Where the recipe folders are: beside this package, wherever it is installed, never in the current directory."""

from __future__ import annotations

from pathlib import Path

from nemotron.kit.steps import RECIPES


def recipe_dir(name: str) -> Path:
    """Absolute path of a recipe folder, as in `recipe_dir("nano3/stage0_pretrain")`. Nothing is imported or read."""
    return RECIPES / name
