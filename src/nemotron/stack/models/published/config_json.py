"""`config.json` of a model directory, as the published models and transformers write it, as a `NemotronHConfig`."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from nemo_runspec.errors import UserError
from nemotron.stack.models.config import NemotronHConfig

CONFIG_FILE = "config.json"
MODEL_TYPE = "nemotron_h"
MODELOPT = "modelopt"  # the method of quantised weights that `stack/quantization/export.py` writes and reads
# Keys of `config.json` for which this model supports one value only, which is also what a missing key means.
FIXED: dict[str, Any] = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "sliding_window": None,
    "hidden_dropout": 0.0,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "use_bias": False,
    "use_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_hidden_act": "silu",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "residual_in_fp32": False,
}
# Keys without effect on this model, whose values are ignored: the Mamba width is heads x head_dim (the published Nano 3
# config has expand 2, which would be another width); time_step_{min,max,floor} concern initial weights; there are no
# rotary embeddings; norm_eps repeats layer_norm_epsilon; the rest is for other programs.
NEUTRAL = frozenset((
    "architectures", "auto_map", "model_type", "transformers_version", "dtype", "torch_dtype", "num_hidden_layers",
    "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    "expand", "time_step_min", "time_step_max", "time_step_floor", "time_step_limit", "time_step_rank",
    "rescale_prenorm_residual", "rope_theta", "partial_rotary_factor", "norm_eps", "rms_norm_eps",
    "use_cache", "use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep", "moe_shared_expert_overlap",
    "output_router_logits", "layers_block_type", "mtp_layers_block_type", "mamba_ssm_stochastic_rounding",
))  # fmt: skip
# And of these the ones that a model made from another one keeps, as its tokenizer and its window are the same.
KEPT_KEYS = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
# Other names of a field in published configs and in transformers.
ALIASES = {
    "layer_types": "layers_block_type",
    "num_local_experts": "n_routed_experts",
    "attention_head_dim": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_chunk_size": "chunk_size",
}
# Block names of transformers >= 5.8, which writes lists of them in the place of the patterns, and their older forms.
SYMBOLS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "moe": "E",
    "mlp": "-",
}
LISTS = {
    "layers_block_type": "hybrid_override_pattern",
    "mtp_layers_block_type": "mtp_hybrid_override_pattern",
}
# Fields that a `config.json` must have; the others have defaults that are no dimensions.
_ALWAYS = ("hybrid_override_pattern", "vocab_size", "hidden_size")
_PER_SYMBOL = {
    "M": ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
    "*": ("num_attention_heads", "num_key_value_heads", "head_dim"),
    "E": (
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "routed_scaling_factor",
    ),
    "-": ("intermediate_size",),
}


def load_config(path: Path) -> NemotronHConfig:
    """Read `config.json` of a model directory.

    Raises:
        UserError: there is none, it is of another kind of model, it lacks a dimension that its blocks need, or what
            `config_from_dict` refuses.
    """
    file, values = Path(path) / CONFIG_FILE, read_config(path)
    if values.get("model_type") != MODEL_TYPE:
        raise UserError(f"{file}: model_type is {_json(values.get('model_type'))}, {_json(MODEL_TYPE)} expected")
    try:
        renamed = _renamed(values)
        pattern = str(renamed.get("hybrid_override_pattern", ""))
        mtp = str(renamed.get("mtp_hybrid_override_pattern", "*E")) if renamed.get("num_nextn_predict_layers") else ""
        needed = [
            *_ALWAYS,
            *(name for symbol in dict.fromkeys(pattern + mtp) for name in _PER_SYMBOL.get(symbol, ())),
        ]
        if missing := [name for name in needed if name not in renamed]:
            raise ValueError(f"{missing[0]} is missing")
        return config_from_dict(values)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error


def config_from_dict(values: dict[str, Any]) -> NemotronHConfig:
    """Build from a dictionary in the names of `config.json`; fields that it lacks keep their defaults.

    Understands the pattern strings of the published configs and the lists of block names that transformers >= 5.8
    writes. Keys that are no dimensions (token ids, versions, ...) are ignored.

    Raises:
        ValueError: the config asks for something that this model does not have, such as biases (see `FIXED`), or
            its dimensions do not fit together.
    """
    values = _renamed(values)
    for key, only in FIXED.items():
        if key in values and values[key] != only:
            raise ValueError(f"{key} {_json(values[key])}: this model has {_json(only)} only")
    low, high = _floats(values.get("time_step_limit", (0.0, math.inf)))
    if low > 0 or high < math.inf:
        raise ValueError(f"time_step_limit {_json([low, high])}: this model does not limit dt, [0, Infinity] expected")
    if is_quantized(values) and (method := values["quantization_config"].get("quant_method")) != MODELOPT:
        raise ValueError(
            f"quantization_config: quant_method {_json(method)}: of quantised weights only ModelOpt's can be read"
        )
    known = {field.name for field in fields(NemotronHConfig)}
    config = NemotronHConfig(**{key: value for key, value in values.items() if key in known})
    layers, blocks = values.get("num_hidden_layers"), len(config.hybrid_override_pattern)
    if layers is not None and layers != blocks:
        raise ValueError(f"num_hidden_layers {_json(layers)}, but there are {blocks} blocks in the pattern")
    return config


def read_config(path: Path) -> dict[str, Any]:
    """The content of `config.json` in a model directory, as it stands. UserError if there is none or it is damaged."""
    file = Path(path) / CONFIG_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is not a model directory: there is no {CONFIG_FILE}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{file}: a JSON object expected")
    return values


def kept_values(folder: Path) -> dict[str, Any]:
    """What a model made of the one in `folder` keeps of its config: `KEPT_KEYS`; nothing where it holds no model."""
    values = read_config(folder) if (folder / CONFIG_FILE).is_file() else {}
    return {key: values[key] for key in KEPT_KEYS if key in values}


def is_quantized(values: dict[str, Any]) -> bool:
    """Whether a `config.json` says that weights are stored as codes and scales."""
    return bool(values.get("quantization_config"))


def unknown_keys(values: dict[str, Any]) -> list[str]:
    """Keys of a `config.json` that this model does not know, not even as one without effect (`NEUTRAL`)."""
    known = {field.name for field in fields(NemotronHConfig)} | FIXED.keys() | NEUTRAL | ALIASES.keys()
    return sorted(values.keys() - known - {"quantization_config"})


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """The same config under the names of our fields: aliases resolved, lists of block names as pattern strings."""
    out = {key: value for key, value in values.items() if key not in ALIASES}
    for alias, name in ALIASES.items():
        if alias in values:
            out.setdefault(name, values[alias])
    for key, name in LISTS.items():
        names = out.pop(key, None)
        if names is None:
            continue
        if not isinstance(names, list) or (unknown := [each for each in names if each not in SYMBOLS]):
            shown = unknown[0] if isinstance(names, list) else names
            raise ValueError(f"{key}: {_json(shown)} is not one of {', '.join(SYMBOLS)}")
        pattern = "".join(SYMBOLS[each] for each in names)
        if out.setdefault(name, pattern) != pattern:
            raise ValueError(f"{key} says {pattern}, {name} says {out[name]}")
    return out


def _floats(limit: Any) -> tuple[float, float]:
    """A pair of numbers from JSON; transformers writes infinity as {"__float__": "Infinity"}."""
    try:
        low, high = (float(each["__float__"] if isinstance(each, dict) else each) for each in limit)
    except (TypeError, ValueError, KeyError):
        raise ValueError(f"time_step_limit {_json(limit)}: two numbers expected") from None
    return low, high


def _json(value: Any) -> str:
    return json.dumps(value)
