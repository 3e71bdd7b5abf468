"""Megatron-Core's own model of a config that we export, on the meta device: our tensors, under Megatron-Bridge's names.

The config goes the way of `AutoBridge`: config.json, the library's table of its keys, the provider's fields. The names
come back through its table of tensors. So both ways of `nemotron FAMILY model import` and `export` are seen, but for
the bytes.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sources import FOLDER, Sources, imported, pins

from nemo_runspec.config.loader import load_config
from nemotron.recipes.super3 import __file__ as super3
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.published.hub import hub_config, hub_layout
from nemotron.stack.models.published.presets import PRESETS

pytestmark = pytest.mark.usefixtures("libraries")

BRIDGE = "megatron.bridge.models.nemotronh.nemotron_h_bridge"
BASE = "megatron.bridge.models.conversion.model_bridge"
SUPER3 = Path(super3).parent / "stage0_pretrain/config"
PROGRAM = Path(__file__).with_name("megatron_core_model.py")


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources([FOLDER / pin for pin in pins() if pin.startswith("megatron-")])


def depths(config: NemotronHConfig) -> int:
    """Of multi-token prediction."""
    return config.mtp_num_layers if config.num_nextn_predict_layers else 0


def method(sources: Sources, name: str) -> ast.FunctionDef:
    """A method of the library's bridge of this model."""
    _, bridge = sources.definition(BRIDGE, "NemotronHBridge")
    return next(node for node in bridge.body if isinstance(node, ast.FunctionDef) and node.name == name)


def provider_fields(config: NemotronHConfig, sources: Sources) -> dict[str, Any]:
    """What the library's bridge makes of our config.json: by its tables, and by the constants that it sets."""
    values = hub_config(config, torch.bfloat16)
    fields: dict[str, Any] = {}
    for module, name in ((BASE, "MegatronModelBridge"), (BRIDGE, "NemotronHBridge")):
        _, node = sources.definition(module, name)
        table = next(
            entry.value for entry in node.body
            if isinstance(entry, ast.Assign) and ast.unparse(entry.targets[0]) == "CONFIG_MAPPING"
        )  # fmt: skip
        pairs = ast.literal_eval(table.right if isinstance(table, ast.BinOp) else table)
        fields |= {theirs: values[ours] for ours, theirs in pairs if values.get(ours) is not None}
    for node in ast.walk(method(sources, "provider_bridge")):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            target = ast.unparse(node.targets[0])
            if target.startswith("provider."):
                fields[target.removeprefix("provider.")] = node.value.value
    fields["moe_latent_size"] = config.moe_latent_size
    # Our key; the library's recipe says how often the one block is applied, as super3's config does.
    fields |= {"mtp_num_layers": depths(config) or None, "mtp_use_repeated_layer": depths(config) > 0}
    if not config.n_routed_experts or "E" not in config.hybrid_override_pattern:
        fields = {key: value for key, value in fields.items() if "moe" not in key}
    known = sources.fields("megatron.core.transformer.transformer_config", "TransformerConfig")
    # What a GPU is wanted for, and what the provider keeps to itself.
    on_gpu = {"persist_layer_norm", "masked_softmax_fusion", "moe_permute_fusion", "moe_grouped_gemm",
              "moe_shared_expert_overlap", "moe_token_dispatcher_type"}  # fmt: skip
    return {key: value for key, value in fields.items() if key in known and key not in on_gpu}


def built(config: NemotronHConfig, sources: Sources) -> dict[str, tuple[int, ...]]:
    """Names and shapes of Megatron-Core's model."""
    model = {
        "pattern": "/".join([config.hybrid_override_pattern, *[config.mtp_hybrid_override_pattern] * depths(config)]),
        "vocab_size": config.vocab_size,
        "config": provider_fields(config, sources),
    }
    wheel = next(FOLDER / pin for pin in pins() if pin.startswith("megatron-core"))
    words = [sys.executable, str(PROGRAM), str(wheel), json.dumps(model)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: tuple(shape) for name, shape in json.loads(done.stdout.splitlines()[-1]).items()}


def name_table(config: NemotronHConfig, sources: Sources) -> dict[str, list[str]]:
    """Pattern of a name in Megatron-Core -> patterns in a checkpoint: the library's `mapping_registry`, run alone."""
    table: dict[str, list[str]] = {}

    def mapping(megatron_param: str, hf_param: str = "", **others: Any) -> None:
        table[megatron_param] = [hf_param] if hf_param else [others[part] for part in "qkv"]

    kinds = ("AutoMapping", "ColumnParallelMapping", "RowParallelMapping", "MambaInProjMapping", "MambaConv1dMapping",
             "QKVMapping", "_MTPFlatteningMapping", "_MTPFlatteningQKVMapping")  # fmt: skip
    names: dict[str, Any] = dict.fromkeys(kinds, mapping)
    names |= {"MegatronMappingRegistry": lambda *_: None}
    function = method(sources, "mapping_registry")
    function.returns = None
    exec(compile(ast.Module([function], []), "mapping_registry", "exec"), names)
    pattern = config.mtp_hybrid_override_pattern if depths(config) else None
    bridge = SimpleNamespace(_hf_mtp_config=lambda _: (depths(config), pattern), hf_config=None)
    names["mapping_registry"](bridge)
    return table


def published_names(name: str, table: dict[str, list[str]], depth: int) -> list[str]:
    """Names in a checkpoint of a tensor of Megatron-Core, by the table; `depth`: blocks of an MTP pattern."""
    # The table has the norm of an MTP attention block as Transformer Engine stores it, within the matrix behind it.
    name = re.sub(r"^(mtp.*)input_layernorm\.", r"\1self_attention.linear_qkv.layer_norm_", name)
    for pattern, theirs in table.items():
        match = re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
        if match is None:
            continue
        numbers = list(match.groups())
        if name.startswith("mtp."):  # its blocks are counted through in a checkpoint
            inner = int(numbers.pop(1)) if "mtp_model_layer" in name else depth - 1 if "final" in name else 0
            numbers[0] = str(int(numbers[0]) * depth + inner)
        return [functools.reduce(lambda text, number: text.replace("*", number, 1), numbers, each) for each in theirs]
    raise LookupError(name)


SMALL = NemotronHConfig(
    hybrid_override_pattern="MEM*E-", vocab_size=256, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=16, n_groups=2, n_routed_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=48, moe_shared_expert_intermediate_size=96, moe_latent_size=32,
    intermediate_size=128, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E", mtp_num_layers=2,
)  # fmt: skip


CASES = {"latent, MTP": SMALL} | {name: PRESETS[name] for name in ("nano3-30b", "super3-120b", "nano2-12b", "nano2-9b")}


def differences(config: NemotronHConfig, theirs: NemotronHConfig, sources: Sources) -> list[str]:
    """Names of tensors of our model of `config` that Megatron-Core's of `theirs` has not so, or has beside them."""
    with torch.device("meta"):
        model = NemotronH(config)
    ours = {name: tuple(tensor.shape) for name, tensor in hub_layout(model.state_dict()).items()}
    table, found = name_table(config, sources), dict[str, tuple[int, ...]]()
    for name, shape in built(theirs, sources).items():
        if name.endswith("local_tokens_per_expert"):  # a count of this step
            continue
        parts = published_names(name, table, len(config.mtp_hybrid_override_pattern))
        if len(parts) == 3 and shape[0] == sum(ours[part][0] for part in parts):  # q, k and v are one matrix there
            found |= {part: (ours[part][0], *shape[1:]) for part in parts}
        else:
            found |= dict.fromkeys(parts, shape)
    return sorted(name for name in ours.keys() | found.keys() if ours.get(name) != found.get(name))


@pytest.mark.slow  # Megatron-Core takes seconds to import
@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_megatron_core_has_our_tensors(config: NemotronHConfig, sources: Sources) -> None:
    assert differences(config, config, sources) == []


def test_super_is_trained_in_the_published_precisions(sources: Sources) -> None:
    """NVFP4, which is the block's, but for the matrices of this table (arXiv 2604.12374, section 2)."""
    roots = [FOLDER / pin for pin in pins() if pin.startswith("megatron-")]
    wanted = {"in_proj": None, "linear_fc1": None, "linear_fc2": None, "out_proj": "mxfp8", "linear_qkv": "bf16",
              "linear_proj": "bf16", "fc1_latent_proj": "bf16", "fc2_latent_proj": "bf16"}  # fmt: skip
    config = load_config(SUPER3, "phase1").data["model"]["quant_recipe"]
    module = "megatron.core.quantization.quant_config"
    with imported(roots, [module], {"megatron.core.utils": {"log_single_rank": lambda *_: None}}) as (library,):
        recipe = library.RecipeConfig.from_config_dict(config)
        table = name_table(dataclasses.replace(SMALL, mtp_num_layers=2), sources)
        seen = set()
        for pattern in table:  # every tensor that the model may have
            path, _, tensor = pattern.replace("*", "0").rpartition(".")
            matrix = path.rpartition(".")[2]
            if tensor.startswith("weight") and matrix in wanted:
                seen.add(matrix)
                key = recipe.match_to_config_key(library.MatchContext(path, 0))
                assert key == ("bf16" if path.startswith("mtp.") else wanted[matrix]), path
        assert seen == set(wanted)
    known = sources.fields("megatron.core.extensions.transformer_engine", "TEQuantizationRecipe")
    for precision in config["configs"].values():
        assert set(precision) == {"transformer_engine_config_type", "training_recipe"}
        assert set(precision["training_recipe"]) <= set(known)


@pytest.mark.slow
def test_another_dimension_is_seen(sources: Sources) -> None:
    wrong = dataclasses.replace(SMALL, ssm_state_size=32, moe_latent_size=16, num_key_value_heads=1)
    names = differences(SMALL, wrong, sources)
    for part in ("0.mixer.in_proj", "0.mixer.conv1d", "1.mixer.fc1_latent_proj", "3.mixer.k_proj"):
        assert any(part in name for name in names)
