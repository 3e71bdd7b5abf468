"""`nano3 model export` and `artifacts add` as a user types them: out of one registry, into another, and then a chat."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.artifacts import Registry
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import Model
from nemotron.kit.megatron import MegatronCheckpoint
from nemotron.stack.models import NemotronH

Nemotron = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_model: Callable[..., NemotronH]) -> Path:
    """A registry with the model `nano3-sft-model-tiny`."""
    folder = tmp_path / "model"
    tokenizer = train_tokenizer([f"What is {i} + {i}? It is {2 * i}." for i in range(50)], 300)
    save_tokenizer(tokenizer, folder, model_max_length=128, template="nano3")
    small_model("M*E", vocab_size=tokenizer.get_vocab_size()).save_pretrained(folder)
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "artifacts"))
    Model(path=folder, num_steps=3, tokenizer_path=folder, sources=["raw"]).save("nano3-sft-model-tiny")
    return tmp_path / "artifacts"


@pytest.mark.slow
def test_out_and_in_again_and_it_answers(artifacts: Path, nemotron: Nemotron, tmp_path: Path) -> None:
    done = nemotron("nano3 model export nano3-sft-model-tiny -o out", RUNSPEC_ARTIFACTS_ROOT=str(artifacts))
    assert done.returncode == 0, done.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(os.listdir(tmp_path / "out"))  # noqa: PTH208
    elsewhere = {"RUNSPEC_ARTIFACTS_ROOT": str(tmp_path / "elsewhere")}
    done = nemotron("artifacts add out --name mine", **elsewhere)
    assert (done.returncode, done.stdout) == (0, "mine:1\n"), done.stderr
    ours = Registry(artifacts).resolve("nano3-sft-model-tiny").path / "model.safetensors"
    assert (
        Registry(tmp_path / "elsewhere").resolve("mine").path / "model.safetensors"
    ).read_bytes() == ours.read_bytes()
    done = nemotron("nano3 chat --model mine --max-new-tokens 4", "What is 1 + 1?", **elsewhere)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("model export checkpoint -o out", "checkpoint:1 is a Megatron checkpoint: say --like hf://ORG/NAME"),
        ("model export checkpoint --like hf://a/b", "say -o DIRECTORY"),
        ("model export checkpoint -o out --like hf://a/b", "megatron-bridge, which converts it, is not installed"),
        ("model export checkpoint -o out --like hf://a/b --push hf://c/d", "--push: not of checkpoint:1"),
        ("model export nano3-sft-model-tiny -o out --like hf://a/b", "is no artifact with a Megatron checkpoint"),
        ("model import checkpoint --name mine", "checkpoint:1 is a Megatron checkpoint already"),
        ("model import nano3-sft-model-tiny --name mine", "megatron-bridge, which converts it, is not installed"),
        ("model import nano3-sft-model-tinny --name mine", "did you mean nano3-sft-model-tiny?"),
    ],
)
def test_what_megatron_bridge_converts(
    artifacts: Path, here: Nemotron, tmp_path: Path, line: str, message: str
) -> None:
    saved = tmp_path / "iter_0000200"
    saved.mkdir()
    for name in ("__0_0.distcp", ".metadata"):
        (saved / name).write_bytes(b"weights")
    MegatronCheckpoint(path=saved, num_steps=200).save("checkpoint", registry=Registry(artifacts))
    done = here(f"nano3 {line}", RUNSPEC_ARTIFACTS_ROOT=str(artifacts))
    assert done.returncode == 2 and message in done.stderr


def test_an_unknown_name_is_refused_before_torch_is_loaded(artifacts: Path, here: Nemotron) -> None:
    done = here("nano3 model export nano3-sft-model-tinny -o out", RUNSPEC_ARTIFACTS_ROOT=str(artifacts))
    assert done.returncode == 2 and "did you mean nano3-sft-model-tiny?" in done.stderr


@pytest.mark.parametrize(
    ("line", "script", "options"),
    [
        (
            "nano3 model export nano3-sft-model-tiny -o out --dtype bfloat16 --max-shard-size=1GB --force",
            "model_export.py",
            {
                "model": "nano3-sft-model-tiny:1",
                "output": "out",
                "push": None,
                "dtype": "bfloat16",
                "max_shard_size": "1GB",
                "force": True,
            },
        ),
        (
            "artifacts add hf://a/b@v1",
            "add_model.py",
            {"place": "hf://a/b@v1", "name": None},
        ),
    ],
)
def test_the_script_gets_the_options(
    artifacts: Path,
    tool: Callable[..., tuple[str, dict[str, Any], dict[str, str]]],
    line: str,
    script: str,
    options: dict[str, Any],
) -> None:
    assert tool(*line.split())[:2] == (script, options)
