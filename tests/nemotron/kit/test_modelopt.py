"""Tables of formats as rules of ModelOpt, and what its directories need, without the library."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

import pytest

from nemotron.kit.modelopt import note_ssm_state, quant_cfg, without_sentinels
from nemotron.kit.schemas.quantization import PrecisionConfig

BF16: dict[str, Any] = {
    "embedding": "BF16", "lm_head": "BF16", "conv1d": "BF16", "attention_qkv": "BF16", "attention_out": "BF16",
    "latent_proj": "BF16", "routed_experts": "BF16", "shared_experts": "BF16", "router": "FP32",
    "mamba_in_proj": "BF16", "mamba_out_proj": "BF16", "mtp": "BF16", "kv_cache": "BF16", "ssm_state": "FP32",
}  # fmt: skip
# A quantizer of each row of the table, in a model of transformers.
NAMES = {
    "lm_head": "lm_head.{}_quantizer",
    "attention_qkv": "model.layers.3.mixer.k_proj.{}_quantizer",
    "attention_out": "model.layers.3.mixer.o_proj.{}_quantizer",
    "latent_proj": "model.layers.1.mixer.fc2_latent_proj.{}_quantizer",
    "routed_experts": "model.layers.1.mixer.experts.up_proj_{}_quantizer",
    "shared_experts": "model.layers.1.mixer.shared_experts.down_proj.{}_quantizer",
    "mamba_in_proj": "model.layers.0.mixer.in_proj.{}_quantizer",
    "mamba_out_proj": "model.layers.0.mixer.out_proj.{}_quantizer",
    "mlp": "model.layers.4.mixer.up_proj.{}_quantizer",
}


def bits(rules: list[dict[str, Any]], name: str) -> tuple[int, int] | None:
    """The format that the last fitting rule gives a quantizer."""
    fitting = [rule for rule in rules if fnmatch.fnmatch(name, rule["quantizer_name"])]
    return fitting[-1]["cfg"]["num_bits"] if fitting[-1]["enable"] else None


@pytest.mark.parametrize("row", NAMES)
@pytest.mark.parametrize(
    ("format", "weight", "inputs"),
    [("BF16", None, None), ("FP8", (4, 3), (4, 3)), ("NVFP4", (2, 1), (2, 1)), ("W4A16_NVFP4", (2, 1), None)],
)
def test_a_row_is_of_its_layers_alone(row: str, format: str, weight: Any, inputs: Any) -> None:
    rules = quant_cfg(PrecisionConfig(**BF16 | {row: format}), "MEM*-", "max")
    for other, name in NAMES.items():
        expected = (weight, inputs) if other == row else (None, None)
        assert (bits(rules, name.format("weight")), bits(rules, name.format("input"))) == expected, other
    assert bits(rules, "model.layers.3.mixer.v_bmm_quantizer") is None
    assert bits(rules, "model.embeddings.weight_quantizer") is None


def test_the_scales_of_searched_weights_are_static_and_those_of_inputs_never() -> None:
    for method, kind in (("max", "dynamic"), ("mse", "static")):
        rules = quant_cfg(PrecisionConfig(**BF16 | {"routed_experts": "NVFP4"}), "E", method)  # type: ignore[arg-type]
        kinds = [rule["cfg"]["block_sizes"]["type"] for rule in rules[1:]]
        assert kinds == [kind, "dynamic"]


def test_mamba_before_attention_has_a_format_of_its_own() -> None:
    table = PrecisionConfig(
        **BF16 | {"mamba_in_proj": "FP8", "mamba_out_proj": "FP8", "mamba_before_attention": "BF16"}
    )
    rules = quant_cfg(table, "MEM*MM*E", "max")
    found = {index: bits(rules, f"model.layers.{index}.mixer.in_proj.weight_quantizer") for index in (0, 2, 4, 5)}
    assert found == {0: (4, 3), 2: None, 4: (4, 3), 5: None}
    assert bits(rules, "model.layers.52.mixer.in_proj.weight_quantizer") == (4, 3)  # not that of block 2 or 5


def test_marks_are_taken_out_of_names_everywhere(tmp_path: Path) -> None:
    layer = "backbone.layers.0.mixer.in_proj"
    marked = f"{layer}.\0backbone.pt_name_sentinel"
    for name in ("config.json", "hf_quant_config.json"):
        text = {"a": {marked: {"quant_algo": "FP8"}}, "targets": [marked, "lm_head"], "sentinel": 1}
        (tmp_path / name).write_text(json.dumps(text))
    without_sentinels(tmp_path)
    for name in ("config.json", "hf_quant_config.json"):
        read = json.loads((tmp_path / name).read_text())
        assert read == {"a": {layer: {"quant_algo": "FP8"}}, "targets": [layer, "lm_head"], "sentinel": 1}


@pytest.mark.parametrize(
    ("state", "noted"),
    [
        ("FP32", {"mamba_ssm_cache_dtype": "float32"}),
        ("FP16", {"mamba_ssm_cache_dtype": "float16"}),
        ("FP16_stochastic", {"mamba_ssm_cache_dtype": "float16", "mamba_ssm_stochastic_rounding": True}),
    ],
)
def test_the_state_of_mamba_is_noted(tmp_path: Path, state: Any, noted: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    note_ssm_state(tmp_path, state)
    assert json.loads((tmp_path / "config.json").read_text()) == {"vocab_size": 8} | noted
