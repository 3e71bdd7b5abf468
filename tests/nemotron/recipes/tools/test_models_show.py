"""The script behind `models show`: where it finds a model, and what it says of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import UserError
from nemotron.recipes.tools import models_show
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.published.config_json import config_from_dict
from nemotron.stack.models.published.presets import PRESETS

TINY = NemotronHConfig("ME*-", vocab_size=64)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry with the model `mine`, whose version 2 is wider, and a data set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "artifacts"))
    registry = Registry(tmp_path / "artifacts")
    record = {"type": "Model", "fields": {}, "metrics": {}, "inputs": {}}
    for hidden_size in (128, 256):
        folder = tmp_path / f"model{hidden_size}"
        folder.mkdir()
        (folder / "config.json").write_text(
            json.dumps({"model_type": "nemotron_h", **TINY.to_dict(), "hidden_size": hidden_size})
        )
        registry.publish("mine", folder, record)
    (tmp_path / "tokens.bin").write_bytes(b"tokens")
    registry.publish("mine-data", tmp_path / "tokens.bin", record)
    return registry


def test_a_model_is_a_preset_a_directory_or_an_artifact(registry: Registry, tmp_path: Path) -> None:
    assert models_show.find_model("nano3-30b") == ("preset nano3-30b", PRESETS["nano3-30b"])
    assert models_show.find_model("model128") == ("model128", TINY)
    assert models_show.find_model(str(tmp_path / "model128"))[1] == TINY
    assert models_show.find_model("mine:1") == ("artifact mine:1", TINY)
    for name in ("mine", "mine:latest", "art://mine", "art://mine:2"):
        found, config = models_show.find_model(name)
        assert (found, config.hidden_size) == ("artifact mine:2", 256)


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("nano3_30b", "no preset, directory or artifact 'nano3_30b'", "did you mean nano3-30b?"),
        ("mien", "no preset, directory or artifact 'mien'", "did you mean mine?"),
        ("mine:7", "mine has no version 7", ""),
        ("art://other", "no artifact 'other'", ""),
        ("mine-data", "artifact mine-data:1 is no model", ""),
        ("artifacts", "artifacts is not a model directory: there is no config.json", ""),
        ("./model9", "model9 is not a model directory: there is no config.json", ""),
    ],
)
def test_what_is_no_model_is_refused(registry: Registry, name: str, message: str, hint: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as error:
        models_show.find_model(name)
    assert hint in (error.value.hint or "")


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    with pytest.raises(UserError, match='model_type is "llama"'):
        models_show.find_model(str(tmp_path))


@pytest.mark.parametrize("name", PRESETS)
def test_the_page_fits_a_terminal(name: str) -> None:
    lines = models_show.page(name, PRESETS[name], 1_048_576).splitlines()
    assert max(map(len, lines)) <= 80
    pattern = PRESETS[name].hybrid_override_pattern
    assert pattern in "".join(lines)


def test_the_page_of_super() -> None:
    words = " ".join(models_show.page("preset super3-120b", PRESETS["super3-120b"], 8192).split())
    for said in (
        "M 40 Mamba-2 128 heads of 64, state 128",
        "* 8 attention 32 query, 2 KV heads of 128",
        "E 40 router 512 scores 83.886 M",
        "routed experts 22 of 512, width 2,688",
        "latent projections 4,096 to 1,024 and back",
        "all with input embedding 120.669 B 12.770 B without 12.233 B",
        "MTP block *E, each of 2 applications 2.942 B 244.863 M",
        "fp32 bf16 fp8 nvfp4 model 483 GB 241 GB 121 GB 67.9 GB",
        "training state 1.98 TB 16 B a parameter",  # 16 x 123.611 B
        "KV cache 8,192 B a token, bf16; 67.1 MB for 8,192 tokens",  # 8 blocks x 2 x 2 heads x 128 x 2 bytes
        "SSM state 168 MB a sequence, fp32",  # 40 blocks x 8192 x 128 x 4 bytes
    ):
        assert said in words
    assert "dense MLP" not in words


def test_what_a_model_does_not_have_is_not_shown() -> None:
    page = models_show.page("preset nano2-9b", PRESETS["nano2-9b"], 8192)
    assert "dense MLP" in page
    assert not re.search("expert|router|latent|MTP", page)


def test_json_holds_the_numbers_of_a_real_model(registry: Registry) -> None:
    done = subprocess.run(
        [sys.executable, models_show.__file__, '{"name": "mine:1", "as_json": true, "seq_length": 100}'],
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout)
    model = NemotronH(TINY)
    assert config_from_dict(told["config"]) == TINY
    assert told["blocks"] == {"M": 1, "*": 1, "E": 1, "-": 1}
    assert (told["parameters"]["total"], told["parameters"]["active"]) == model.num_parameters()
    assert told["weight_bytes"]["fp32"] == sum(p.nbytes for p in model.parameters())
    assert told["mtp_parameters"] is None and told["mtp_flops_per_token"] == 0
    assert told["training_flops_per_token"] == 3 * told["forward_flops_per_token"]


@pytest.mark.parametrize(
    ("number", "said"), [(7.5e9, "7.5 GFLOP"), (1.234e12, "1.23 TFLOP"), (41_000_000, "41 MFLOP"), (999, "999 FLOP")]
)
def test_flops(number: float, said: str) -> None:
    assert models_show.flop(number) == said


def test_the_script_loads_no_torch() -> None:
    code = (
        "import runpy, sys\n"
        """sys.argv = ['models_show.py', '{"name": "nano3-30b", "as_json": false, "seq_length": 8192}']\n"""
        f"try:\n    runpy.run_path({models_show.__file__!r}, run_name='__main__')\n"
        "except SystemExit as leave:\n    assert not leave.code\n"
        "assert not {'torch', 'numpy', 'omegaconf', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
