"""What goes to ModelOpt (0.47.0) and comes back: a table of formats as settings of quantizers, and directories."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from nemotron.kit.schemas.quantization import AlgorithmConfig, PrecisionConfig

# Number formats as (exponent bits, mantissa bits). Its YAML files say e4m3 and e2m1; given to `mtq.quantize` as such
# words they quantise, but the export refuses them.
E4M3, E2M1 = (4, 3), (2, 1)
FP8: dict[str, Any] = {"num_bits": E4M3, "axis": None}  # one scale a tensor
# Rows of the table -> names of modules, in Hugging Face layout. Those of quantizers begin with their module's.
MODULES = {
    "lm_head": "lm_head",
    "attention_qkv": "*mixer.[qkv]_proj",
    "attention_out": "*mixer.o_proj",
    "latent_proj": "*mixer.fc[12]_latent_proj",
    "routed_experts": "*mixer.experts.",  # parts of one module: `experts.up_proj_weight_quantizers.0`
    "shared_experts": "*mixer.shared_experts.",
    "mamba_in_proj": "*mixer.in_proj",
    "mamba_out_proj": "*mixer.out_proj",
    "mlp": "*mixer.[ud]*_proj",
}
# The same in Megatron-Core, whose experts lie one by one here.
MEGATRON_MODULES = {
    "lm_head": "*output_layer.",
    "attention_qkv": "*self_attention.linear_qkv.",
    "attention_out": "*self_attention.linear_proj.",
    "latent_proj": "*mlp.fc[12]_latent_proj.",
    "routed_experts": "*mlp.experts.",
    "shared_experts": "*mlp.shared_experts.",
    "mamba_in_proj": "*mixer.in_proj.",
    "mamba_out_proj": "*mixer.out_proj.",
    "mlp": "*mlp.linear_fc[12].",
}
CONFIG_FILES = ("config.json", "hf_quant_config.json")
_SENTINEL = re.compile(r"\.\x00\w*(\.\w+)*_sentinel")


def quant_cfg(
    precision: PrecisionConfig, pattern: str, method: Literal["max", "mse"], names: Mapping[str, str] = MODULES
) -> list[dict[str, Any]]:
    """`quant_cfg` of `mtq.quantize`: rules in order, of which the last one that fits a quantizer's name decides.

    Args:
        pattern: kinds of blocks, for the row `mamba_before_attention`.
        names: rows of the table -> names of modules.
        method: with mse the scales of NVFP4 weights are found once, else computed from each block's maximum.
    """
    rules: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    rows = precision.model_dump()
    for row, modules in names.items():
        if rows[row] != "BF16":
            rules += _rules(modules, rows[row], method)
    if precision.mamba_before_attention is not None:
        for index in (match.start() for match in re.finditer(r"M(?=\*)", pattern)):
            modules = f"*layers.{index}.mixer.[io]*_proj"
            rules.append({"quantizer_name": f"{modules}*", "enable": False})
            if precision.mamba_before_attention != "BF16":
                rules += _rules(modules, precision.mamba_before_attention, method)
    if precision.kv_cache == "FP8":
        rules.append({"quantizer_name": "*[kv]_bmm_quantizer", "enable": True, "cfg": {"num_bits": E4M3}})
    return rules


def _rules(modules: str, algorithm: str, method: str) -> list[dict[str, Any]]:
    """Weights and inputs of modules: FP8, NVFP4, or W4A16_NVFP4, which has no format of inputs."""
    weights, inputs = FP8, FP8
    if algorithm != "FP8":
        weights, inputs = nvfp4("static" if method == "mse" else "dynamic"), nvfp4("dynamic")
    rules = [{"quantizer_name": f"{modules}*weight_quantizer", "enable": True, "cfg": weights}]
    if algorithm != "W4A16_NVFP4":
        rules.append({"quantizer_name": f"{modules}*input_quantizer", "enable": True, "cfg": inputs})
    return rules


def algorithm(settings: AlgorithmConfig) -> str | dict[str, Any]:
    """`algorithm` as the library takes it: a method without settings is its name."""
    return settings.model_dump() if settings.method == "mse" else settings.method


def nvfp4(scales: Literal["static", "dynamic"]) -> dict[str, Any]:
    """E2M1 in blocks of 16 along the input, each with a scale in E4M3."""
    return {"num_bits": E2M1, "block_sizes": {-1: 16, "type": scales, "scale_bits": E4M3}}


def without_sentinels(folder: Path) -> None:
    """Take marks out of the names of layers that ModelOpt leaves there where transformers renames a model's modules.

    Its mark `.\\0modelopt_name_sentinel` holds `model`, which the renaming to `backbone` changes too, so that it is not
    found again; an engine would find no layer of such a name. Other files of the export have no such names.
    """
    for name in CONFIG_FILES:
        text = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(_renamed(text), indent=2) + "\n", encoding="utf-8")


def _renamed(value: Any) -> Any:
    if isinstance(value, dict):
        return {_renamed(key): _renamed(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_renamed(entry) for entry in value]
    return _SENTINEL.sub("", value) if isinstance(value, str) else value


def note_ssm_state(folder: Path, state: Literal["FP32", "FP16", "FP16_stochastic"]) -> None:
    """Say in config.json how the state of Mamba is kept: vLLM's key; the one of stochastic rounding is ours."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["mamba_ssm_cache_dtype"] = "float32" if state == "FP32" else "float16"
    if state == "FP16_stochastic":
        config["mamba_ssm_stochastic_rounding"] = True
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
