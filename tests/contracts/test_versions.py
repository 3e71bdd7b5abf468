"""Versions of libraries in the words of scripts, configs and pages, against those that contracts are checked with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from sources import pins

ROOT = Path(__file__).parents[2]
NEMO_RL = json.loads(Path(__file__).with_name("nemo_rl_schema.json").read_text(encoding="utf-8"))["nemo_rl"]["version"]
PINNED = {"nemo-rl": NEMO_RL} | dict(pin.split("==") for pin in pins())
NAMES = {  # distribution -> what else it is called
    "megatron-bridge": "Megatron-Bridge", "megatron-core": "Megatron-Core", "nemo-rl": "NeMo-RL",
    "nvidia-modelopt": "ModelOpt|Model Optimizer", "nemo-gym": "NeMo Gym", "nemo-automodel": "AutoModel",
    "data-designer-config": "Data Designer|data-designer", "nemo-curator": "Curator",
    "nvidia-resiliency-ext": "NVRx", "nemo-evaluator-launcher": "nemo-evaluator-launcher",
}  # fmt: skip
FOLDERS, ENDS = ("src", "docs", "examples", "tests", "benchmarks"), (".py", ".md", ".yaml", ".toml")


def faults(text: str) -> Iterator[str]:
    """Versions behind a library's name that are not the pinned one, nor its beginning."""
    for distribution, words in NAMES.items():
        for found in re.finditer(rf"\b({words}|{distribution})(?: |==| v)(\d+(?:\.\d+)+)", text):
            if not f"{PINNED[distribution]}.".startswith(f"{found[2]}."):
                yield found[0]


def test_every_pinned_library_has_a_name() -> None:
    assert set(NAMES) == set(PINNED)


def test_the_versions_that_are_spoken_of_are_the_pinned_ones() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in ENDS]
    texts = {file: file.read_text(encoding="utf-8") for file in (*files, ROOT / "README.md", ROOT / "Makefile")}
    assert len([file for file, text in texts.items() if "Megatron-Bridge 0.6.2" in text]) > 10
    found = {str(file.relative_to(ROOT)): list(faults(text)) for file, text in texts.items() if file != Path(__file__)}
    assert {file: each for file, each in found.items() if each} == {}


def test_a_planted_version_is_found() -> None:
    text = (
        "Megatron-Bridge 0.6.2, megatron-core 0.19, ModelOpt 0.47, Model Optimizer 0.47.0, nemo-gym==0.4.0, NeMo-RL 0.7"
    )
    assert list(faults(text)) == []
    planted = text.replace("core 0.19", "core 0.18").replace("Optimizer 0.47.0", "Optimizer 0.47.1")
    planted = planted.replace("gym==0.4.0", "gym==0.4.01").replace("RL 0.7", "RL v0.6.0")
    assert list(faults(planted)) == [
        "megatron-core 0.18", "NeMo-RL v0.6.0", "Model Optimizer 0.47.1", "nemo-gym==0.4.01",
    ]  # fmt: skip
