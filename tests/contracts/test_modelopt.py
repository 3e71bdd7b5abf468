"""Scripts over ModelOpt and their tables, against its sources and recipes: names, signatures, fields, formats."""

from __future__ import annotations

import ast
import contextlib
import copy
import fnmatch
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_megatron_bridge
import torch
import yaml
from sources import Sources, accepts, call_faults, imported, unpacked

import nemotron.recipes
from nemo_runspec.config.loader import load_config
from nemotron.kit.modelopt import MEGATRON_MODULES, quant_cfg
from nemotron.kit.schemas.quantization import PrecisionConfig
from nemotron.recipes.super3.stage3_quantize.modelopt_schema import QuantizeConfig
from nemotron.stack.models.published.presets import PRESETS
from nemotron.stack.planning.memory import DISTILLED_LOGIT_BYTES

RECIPES = Path(nemotron.recipes.__file__).parent
SCRIPTS = sorted(RECIPES.glob("*/*/*_modelopt.py"))
SUPER3, NANO3 = RECIPES / "super3/stage3_quantize/config", RECIPES / "nano3/stage4_quantize/config"
WHEEL, *MEGATRON = unpacked("nvidia-modelopt", "megatron-bridge", "megatron-core")
CONFIG = "modelopt.torch.quantization.config"
# How its YAML files write number formats, and what the library makes of them.
FORMATS = {"e4m3": (4, 3), "e2m1": (2, 1)}

pytestmark = pytest.mark.usefixtures("libraries")


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources([WHEEL, *MEGATRON])


def theirs(module: str) -> bool:
    return module.partition(".")[0] in ("modelopt", "megatron")


def faults_of_script(text: str, sources: Sources) -> list[str]:
    """Names that a script imports from the libraries and that are not there, and arguments that calls do not take."""
    tree, found = ast.parse(text), []
    modules: dict[str, str] = {}  # alias -> module
    names: dict[str, tuple[str, str]] = {}  # alias -> (module, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {each.asname or each.name: each.name for each in node.names if theirs(each.name)}
        elif isinstance(node, ast.ImportFrom) and theirs(node.module or ""):
            for each in node.names:
                with contextlib.suppress(LookupError):
                    sources.tree(f"{node.module}.{each.name}")  # a module
                    modules[each.asname or each.name] = f"{node.module}.{each.name}"
                    continue
                names[each.asname or each.name] = str(node.module), each.name
    assert modules or names
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in modules:
            target = modules[ast.unparse(call.func.value)], call.func.attr
        elif isinstance(call.func, ast.Name) and call.func.id in names:
            target = names[call.func.id]
        else:
            continue
        try:
            found += call_faults(call, sources.signature(*target))
        except LookupError as error:
            found.append(str(error))
    for module, name in names.values():
        try:
            sources.definition(module, name)
        except LookupError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_what_a_script_imports_and_calls_exists(script: Path, sources: Sources) -> None:
    assert faults_of_script(script.read_text(encoding="utf-8"), sources) == []


@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        ("mtq.quantize(", "mtq.quantise(", "modelopt.torch.quantization has no quantise"),
        ("print_quant_summary(model)", "print_quant_summary(model, folder=1)", "does not take that"),
        ("print_quant_summary(model)", "print_quant_summary()", "print_quant_summary wants model"),
        ("import export_hf_checkpoint", "import export_hf_model", "modelopt.torch.export has no export_hf_model"),
        ("extra_state_dict=", "extra_tensors=", "export_hf_checkpoint does not take that"),
    ],
)  # fmt: skip
def test_a_planted_name_is_found(right: str, wrong: str, fault: str, sources: Sources) -> None:
    text = (RECIPES / "super3/stage3_quantize/quantize_modelopt.py").read_text(encoding="utf-8")
    assert right in text
    assert [found for found in faults_of_script(text.replace(right, wrong), sources) if fault in found]


# ---- QAD, and the distillation behind Minitron


def bridge_faults(values: dict[str, Any]) -> list[str]:
    """Keys of a config that Megatron-Bridge does not take."""
    return test_megatron_bridge.faults(values, Sources(MEGATRON))


def test_qads_keys_are_megatron_bridges() -> None:
    script = RECIPES / "super3/stage3_quantize/qad_modelopt.py"
    values = test_megatron_bridge.resolved(SUPER3 / "qad/default.yaml", script)
    assert bridge_faults(values) == []
    values["scheduler"]["lr_decay_style"] = "constant_rate"
    values["model"]["logit_kl_temperature"] = 1.0
    found = "; ".join(bridge_faults(values))
    assert "scheduler.lr_decay_style = 'constant_rate'" in found and "model.logit_kl_temperature: no field" in found
    tokens = values["train"]["train_iters"] * values["train"]["global_batch_size"] * values["model"]["seq_length"]
    assert tokens == pytest.approx(5e9, rel=1e-3) and values["optimizer"]["lr"] == 1e-5


@pytest.mark.parametrize(("tensor_parallel", "copies"), [(2, 8), (1, 7)])
def test_what_its_loss_holds_beside_the_logits(
    tensor_parallel: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak of what LogitsKLLoss allocates, in copies of the logits in fp32; `nemotron plan` counts on it."""
    group = SimpleNamespace(get_tensor_model_parallel_group=lambda: None)
    stand_ins: dict[str, dict[str, Any]] = {
        "megatron.core": {"parallel_state": group},
        "megatron.core.pipeline_parallel.schedules": {"get_tensor_shapes": None},
        "megatron.core.transformer": {"MegatronModule": torch.nn.Module, "TransformerLayer": object},
        "megatron.core.utils": {"get_model_config": None},
        "modelopt.torch.distill": {"DistillationLossBalancer": object, "DistillationModel": object},
        "modelopt.torch.distill.config": {"Criterion": object},
        "modelopt.torch.quantization.nn": {"TensorQuantizer": object},
    }
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    with imported([WHEEL, *MEGATRON], ["modelopt.torch.distill.plugins.megatron"], stand_ins) as (library,):
        one_of_two = SimpleNamespace(functional=SimpleNamespace(all_reduce=lambda tensor, group: tensor))
        monkeypatch.setattr(library, "dist_nn", one_of_two)
        loss = library.LogitsKLLoss(SimpleNamespace(tensor_model_parallel_size=tensor_parallel))
    student = torch.randn(16, 1, 4096, dtype=torch.bfloat16, requires_grad=True) * 1
    teacher = torch.randn(16, 1, 4096, dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss(student, teacher)[0].sum().backward()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    peak = max(itertools.accumulate(changes))
    assert peak == pytest.approx(copies * 4 * 16 * 4096, rel=0.01)
    assert peak <= (DISTILLED_LOGIT_BYTES - 2 - 2) * 16 * 4096 * 1.01


def test_the_keys_of_nano2s_distillation_are_megatron_bridges() -> None:
    script = RECIPES / "nano2/stage3_compress/distil_modelopt.py"
    values = test_megatron_bridge.resolved(NANO2.with_name("training_distil") / "9b.yaml", script)
    assert bridge_faults(values) == []
    tokens = values["train"]["train_iters"] * values["train"]["global_batch_size"] * values["model"]["seq_length"]
    assert tokens == pytest.approx(60e9, rel=1e-3)


def test_qads_table_is_the_released_one_under_megatrons_names() -> None:
    published = recipe("models/nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16/ptq/nvfp4-mse.yaml")["quantize"]
    pattern = PRESETS["super3-120b"].hybrid_override_pattern
    leaves = {
        "M": ("mixer.in_proj", "mixer.out_proj", "mixer.conv1d"),
        "*": ("self_attention.linear_qkv", "self_attention.linear_proj"),
        "E": (
            "mlp.router", "mlp.experts.local_experts.3.linear_fc1", "mlp.experts.local_experts.3.linear_fc2",
            "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2", "mlp.fc1_latent_proj",
        ),
    }  # fmt: skip
    layers = [f"decoder.layers.{index}.{leaf}" for index, kind in enumerate(pattern) for leaf in leaves[kind]]
    names = [f"{layer}.{each}_quantizer" for layer in (*layers, "output_layer") for each in ("weight", "input")]
    names += [
        f"decoder.layers.7.self_attention.core_attention.{each}_bmm_quantizer" for each in "qkv"
    ]  # fmt: skip
    values = load_config(SUPER3 / "qad", "default", ()).data
    ours = quant_cfg(PrecisionConfig(**values["precision"]), "", values["algorithm"]["method"], MEGATRON_MODULES)
    assert formats(ours, names) == formats(published["quant_cfg"], names)
    assert sum(format is not None for format in formats(ours, names).values()) == 40 * 4 + 40 * 8 + 2


# ---- Minitron

NANO2 = RECIPES / "nano2/stage3_compress/config/training_prune"
MINITRON = "modelopt.torch.prune.plugins.mcore_minitron"


def minitron_faults(config: dict[str, Any], sources: Sources) -> list[str]:
    """Keys of a shape and of divisors that ModelOpt does not take, and widths that it could not cut."""
    (supported,) = [
        ast.literal_eval(node.value)
        for node in sources.tree(MINITRON).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUPPORTED_HPARAMS"
    ]
    shape, divisors = config["export_config"], config["divisors"]
    known = sources.signature(MINITRON, "get_mcore_minitron_config").parameters
    found = [f"export_config.{key}" for key in shape if key not in supported]
    found += [f"divisors.{key}" for key in divisors if key not in known]
    for key, divisor in divisors.items():
        if shape.get(key.removesuffix("_divisor"), 0) % divisor:
            found.append(f"{key} {divisor}")
    return found


def test_minitrons_shape_is_one_that_it_cuts_to(sources: Sources) -> None:
    config = load_config(NANO2, "9b", ()).data
    assert minitron_faults(config, sources) == []
    large = PRESETS["nano2-12b"]
    shape = config["export_config"]
    kept = (shape["num_attention_heads"], shape["mamba_num_heads"], shape["mamba_head_dim"])
    assert kept == (large.num_attention_heads, large.mamba_num_heads, large.mamba_head_dim)
    config["export_config"]["num_blocks"] = config["export_config"].pop("num_layers")
    config["divisors"] |= {"hidden_size_divisor": 256, "num_heads_divisor": 1}
    assert minitron_faults(config, sources) == [
        "export_config.num_blocks", "divisors.num_heads_divisor", "hidden_size_divisor 256",
    ]  # fmt: skip


# ---- the tables


def config_of(folder: Path, name: str) -> QuantizeConfig:
    values = load_config(folder, name, ()).data
    values["run"].pop("family", None)
    values["checkpoint"]["pretrained_checkpoint"] = values["dataset"]["path"] = "here"
    return QuantizeConfig.model_validate(values)


def rules_of(folder: Path, name: str, family: str) -> list[dict[str, Any]]:
    cfg = config_of(folder, name)
    return quant_cfg(cfg.precision, PRESETS[family].hybrid_override_pattern, cfg.algorithm.method)


def quantizers(family: str) -> list[str]:
    """Names of the quantizers of a published model: weights, inputs, keys and values."""
    leaves = {
        "M": ("in_proj", "out_proj", "conv1d"), "*": ("q_proj", "k_proj", "v_proj", "o_proj"),
        "E": (
            "gate", "experts.up_proj", "experts.down_proj", "shared_experts.up_proj", "shared_experts.down_proj",
            "fc1_latent_proj", "fc2_latent_proj",
        ),
    }  # fmt: skip
    names = ["model.embeddings.weight_quantizer"]
    layers = ["lm_head"]
    for index, kind in enumerate(PRESETS[family].hybrid_override_pattern):
        layers += [f"model.layers.{index}.mixer.{leaf}" for leaf in leaves[kind]]
        if kind == "*":
            names += [f"model.layers.{index}.mixer.{each}_bmm_quantizer" for each in "qkv"]
    for layer in layers:
        between = "_" if ".experts." in layer else "."  # parts of one module with fused weights
        names += [f"{layer}{between}weight_quantizer", f"{layer}{between}input_quantizer"]
    return names


def formats(rules: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """What ModelOpt does with rules: the last one that fits says the format, or that there is none."""
    found: dict[str, Any] = dict.fromkeys(names)
    for rule in rules:
        for name in fnmatch.filter(names, rule["quantizer_name"]):
            found[name] = _plain(rule.get("cfg")) if rule.get("enable", True) else None
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        plain = {str(key): _plain(entry) for key, entry in value.items()}
        return {key: entry for key, entry in plain.items() if entry is not None and key != "effective_bits"}
    return FORMATS.get(value, value) if isinstance(value, str) else value


def recipe(path: str) -> Any:
    return yaml.safe_load((WHEEL / "modelopt_recipes" / path).read_text(encoding="utf-8"))


def test_supers_table_is_the_recipe_of_the_released_checkpoint() -> None:
    published = recipe("models/nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16/ptq/nvfp4-mse.yaml")["quantize"]
    names = quantizers("super3-120b")
    ours = formats(rules_of(SUPER3, "default", "super3-120b"), names)
    assert ours == formats(published["quant_cfg"], names)
    assert sum(format is not None for format in ours.values()) == 40 * 4 + 40 * 8 + 8 * 2  # M, E, * of the pattern
    assert config_of(SUPER3, "default").algorithm.model_dump() == published["algorithm"]


def test_nanos_table_is_the_fp8_preset_but_for_the_mamba_blocks_before_attention() -> None:
    pattern, names = PRESETS["nano3-30b"].hybrid_override_pattern, quantizers("nano3-30b")
    units = "configs/ptq/units/mamba_moe_disabled_quantizers.yaml", "configs/ptq/units/default_disabled_quantizers.yaml"
    fp8 = recipe("configs/numerics/fp8.yaml")
    rules = [{"quantizer_name": f"*{each}_quantizer", "cfg": fp8} for each in ("weight", "input", "[kv]_bmm")]
    rules += [rule for unit in units for rule in recipe(unit) if "parent_class" not in rule]
    rules.append({"quantizer_name": "*embeddings*", "enable": False})  # a class that the preset's own rules name
    rules.append({"quantizer_name": "*mixer.gate.*", "enable": False})  # no linear layer there, and so no quantizer
    before = [index for index, pair in enumerate(itertools.pairwise(pattern)) if pair == ("M", "*")]
    assert len(before) == 6
    rules += [{"quantizer_name": f"*layers.{index}.*", "enable": False} for index in before]
    assert formats(rules_of(NANO3, "default", "nano3-30b"), names) == formats(rules, names)


def faults_of_rules(rules: list[dict[str, Any]], algorithm: dict[str, Any], sources: Sources) -> list[str]:
    """Keys that no class of the library has."""
    entry, attributes = sources.fields(CONFIG, "QuantizerCfgEntry"), sources.fields(CONFIG, "QuantizerAttributeConfig")
    found = [f"{key}: no key of a rule" for rule in rules for key in rule if key not in entry]
    found += [f"{key}: no attribute" for rule in rules for key in rule.get("cfg", {}) if key not in attributes]
    calibration = sources.fields(CONFIG, "MseCalibConfig")
    for key, value in algorithm.items():
        if key not in calibration:
            found.append(f"algorithm.{key}: no key")
        elif not accepts(calibration[key], value):
            found.append(f"algorithm.{key} = {value!r}: {ast.unparse(calibration[key])}")
    return found


def test_every_key_of_a_rule_is_the_librarys(sources: Sources) -> None:
    rules = rules_of(SUPER3, "default", "super3-120b")
    algorithm = config_of(SUPER3, "default").algorithm.model_dump()
    assert faults_of_rules(rules, algorithm, sources) == []
    planted = copy.deepcopy(rules)
    planted[1]["cfg"]["nbits"] = planted[1]["cfg"].pop("num_bits")
    planted[2]["quantizer"] = planted[2].pop("quantizer_name")
    mistakes = faults_of_rules(planted, algorithm | {"fp8_sweep": True, "method": "mae"}, sources)
    assert mistakes == [
        "quantizer: no key of a rule", "nbits: no attribute", "algorithm.method = 'mae': Literal['mse']",
        "algorithm.fp8_sweep: no key",
    ]  # fmt: skip


def test_a_table_with_another_format_is_not_the_released_one() -> None:
    published = recipe("models/nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16/ptq/nvfp4-mse.yaml")["quantize"]
    names, cfg = quantizers("super3-120b"), config_of(SUPER3, "default")
    for row in ("shared_experts", "mamba_out_proj", "lm_head", "latent_proj", "attention_qkv", "kv_cache"):
        other = "BF16" if getattr(cfg.precision, row) != "BF16" else "FP8"
        table = cfg.precision.model_copy(update={row: other})
        rules = quant_cfg(table, PRESETS["super3-120b"].hybrid_override_pattern, "mse")
        assert formats(rules, names) != formats(published["quant_cfg"], names), row


def test_the_mark_that_is_taken_out_of_names_is_the_librarys(sources: Sources) -> None:
    module = sources.tree("modelopt.torch.export.quant_aware_conversion")
    marks = [node.value for node in ast.walk(module) if isinstance(node, ast.Constant)]
    assert ".\0modelopt_name_sentinel" in marks
