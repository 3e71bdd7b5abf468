"""Nano 2 whole, in one process: from raw text to the compressed model, with the sizes of the configs `smoke`."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import nemotron.recipes.nano2
from nemo_runspec.artifacts import Registry

RECIPE = Path(nemotron.recipes.nano2.__file__).parent


def smoke(script: str) -> dict[str, Any]:
    """The values of a script's config `smoke`, `stage0_pretrain/config/training`."""
    values = yaml.safe_load((RECIPE / script / "smoke.yaml").read_text())
    return {key: value for key, value in values.items() if key not in ("defaults", "run")}


SCRIPTS = [
    f"{script.parent.name}.{script.stem}"
    for script in sorted(RECIPE.glob("stage*/*.py"))
    if "[tool.runspec]" in script.read_text()
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_takes_a_scale_and_is_a_page(script: str) -> None:
    module = importlib.import_module(f"nemotron.recipes.nano2.{script}")
    assert "scale" in {field.name for field in dataclasses.fields(module.Config)}
    assert len(Path(module.__file__ or "").read_text().splitlines()) <= 150


@pytest.mark.e2e
@pytest.mark.slow
def test_all_stages_follow_each_other(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        name: {
            "data": smoke(f"{stage}/config/data_curation"),
            "train": smoke(f"{stage}/config/training") if name != "compress" else {},
            "eval": smoke(f"{stage}/config/evaluation"),
        }
        for name, stage in (
            ("pretrain", "stage0_pretrain"),
            ("sft", "stage1_sft"),
            ("rl", "stage2_rl"),
            ("compress", "stage3_compress"),
        )
    }
    config["pretrain"]["long"] = smoke("stage0_pretrain/config/training_long")
    for half in ("prune", "distil"):
        config["compress"]["train"][half] = smoke(f"stage3_compress/config/training_{half}")
    (tmp_path / "sizes.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "nemotron.recipes.nano2", "--scale", "tiny", "--config", "sizes.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(RECIPE.parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)  # and nothing else
    assert line["results"] == "art://nano2-compressed-results:1"
    registry = Registry(tmp_path / "output" / "artifacts")

    def inputs_of(name: str) -> dict[str, str]:
        inputs: dict[str, str] = registry.resolve(name).record["inputs"]
        return {role: pinned.partition(":")[0] for role, pinned in inputs.items()}

    # Each goes on from what the one before it made, as through a pipe.
    assert inputs_of("nano2-pretrain-model")["data"] == "nano2-pretrain-data"
    assert inputs_of("nano2-long-model") == {"model": "nano2-pretrain-model", "data": "nano2-pretrain-data"}
    assert inputs_of("nano2-sft-data")["model"] == "nano2-long-model"
    assert inputs_of("nano2-rl-data")["model"] == "nano2-sft-model"
    assert inputs_of("nano2-compressed-data")["model"] == "nano2-rl-model"
    assert inputs_of("nano2-compressed-results")["model"] == "nano2-compressed-model"
