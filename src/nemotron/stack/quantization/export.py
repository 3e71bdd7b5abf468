"""Quantised models on disk, in the layout that ModelOpt writes and vLLM, SGLang and TensorRT-LLM read.

    config.json                 with `quantization_config`: per-layer formats under the names of llm-compressor
    hf_quant_config.json        the same in ModelOpt's own words: quant_algo, quantized_layers, exclude_modules
    model.safetensors           beside what is not quantised, for every layer NAME that is:

    format        NAME.weight                NAME.weight_scale          NAME.weight_scale_2   NAME.input_scale
    FP8           float8_e4m3fn [N, K]       fp32                       -                     fp32, amax / 448
    NVFP4         uint8 [N, K/2], two codes  float8_e4m3fn [N, K/16]    fp32, global scale    fp32, amax / (6 * 448)
    W4A16_NVFP4   as NVFP4                   as NVFP4                   as NVFP4              -
    KV cache                                 k_proj.k_scale, v_proj.v_scale: fp32, amax / 448

Names and shapes: ModelOpt 0.47.0, `modelopt/torch/export/{quant_utils,convert_hf_config,unified_export_hf}.py`. What is
not quantised is bf16; the router and its bias are fp32. ModelOpt has no word for the SSM state: `config.json` has it as
`mamba_ssm_cache_dtype`, and `mamba_ssm_stochastic_rounding` is a key of ours (vLLM has an engine option for it).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor

from nemo_runspec.errors import UserError
from nemo_runspec.write import write_in_one_step
from nemotron.kit.model_folder import QUANT_CONFIG_FILE
from nemotron.kit.schemas.quantization import QuantAlgo
from nemotron.stack.models.nemotron_h import NemotronH
from nemotron.stack.models.published.config_json import CONFIG_FILE, MODELOPT, is_quantized, load_config, read_config
from nemotron.stack.models.published.hub import (
    Stored,
    Written,
    dtype_in,
    hub_config,
    hub_layout,
    load_weights,
    open_weights,
    parse_dtype,
    write_directory,
)
from nemotron.stack.quantization.fp8_ptq import FP8
from nemotron.stack.quantization.layers import Packed, Quantization, SsmState, layer_kinds, matrix, round_activations
from nemotron.stack.quantization.nvfp4 import BLOCK, NVFP4

# What the layout is that of: vLLM takes hf_quant_config.json as ModelOpt's by this name.
PRODUCER = {"name": MODELOPT, "version": "0.47.0"}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(up_proj|down_proj)")


# ---- names


def layer_names(name: str, num_experts: int) -> list[str]:
    """The layers of a checkpoint that a matrix of the plan is: one, or one an expert."""
    if ".experts." not in name:
        return [name]
    stack, _, leaf = name.rpartition(".")
    return [f"{stack}.{index}.{leaf}" for index in range(num_experts)]


def matrix_of(layer: str) -> str:
    """The matrix of the plan that a layer of a checkpoint is, or is a part of."""
    return f"{match[1]}.{match[3]}" if (match := _EXPERT.fullmatch(layer)) else layer


def excluded_layers(model: NemotronH, plan: Iterable[str]) -> list[str]:
    """Layers with a weight that engines would otherwise take for quantised; `mtp*` stands for all of that block."""
    names, num_experts = [], model.config.n_routed_experts
    for name in layer_kinds(model.config):
        if name not in plan:
            names += layer_names(name, num_experts) if ".experts." not in name else [f"{name.rpartition('.')[0]}*"]
    for index, symbol in enumerate(model.config.hybrid_override_pattern):
        if symbol in "ME":
            names.append(f"backbone.layers.{index}.mixer.{'conv1d' if symbol == 'M' else 'gate'}")
    return sorted({*names, "backbone.embeddings", *(["mtp*"] if model.mtp is not None else [])})


# ---- the two configs


def quant_config(model: NemotronH, plan: Mapping[str, QuantAlgo], fp8_kv_cache: bool) -> dict[str, Any]:
    """The content of `hf_quant_config.json`: MIXED_PRECISION with every layer's format where there are several."""
    formats = sorted(set(plan.values()))
    described = {each: {"quant_algo": each} | ({"group_size": BLOCK} if each != "FP8" else {}) for each in formats}
    details: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": "FP8" if fp8_kv_cache else None}
    if len(formats) == 1:
        details |= described[formats[0]]
    elif formats:
        layers = [(layer, plan[name]) for name in plan for layer in layer_names(name, model.config.n_routed_experts)]
        details |= {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {name: described[each] for name, each in layers},
        }
    details["exclude_modules"] = excluded_layers(model, plan)
    return {"producer": PRODUCER, "quantization": details}


def quantization_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`quantization_config` of `config.json` from the content of `hf_quant_config.json`."""
    details = config["quantization"]
    groups: dict[str, dict[str, Any]] = {}
    if details["quant_algo"] == "MIXED_PRECISION":
        for layer, description in details["quantized_layers"].items():
            group = groups.setdefault(description["quant_algo"], _group(description["quant_algo"]) | {"targets": []})
            group["targets"].append(layer)
        for group in groups.values():
            group["targets"].sort()
    elif details["quant_algo"]:
        groups[""] = _group(details["quant_algo"]) | {"targets": ["Linear"]}
    out: dict[str, Any] = {"config_groups": {f"group_{i}": group for i, group in enumerate(groups.values())}}
    if "quantized_layers" in details:
        out["quantized_layers"] = details["quantized_layers"]
    out |= {"ignore": details["exclude_modules"], "quant_algo": details["quant_algo"]}
    if details["kv_cache_quant_algo"]:
        out["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return out | {"producer": config["producer"], "quant_method": MODELOPT}


def _group(algorithm: str) -> dict[str, Any]:
    numbers: dict[str, Any] = {"dynamic": False, "num_bits": 8, "type": "float"}
    if algorithm != "FP8":
        numbers |= {"num_bits": 4, "group_size": BLOCK}
    return {"weights": numbers} | ({} if algorithm == "W4A16_NVFP4" else {"input_activations": dict(numbers)})


# ---- writing


def save_quantized(
    folder: Path, model: NemotronH, quantization: Quantization, others: Mapping[str, Any] | None = None
) -> None:
    """Write a model directory: quantised layers as `quantization` has them, the rest from the model, in bf16.

    The model's own values of quantised matrices are not looked at. Tokenizer and chat template are not written.
    `others`: as `hub_config`.
    """
    tensors: dict[str, Written] = {}
    parts = packed_tensors(model, quantization)
    for name, tensor in hub_layout(model.state_dict()).items():
        if (layer := name.removesuffix(".weight")) in parts:
            tensors |= {f"{layer}.{leaf}": Written(part, part.dtype) for leaf, part in parts[layer].items()}
        else:
            tensors[name] = Written(tensor, _stored_dtype(name))
    for name, scale in quantization.kv_scales.items():
        leaf = f"{name.rpartition('.')[2][0]}_scale"  # k_proj.k_scale, v_proj.v_scale
        tensors[f"{name}.{leaf}"] = Written(scale, torch.float32)
    config = quant_config(model, quantization.plan, bool(quantization.kv_scales))
    state = quantization.ssm_state
    others = {
        **(others or {}),
        "mamba_ssm_cache_dtype": "float32" if state == "FP32" else "float16",
        "mamba_ssm_stochastic_rounding": state == "FP16_stochastic",
        "quantization_config": quantization_config(config),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_in_one_step(folder / QUANT_CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    write_directory(folder, hub_config(model.config, torch.bfloat16, others), tensors)


def packed_tensors(model: NemotronH, quantization: Quantization) -> dict[str, dict[str, Tensor]]:
    """The tensors of every quantised layer by their names in the file, without that of the layer."""
    out: dict[str, dict[str, Tensor]] = {}
    for name, packed in quantization.packed.items():
        layers = layer_names(name, model.config.n_routed_experts)
        is_stack = matrix(model, name).dim() == 3
        for index, layer in enumerate(layers):
            at = index if is_stack else ...
            if isinstance(packed, FP8):
                scale = packed.scale[at].reshape(()) if is_stack else packed.scale
                out[layer] = {"weight": packed.codes[at], "weight_scale": scale}
            else:
                scale = packed.global_scale[at].reshape(()) if is_stack else packed.global_scale
                out[layer] = {"weight": packed.codes[at], "weight_scale": packed.scales[at], "weight_scale_2": scale}
            if name in quantization.input_scales:
                out[layer]["input_scale"] = quantization.input_scales[name]
    return out


def stored_bytes(model: NemotronH, plan: Mapping[str, QuantAlgo]) -> dict[str, int]:
    """Bytes of all tensors of the model, as `full` in bf16 and `quantized`, from shapes and formats alone.

    Of a matrix of N x K values: 2 N K in bf16; N K in FP8 and 4 of its scale; N K / 2 in NVFP4, N K / 16 of block
    scales and 4 of the global one. Another 4 for the input's scale; those of keys and values are not counted.
    """
    full = saved = 0
    for name, tensor in hub_layout(model.state_dict()).items():
        full += tensor.numel() * _stored_dtype(name).itemsize
        algorithm = plan.get(matrix_of(name.removesuffix(".weight")))
        if algorithm is None:
            saved += tensor.numel() * _stored_dtype(name).itemsize
        elif algorithm == "FP8":
            saved += tensor.numel() + 4 + 4
        else:
            saved += tensor.numel() // 2 + tensor.numel() // BLOCK + 4 + (4 if algorithm == "NVFP4" else 0)
    return {"full": full, "quantized": saved}


def _stored_dtype(name: str) -> torch.dtype:
    """Of what is not quantised: bf16, and fp32 for the router."""
    return torch.float32 if name.endswith(".gate.weight") else dtype_in(name, torch.bfloat16)


# ---- reading


def read_quantization(folder: Path, model: NemotronH) -> Quantization:
    """Formats, codes and scales of a quantised model directory; `model`: of its config, on any device, meta included.

    Experts with different input scales get the largest, as in an engine that multiplies all of them in one kernel.

    Raises:
        UserError: a format that cannot be read, a layer with another one than its neighbours in a stack, a tensor that
            is missing or of another shape or dtype.
    """
    stored = open_weights(folder)
    config = read_config(folder)
    settings = config["quantization_config"]
    plan = _read_plan(folder, model, stored, settings)
    packed: dict[str, Packed] = {}
    input_scales: dict[str, Tensor] = {}
    for name, algorithm in plan.items():
        shape = tuple(matrix(model, name).shape[-2:])
        layers = [
            _read_layer(folder, stored, layer, algorithm, shape)
            for layer in layer_names(name, model.config.n_routed_experts)
        ]
        is_stack = ".experts." in name
        parts = {
            leaf: torch.stack([layer[leaf] for layer in layers]) if is_stack else layers[0][leaf] for leaf in layers[0]
        }
        for leaf in ("weight_scale", "weight_scale_2") if is_stack else ():
            if leaf in parts and parts[leaf].dim() == 1:
                parts[leaf] = parts[leaf].view(-1, 1, 1)
        if algorithm == "FP8":
            packed[name] = FP8(parts["weight"], parts["weight_scale"])
        else:
            packed[name] = NVFP4(parts["weight"], parts["weight_scale"], parts["weight_scale_2"])
        if "input_scale" in parts:
            input_scales[name] = parts["input_scale"].amax()
    kv_scales = {
        name.rpartition(".")[0]: tensor.read().reshape(())
        for name, tensor in stored.items()
        if name.endswith((".k_proj.k_scale", ".v_proj.v_scale"))
    }
    state: SsmState = "FP32"
    if config.get("mamba_ssm_cache_dtype") == "float16":
        state = "FP16_stochastic" if config.get("mamba_ssm_stochastic_rounding") else "FP16"
    return Quantization(plan, packed, input_scales, kv_scales, state)


def load_model(folder: Path, dtype: torch.dtype | str = torch.float32, device: torch.device | str = "cpu") -> NemotronH:
    """The model of a directory, to ask or to score; a quantised one as emulated.

    Quantised weights become what their codes and scales stand for, and the model rounds activations as the directory
    says. Its speed and its memory are those of `dtype`, also as a word ("bfloat16").

    Raises:
        UserError: as `NemotronH.from_pretrained`, `read_quantization` and `hub.load_weights`.
    """
    if not is_quantized(read_config(folder)):
        return NemotronH.from_pretrained(folder, dtype, device)
    config = load_config(folder)
    with torch.device("meta"):
        model = NemotronH(config)
    quantization = read_quantization(folder, model)
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {name: parameters[id(matrix(model, name))] for name in quantization.plan}
    weights = {names[name]: packed.dequantize() for name, packed in quantization.packed.items()}
    load_weights(model, folder, parse_dtype(dtype), device, weights)
    round_activations(model, quantization)
    return model


def _read_plan(
    folder: Path, model: NemotronH, stored: Mapping[str, Stored], settings: Mapping[str, Any]
) -> dict[str, QuantAlgo]:
    """The format of every matrix: one for all layers that have scales, or each layer's own."""
    per_layer = settings.get("quantized_layers")
    plan: dict[str, QuantAlgo] = {}
    for name in layer_kinds(model.config):
        for layer in layer_names(name, model.config.n_routed_experts):
            if f"{layer}.weight_scale" not in stored:
                continue
            algorithm = settings.get("quant_algo")
            if per_layer:  # ModelOpt names all experts of a block by `….experts`, where transformers stacks them
                description = per_layer.get(layer) or per_layer.get(layer.partition(".experts.")[0] + ".experts") or {}
                algorithm = description.get("quant_algo")
            if algorithm not in get_args(QuantAlgo):
                known = ", ".join(get_args(QuantAlgo))
                raise UserError(
                    f"{folder / CONFIG_FILE}: {layer} is {algorithm}, which cannot be read", f"one of {known}"
                )
            if plan.setdefault(name, cast(QuantAlgo, algorithm)) != algorithm:
                raise UserError(f"{folder / CONFIG_FILE}: {layer} is {algorithm}, other experts are {plan[name]}")
    return plan


def _read_layer(
    folder: Path, stored: Mapping[str, Stored], layer: str, algorithm: QuantAlgo, shape: tuple[int, ...]
) -> dict[str, Tensor]:
    """The tensors of a quantised layer whose weight is [N, K], by their last names."""
    rows, columns = shape
    expected = {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("F32", ())}
    if algorithm != "FP8":
        expected = {
            "weight": ("U8", (rows, columns // 2)),
            "weight_scale": ("F8_E4M3", (rows, columns // BLOCK)),
            "weight_scale_2": ("F32", ()),
        }
    if algorithm != "W4A16_NVFP4":
        expected["input_scale"] = ("F32", ())
    for leaf, (dtype, size) in expected.items():
        tensor = stored.get(f"{layer}.{leaf}")
        if tensor is None:
            raise UserError(f"{folder}: {layer}.{leaf} is missing, and {layer} is {algorithm}")
        if (tensor.dtype, tensor.shape) != (dtype, size):
            raise UserError(
                f"{tensor.file}: {layer}.{leaf} is {tensor.dtype} {list(tensor.shape)}, {dtype} {list(size)} expected"
            )
    return {leaf: stored[f"{layer}.{leaf}"].read() for leaf in expected}
