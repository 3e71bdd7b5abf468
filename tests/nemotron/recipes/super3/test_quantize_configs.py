"""Configs of quantisation: every table is the published one, and each step reads what the one before wrote."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

import nemotron.recipes
from nemo_runspec.config.loader import load_config
from nemo_runspec.errors import UserError
from nemotron.kit.schemas.quantization import PrecisionConfig
from nemotron.recipes.super3.stage3_quantize.qad_schema import QADConfig
from nemotron.recipes.super3.stage3_quantize.quantize import search_plan
from nemotron.recipes.super3.stage3_quantize.schema import AutoQuantizeConfig, QuantizeConfig
from nemotron.stack.models.published.presets import PRESETS

RECIPES = Path(nemotron.recipes.__file__).parent
SUPER3, NANO3 = RECIPES / "super3/stage3_quantize/config", RECIPES / "nano3/stage4_quantize/config"
# The columns of docs/super3/quantization.md, of the released checkpoint (ModelOpt's nvfp4-mse.yaml), and of Nano 3.
ALWAYS = {
    "embedding": "BF16", "lm_head": "BF16", "conv1d": "BF16", "attention_qkv": "BF16", "attention_out": "BF16",
    "latent_proj": "BF16", "router": "FP32", "mlp": "BF16", "mtp": "BF16", "kv_cache": "FP8",
    "mamba_before_attention": None,
}  # fmt: skip
EXPERTS = ("routed_experts", "shared_experts")
MAMBA = ("mamba_in_proj", "mamba_out_proj")
RELEASED = {"routed_experts": "NVFP4", "shared_experts": "FP8", **dict.fromkeys(MAMBA, "FP8"), "ssm_state": "FP32"}
TABLES: dict[tuple[Path, str], tuple[dict[str, Any], str]] = {
    (SUPER3, "tiny"): (RELEASED, "mse"),
    (SUPER3, "tiny-autoquantize"): (RELEASED, "mse"),
    (SUPER3, "tiny-fp8"): (dict.fromkeys((*EXPERTS, *MAMBA), "FP8") | {"ssm_state": "FP16"}, "max"),
    (SUPER3, "tiny-document"): (
        dict.fromkeys((*EXPERTS, *MAMBA), "NVFP4") | {"ssm_state": "FP16_stochastic"}, "mse"
    ),
    (NANO3, "tiny"): (
        dict.fromkeys((*EXPERTS, *MAMBA), "FP8") | {"mamba_before_attention": "BF16", "ssm_state": "FP32"}, "max"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("folder", "name"), TABLES, ids=lambda value: getattr(value, "parts", ["", "", value])[-3])
def test_tables_are_the_published_ones(folder: Path, name: str) -> None:
    data = load_config(folder, name, ()).data
    table, scales = TABLES[folder, name]
    assert PrecisionConfig.model_validate(data["precision"]).model_dump() == ALWAYS | table
    assert data["weight_scales"] == scales


def test_autoquantize_searches_what_the_documentation_leaves_open() -> None:
    data = load_config(SUPER3, "tiny-autoquantize", ()).data
    assert data["auto_quantize"]["effective_bits"] == 4.75
    assert data["auto_quantize"]["layers"] == [*EXPERTS, *MAMBA]
    assert data["auto_quantize"]["quant_algos"] == ["NVFP4", "FP8"]  # and BF16


def test_a_search_in_layers_that_the_model_lacks_is_refused() -> None:
    data = load_config(SUPER3, "tiny-autoquantize", ()).data
    data["auto_quantize"]["layers"] = ["mlp"]
    del data["run"]["family"]  # known to every config without being declared
    data["dataset"]["path"] = data["checkpoint"]["pretrained_checkpoint"] = "x"
    model: Any = SimpleNamespace(config=PRESETS["super3-120b"])
    nothing: Any = None
    with pytest.raises(UserError, match=r"auto_quantize.layers = \['mlp'\]: the model has no such layer"):
        search_plan(QuantizeConfig.model_validate(data), model, nothing, nothing, nothing)


def test_fewer_bits_than_the_smallest_format_takes_are_refused_before_calibration() -> None:
    search = load_config(SUPER3, "tiny-autoquantize", ()).data["auto_quantize"]
    AutoQuantizeConfig.model_validate(search | {"effective_bits": 4.5})  # 4 bits a weight and 8 for every 16
    with pytest.raises(ValidationError, match=r"effective_bits 4\.4: the smallest of quant_algos takes 4\.5 bits"):
        AutoQuantizeConfig.model_validate(search | {"effective_bits": 4.4})
    with pytest.raises(ValidationError, match=r"takes 8\.0 bits"):
        AutoQuantizeConfig.model_validate(search | {"quant_algos": ["FP8"]})


@pytest.mark.parametrize("size", ["tiny", "smoke"])
def test_qad_goes_on_from_the_quantised_model(size: str) -> None:
    quantize, qad = load_config(SUPER3, size, ()).data["run"], load_config(SUPER3 / "qad", size, ()).data["run"]
    assert qad["model"] == quantize["output"] == f"super3-quantize-model-{size}"
    assert qad["data"] == quantize["data"]


@pytest.mark.parametrize(
    ("group", "key", "value", "message"),
    [("scheduler", "lr_warmup_iters", 10_000, "exceed train.train_iters"), ("optimizer", "min_lr", 1.0, "exceeds")],
)
def test_a_schedule_that_does_not_fit_is_refused(group: str, key: str, value: float, message: str) -> None:
    data = load_config(SUPER3 / "qad", "tiny", ()).data
    del data["run"]["family"]  # known to every config without being declared
    data["dataset"]["path"] = data["checkpoint"]["pretrained_checkpoint"] = "x"
    QADConfig.model_validate(data)
    data[group][key] = value
    with pytest.raises(ValidationError, match=message):
        QADConfig.model_validate(data)
