"""`quantize_modelopt.py` as a user runs it, with ModelOpt's real code, on a tiny model and a CPU, beside `quantize.py`.

ModelOpt lives in an environment that `make test-ecosystem` makes, as it wants another transformers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import nemotron.recipes
from nemo_runspec.artifacts import Registry
from nemotron.data_prep.chat.pack import write_rows
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import Model, SFTPack
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.quantization.export import load_model

PYTHON = Path(__file__).parents[2] / ".venv-modelopt/bin/python"
RECIPES = Path(nemotron.recipes.__file__).parent
LENGTH = 64
# Of the default configs, what a CPU and a tiny model need; the sweep of NVFP4 scales runs on a GPU alone.
ON_A_CPU = [
    "run.model=start:1", "run.data=pack:1", "dataset.calib_size=8", f"dataset.seq_length={LENGTH}",
    "algorithm.method=max", "algorithm.fp8_scale_sweep=false",
]  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="ModelOpt is not here: `make test-ecosystem`"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with a tiny Super 3 and rows of a pack."""
    folder = tmp_path_factory.mktemp("modelopt")
    start, pack = folder / "start", folder / "pack"
    tokenizer = train_tokenizer(["Is 12 odd? yes no perhaps"], 400)
    save_tokenizer(tokenizer, start, model_max_length=LENGTH, template="super3")
    torch.manual_seed(0)
    config = NemotronHConfig(
        "MEM*E", vocab_size=tokenizer.get_vocab_size(), hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=1, chunk_size=16,
        n_routed_experts=4, moe_intermediate_size=32, moe_shared_expert_intermediate_size=64, moe_latent_size=32,
        num_nextn_predict_layers=1,
    )  # fmt: skip
    NemotronH(config).save_pretrained(start)
    ids = np.random.default_rng(0).integers(20, tokenizer.get_vocab_size(), (24, LENGTH), dtype=np.int32)
    rows = [(row, np.ones(LENGTH, np.uint8)) for row in ids]
    for split in ("train", "valid"):
        write_rows(pack / split / "rows.parquet", rows, LENGTH, concatenate=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(folder / "artifacts"))
        Model(path=start, num_steps=7, tokenizer_path=start, chat_template="super3", reasoning=True).save("start")
        SFTPack(
            path=pack, num_examples=24, train_path=pack / "train", valid_path=pack / "valid", tokenizer_path=start,
            seq_len=LENGTH, chat_template="super3",
        ).save("pack")  # fmt: skip
    return folder


def quantised(folder: Path, python: Path | str, script: str, config: str, *words: str) -> tuple[Path, dict[str, Any]]:
    """What a script publishes: its payload, and its record."""
    environment = os.environ | {
        "RUNSPEC_ARTIFACTS_ROOT": str(folder / "artifacts"), "RUNSPEC_OUTPUT_ROOT": str(folder / "output"),
        "PYTHONPATH": str(RECIPES.parents[1]), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [str(python), str(RECIPES / script), "--config", config, *words]
    result = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    version = Registry(folder / "artifacts").resolve(json.loads(result.stdout.splitlines()[-1])["model"])
    return version.path, version.record


def tensors(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def layers(path: Path) -> dict[str, str]:
    """Layers that a directory says are quantised -> format; all experts of a block as one, as ModelOpt has them."""
    quantization = json.loads((path / "hf_quant_config.json").read_text())["quantization"]
    layers = quantization["quantized_layers"].items()
    return {re.sub(r"experts\.\d+\..*", "experts", name): layer["quant_algo"] for name, layer in layers}


def test_the_published_table_makes_the_same_directory_as_the_embedded_script(folder: Path) -> None:
    script = "super3/stage3_quantize/quantize_modelopt.py"
    theirs, record = quantised(folder, PYTHON, script, "default", *ON_A_CPU)
    ours, own_record = quantised(
        folder, sys.executable, "super3/stage3_quantize/quantize.py", "smoke", "run.model=start:1", "run.data=pack:1",
        "weight_scales=max", "evaluation.tasks_per_family=0",
    )  # fmt: skip
    their_tensors, our_tensors = tensors(theirs), tensors(ours)
    assert their_tensors.keys() == our_tensors.keys()
    for name, tensor in their_tensors.items():
        assert tensor.shape == our_tensors[name].shape, name
    for name, tensor in their_tensors.items():
        if tensor.dtype == torch.uint8:  # NVFP4, two codes a byte
            assert torch.equal(tensor, our_tensors[name]), name
        elif tensor.dtype == torch.float8_e4m3fn and name.endswith(".weight"):  # ModelOpt divides in bf16, we in fp32
            steps = tensor.view(torch.int8).int() - our_tensors[name].view(torch.int8).int()
            assert steps.abs().max() <= 1 and steps.ne(0).float().mean() < 0.1, name
        else:
            torch.testing.assert_close(tensor.float(), our_tensors[name].float(), rtol=0.02, atol=0)
    assert sum(tensor.dtype == torch.uint8 for tensor in their_tensors.values()) == 2 * 4 * 2  # of 2 blocks, 4 experts
    assert layers(theirs) == layers(ours) and set(layers(ours).values()) == {"FP8", "NVFP4"}
    for path in (theirs, ours):  # multi-token prediction, which is in bf16
        assert "mtp*" in json.loads((path / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
        assert "mtp*" in json.loads((path / "config.json").read_text())["quantization_config"]["ignore"]
    assert load_model(theirs).num_parameters() == load_model(ours).num_parameters()
    assert record["type"] == "QuantizedModel" and record["fields"]["quant_algo"] == "MIXED_PRECISION"
    assert record["fields"]["num_parameters"] == own_record["fields"]["num_parameters"]
    assert record["fields"]["num_steps"] == 7 and record["inputs"]["model"].startswith("start:1@")
    # Distilled on, its record has the sizes that ModelOpt's has not.
    distilled, record = quantised(
        folder, sys.executable, "super3/stage3_quantize/qad.py", "smoke", f"run.model={theirs.parents[1].name}",
        "run.data=pack:1", "evaluation.tasks_per_family=0",
    )  # fmt: skip
    assert layers(distilled) == layers(theirs) and record["metrics"]["bytes"]


def test_nano3s_table_leaves_the_mamba_block_before_attention_alone(folder: Path) -> None:
    config = str(RECIPES / "nano3/stage4_quantize/config/default.yaml")
    path, _ = quantised(folder, PYTHON, "super3/stage3_quantize/quantize_modelopt.py", config, *ON_A_CPU)
    in_proj = {index: tensors(path)[f"backbone.layers.{index}.mixer.in_proj.weight"].dtype for index in (0, 2)}
    assert in_proj == {0: torch.float8_e4m3fn, 2: torch.bfloat16}  # MEM*E: block 2 is right before attention
