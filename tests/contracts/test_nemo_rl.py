"""Scripts over NeMo-RL and their configs, against what was recorded of its sources: names, signatures, keys, readers.

NeMo-RL is on no package index; `record_nemo_rl.py` made nemo_rl_schema.json of a checkout, and of the NeMo Gym that
belongs to it. The library takes any key and passes over one that it does not know, so a key also has to be read
somewhere.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sources import Signature, accepts, call_faults, parse_quietly

import nemotron.recipes
from nemo_runspec.config.loader import load_config
from nemo_runspec.config.schema import load_schema
from nemo_runspec.runspec import parse
from nemotron.kit.nemo_rl import master_values

RECIPES = Path(nemotron.recipes.__file__).parent
SCRIPTS = sorted(RECIPES.glob("*/*/*_nemo_rl.py"))
RECORD: dict[str, Any] = json.loads(Path(__file__).with_name("nemo_rl_schema.json").read_text(encoding="utf-8"))
TYPES, READS, GYM = RECORD["types"], RECORD["reads"], RECORD["gym"]
# What the sources call a group whose keys no class lists.
ALIASES = {
    "megatron_cfg": ["megatron_cfg"],
    "vllm_cfg": ["vllm_cfg"],
    "env": ["env", "env_config", "env_configs"],
    "nemo_gym": ["nemo_gym", "nemo_gym_dict", "initial_global_config_dict"],
}
# Groups that are handed on whole, and what they are called there: whoever gets them takes no other keys.
WHOLE = {"optimizer": "optimizer", "scheduler": "scheduler"}
CLASSES = {"generation": RECORD["roots"]["vllm"]}  # group -> what it is here, where its annotation says less
# Our config -> that of the library for the same model, which says all that a run has to be told.
COUNTERPARTS = {
    "nano3/default": "nano3", "nano3/final": "nano3", "nano3/rlhf/default": "nano3", "nano3/dpo/default": "dpo",
    "super3/rlvr1": "super3-rlvr", "super3/rlvr2": "super3-rlvr", "super3/rlvr3": "super3-rlvr",
    "super3/swe1": "super3-swe1", "super3/swe2": "super3-swe2", "super3/rlhf/default": "super3-rlhf",
}  # fmt: skip
# Parts of the library that are off here, or that belong to its other backends.
NOT_OURS = re.compile(
    r"policy\.(dtensor_cfg|draft|dynamic_batching|optimizer|scheduler|generation\.mcore_generation_config|generation\.port_range)"
    r"|policy\.megatron_cfg\.(fp8_cfg|peft|env_vars|force_reconvert|linear_ce)|.*_port_range_|logger\.(mlflow|swanlab)\."
    r"|grpo\.(reward_shaping|reward_scaling|dynamic_sampling)|checkpointing\.(model_save_format|save_consolidated)"
    r"|policy\.(hf_config_overrides|generation_batch_size)|cluster\.segment_size|data\.(train|validation)\."
    r"|policy\.megatron_cfg\.scheduler\.lr_decay_iters|policy\.sequence_packing\.sequence_length_round"
    r"|policy\.generation\.vllm_cfg\.(use_deep_gemm|num_\w+_layers_in_bf16|enable_vllm_metrics|vllm_metrics)"
    r"|logger\.tensorboard\."
)


def config_files() -> dict[str, tuple[Path, Path]]:
    """`nano3/rlhf/default` -> script and file of a config that one of the scripts is for."""
    found = {}
    for family in ("nano3", "super3"):
        folder = RECIPES / family / "stage2_rl/config"
        for file in sorted(folder.rglob("*.yaml")):
            if file.parent.name == "shared":
                continue
            script = str(load_config(file.parent, str(file)).run.script or "").rpartition("/")[2]
            if script.endswith("_nemo_rl.py"):
                name = f"{family}/{file.relative_to(folder).with_suffix('')}"
                found[name] = (RECIPES / "nano3/stage2_rl" / script, file)
    return found


CONFIGS = config_files()


def resolved(name: str) -> dict[str, Any]:
    """All values of a config as the script hands them on; artifacts as text."""
    script, file = CONFIGS[name]
    text = json.dumps(load_config(file.parent, str(file)).data)
    values = json.loads(re.sub(r"\$\{art:\w+,\w+\}", "/artifact", text))
    schema = load_schema(parse(script))
    assert schema is not None
    return master_values(schema.model_validate_json(json.dumps(interpolated(values))), Path("/run"))


def interpolated(values: dict[str, Any]) -> dict[str, Any]:
    """`${a.b}` replaced by the value there."""

    def at(path: str) -> Any:
        value: Any = values
        for key in path.split("."):
            value = value[key]
        return of(value)

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: of(inner) for key, inner in value.items()}
        match = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
        return at(match[1]) if match else value

    result: dict[str, Any] = of(values)
    return result


def faults(values: dict[str, Any], class_name: str, prefix: str = "") -> Iterator[str]:
    """What the library would not take, would not listen to, or would miss."""
    fields, group = TYPES[class_name], prefix.rstrip(".").rpartition(".")[2]
    for key, value in values.items():
        where = f"{prefix}{key}"
        if group in ("train", "validation"):
            if not any(key in parameters for parameters in RECORD["datasets"].values()):
                yield f"{where}: no parameter of {' or '.join(RECORD['datasets'])}"
        elif key not in fields:
            if not any(alias in READS.get(key, {}) for alias in ALIASES.get(group, ())):
                yield f"{where}: no key of {class_name.rpartition('.')[2]}"
        elif not (key in READS or fields[key]["required"] or WHOLE.get(group) in READS["*"]):
            yield f"{where}: nothing reads it"  # what the class demands has to be there nevertheless
        else:
            yield from type_faults(CLASSES.get(key, fields[key]["type"]), value, where)
    for key, field in fields.items():
        if field["required"] and key not in values:
            yield f"{prefix}{key}: missing"


def type_faults(annotation: str, value: Any, where: str) -> Iterator[str]:
    """Those of one value; a group is looked into, as the class of its annotation that it fits best."""
    classes = [name for name in re.findall(r"[\w.]+", annotation) if name in TYPES]
    if isinstance(value, dict) and "enabled" in value:  # a part that is on is of another class than one that is off
        classes = [name for name in classes if takes(TYPES[name]["enabled"]["type"], value["enabled"])] or classes
    key = where.rpartition(".")[2]
    if isinstance(value, dict) and classes:
        yield from min((list(faults(value, name, f"{where}.")) for name in classes), key=len)
    elif isinstance(value, dict) and "dict[" in annotation:
        if key == "nemo_gym":
            yield from gym_faults(value, f"{where}.")
        elif key in RECORD["examples"]:
            yield from (
                f"{where}.{name}: in no config of NeMo-RL" for name in value if name not in RECORD["examples"][key]
            )
        elif key == "env":
            for name, inner in value.items():
                if not any(alias in READS.get(name, {}) for alias in ALIASES["env"]):
                    yield f"{where}.{name}: nothing reads it"
                if name == "nemo_gym":
                    yield from gym_faults(inner, f"{where}.nemo_gym.")
    else:
        if not takes(annotation.replace("PathLike", "str"), value):
            yield f"{where} = {value!r}: NeMo-RL has {annotation}"


def takes(annotation: str, value: Any) -> bool:
    return accepts(ast.parse(annotation, mode="eval").body, value)


def gym_faults(values: dict[str, Any], prefix: str) -> Iterator[str]:
    """Keys that neither NeMo-RL nor Gym reads, config files that are not there, keys of servers that do not exist."""
    paths = values["config_paths"]
    yield from (f"{prefix}config_paths: no {path}" for path in paths if path not in GYM["configs"])
    instances = {name: apps for path in paths for name, apps in GYM["configs"].get(path, {}).items()}
    for name, value in values.items():
        read = any(alias in READS.get(name, {}) for alias in ALIASES["nemo_gym"]) or name in GYM["global"]
        if read and name not in instances:
            continue
        if not isinstance(value, dict):
            yield f"{prefix}{name}: nothing reads it"
            continue
        apps = {f"{kind}/{app}": settings for kind, of_kind in value.items() if isinstance(of_kind, dict)
                for app, settings in of_kind.items()}  # fmt: skip
        for app, settings in apps.items():
            if name in instances and app not in instances[name]:
                yield f"{prefix}{name}: {app} is not what its config file has: {', '.join(instances[name])}"
            elif name not in instances and "entrypoint" not in settings and "_copy" not in value:
                yield f"{prefix}{name}: no config file has it"
            for key, setting in settings.items():
                fields = GYM["apps"].get(app, {})
                if key not in fields:
                    yield f"{prefix}{name}.{app}.{key}: no field of its config class"
                elif not gym_accepts(fields[key], setting):
                    yield f"{prefix}{name}.{app}.{key} = {setting!r}: Gym has {fields[key]}"
                elif key.endswith("_server") and setting["name"] not in {*instances, *values}:
                    yield f"{prefix}{name}.{app}.{key}: no server {setting['name']}"


def gym_accepts(annotation: str, value: Any) -> bool:
    if isinstance(value, dict):
        return not re.fullmatch(r"(Optional\[)?(int|float|str|bool)\]?", annotation)
    return takes(annotation, value)


def root_of(values: dict[str, Any]) -> str:
    return RECORD["roots"]["grpo" if "grpo" in values else "dpo"]


def keys_of(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from keys_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_every_config_of_the_published_size_has_a_counterpart() -> None:
    assert set(CONFIGS) == set(COUNTERPARTS)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_is_one_of_its_type_that_something_reads(name: str) -> None:
    values = resolved(name)
    assert list(faults(values, root_of(values))) == []


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_says_all_that_the_library_s_own_config_says(name: str) -> None:
    """The library reads many keys without a default, also such as its classes call optional."""
    ours = set(keys_of(resolved(name)))
    missing = []
    for path in RECORD["configs"][COUNTERPARTS[name]]:
        group, _, key = path.rpartition(".")
        read = READS.get(key, {})
        typed = any(key in fields for fields in TYPES.values())
        if path in ours or NOT_OURS.match(path) or not read:
            continue
        if typed or any(alias in read for alias in ALIASES.get(group.rpartition(".")[2], ())):
            missing.append(path)
    assert missing == []


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_to_begin_with_are_read_without_the_config_of_a_newer_library(name: str) -> None:
    """`megatron_bridge` instantiates run_config.yaml, and SFT's names classes that NeMo-RL's Megatron-Bridge lacks.

    That is 554c7b9 of June 2026 with another Megatron-LM: `models/hybrid`, where 0.6.2 has its provider, came after it.
    """
    assert resolved(name)["checkpointing"]["pretrained_checkpoint"]["format"] == "megatron_lm"


def script_faults(script: Path, names: dict[str, Any]) -> Iterator[str]:
    """Imports that are not there, calls that the library would refuse, an image of another version."""
    tree = parse_quietly(script)
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nemo_rl."):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in names:
                    imported[alias.asname or alias.name] = names[whole]
                else:
                    yield f"no {whole}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in imported:
            function = imported[node.func.id]
            if "parameters" not in function:
                continue
            parameters = function["parameters"]
            yield from call_faults(node, Signature(parameters, len(parameters), set(function["required"])))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Tuple):
            function = imported.get(getattr(node.value.func, "id", ""), {})
            taken = len(node.targets[0].elts)
            if function.get("returns", 1) not in (1, taken):
                yield f"{ast.unparse(node.value.func)} returns {function['returns']}: {taken} are taken"
    if not str(parse(script).image).endswith(f":v{RECORD['nemo_rl']['version']}"):
        yield f"{parse(script).image} is not of version {RECORD['nemo_rl']['version']}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_a_script_imports_and_calls_exists(script: Path) -> None:
    assert list(script_faults(script, RECORD["names"])) == []


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("grpo.num_generation_per_prompt", 16, "no key of GRPOConfig"),
        ("grpo.penalize_invalid_tool_call", True, "no key of GRPOConfig"),  # in the library's config, read nowhere
        ("grpo.seed", "42", "NeMo-RL has int"),
        ("policy.megatron_cfg.moe_aux_loss_coeff", 0.0, "no key of MegatronConfig"),  # likewise
        ("policy.megatron_cfg.recompute_granularity", "some", "NeMo-RL has Literal"),
        ("policy.megatron_cfg.optimizer.learning_rate", 1.0, "no key of MegatronOptimizerConfig"),
        ("policy.generation.vllm_cfg.kv_cache_dtype", "fp9", "NeMo-RL has Literal"),
        ("policy.generation.vllm_cfg.prefix_caching", True, "no key of VllmSpecificArgs"),
        ("policy.generation.vllm_kwargs.mamba_cache_dtype", "float32", "in no config of NeMo-RL"),
        ("policy.precision", 16, "NeMo-RL has str"),
        ("loss_fn.ratio_clip", 0.2, "no key of ClippedPGLossConfig"),
        ("checkpointing.pretrained_checkpoint.format", "hf", "NeMo-RL has Literal"),
        ("data.train.repeats", 2, "no parameter of NemoGymDataset"),
        ("env.use_nemo_gym", True, "nothing reads it"),
        ("env.nemo_gym.num_gpu_node", 7, "nothing reads it"),
        ("env.nemo_gym.code_gen.resources_servers.code_gen.unit_test_timeout", 10, "no field of its config class"),
        ("env.nemo_gym.code_gen.resources_servers.code_gen.num_processes", "many", "Gym has int"),
        ("env.nemo_gym.inverse_if.resources_servers.inverse_if.judge_model_server", {"name": "x"}, "no server x"),
    ],
)  # fmt: skip
def test_a_planted_mistake_is_found(path: str, value: Any, fault: str) -> None:
    values = resolved("super3/rlvr1")
    group: Any = values
    *groups, key = path.split(".")
    for name in groups:
        group = group[name]
    group[key] = value
    assert [text for text in faults(values, root_of(values)) if key in text and fault in text]


def test_a_missing_key_and_a_config_file_that_is_not_there_are_found() -> None:
    values = resolved("nano3/default")
    del values["policy"]["megatron_cfg"]["pipeline_dtype"]
    values["env"]["nemo_gym"]["config_paths"].append("resources_servers/mcq/configs/mcq.yaml")
    found = list(faults(values, root_of(values)))
    assert [text.partition(":")[2].split()[0] for text in found] == ["missing", "no"]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("import get_tokenizer", "import load as get_tokenizer", "no nemo_rl.algorithms.utils.load"),
        ("grpo_save_state=state", "save_state=state", "async_grpo_train does not take that"),
        ("checkpointer, state, master,\n", "checkpointer, state,\n", "grpo_train wants master_config"),
        ("checkpointer, state, master, teachers", "checkpointer, state, teachers", "setup returns 13: 12 are taken"),
        ("nemo-rl:v0.7.0", "nemo-rl:v0.6.0", "is not of version 0.7.0"),
    ],
)  # fmt: skip
def test_a_planted_name_signature_or_version_is_found(tmp_path: Path, old: str, new: str, fault: str) -> None:
    source = RECIPES / "nano3/stage2_rl/train_nemo_rl.py"
    text = source.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "config").mkdir()
    (tmp_path / "nemo_rl_schema.py").touch()
    script = tmp_path / source.name
    script.write_text(text.replace(old, new), encoding="utf-8")
    assert [found for found in script_faults(script, RECORD["names"]) if fault in found]
