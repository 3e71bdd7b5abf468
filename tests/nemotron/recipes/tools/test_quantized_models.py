"""What the tools do with a quantised model: they add it as it is, and do not export it again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import UserError
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import QuantizedModel
from nemotron.recipes.tools import add_model, model_export
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.published.config_json import load_config
from nemotron.stack.quantization.export import save_quantized
from nemotron.stack.quantization.layers import Amax, quantize

PLAN = {"backbone.layers.0.mixer.up_proj": "W4A16_NVFP4", "backbone.layers.0.mixer.down_proj": "W4A16_NVFP4"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A quantised model with a tokenizer."""
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "artifacts"))
    tokenizer = train_tokenizer(["one two three"], 300)
    save_tokenizer(tokenizer, tmp_path / "model", model_max_length=64, template="nano3")
    torch.manual_seed(0)
    config = NemotronHConfig("-", vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=32)
    model = NemotronH(config)
    save_quantized(tmp_path / "model", model, quantize(model, {**PLAN}, Amax({}, {}), "max", "FP32"))  # type: ignore[arg-type]
    return tmp_path / "model"


def test_a_quantised_directory_is_added(folder: Path) -> None:
    vocabulary = load_config(folder).vocab_size
    # Embedding and head, up and down, two norms: values, not codes.
    assert add_model.check(folder) == (2 * 32 * vocabulary + 2 * 32 * 32 + 2 * 32,) * 2
    add_model.main(add_model.Options(str(folder), "added"))
    added = Registry.default().resolve("added").path
    assert {file.name for file in added.iterdir()} == {file.name for file in folder.iterdir()}


def test_a_damaged_one_is_not(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match="is damaged: its content differs from its sha256"):
        add_model.check(folder)


def test_it_is_not_exported_again(folder: Path, tmp_path: Path) -> None:
    artifact = QuantizedModel(
        path=folder, num_steps=0, tokenizer_path=folder, quant_algo="W4A16_NVFP4", full_path=folder
    ).save("small")
    with pytest.raises(UserError, match="small:1 is quantised, and its folder is what engines read") as refused:
        model_export.export(artifact, tmp_path / "out", None, 10**9)
    assert refused.value.hint == f"copy {artifact.path}"
