"""Writes nemo_rl_schema.json: what NeMo-RL and the NeMo Gym that belongs to it take, at the pinned version.

    git clone --branch v0.7.0 https://github.com/NVIDIA-NeMo/RL
    pip download --no-deps nemo-gym==0.4.0 && unzip -d Gym nemo_gym-0.4.0-*.whl
    python tests/contracts/record_nemo_rl.py RL Gym

NeMo-RL is on no package index, so its sources are read here, once a version, as syntax trees. Recorded are

    types      fields of each config class below the two MasterConfigs: annotation, and whether it has to be there
    reads      key -> the groups that it is read from, each with one place; `*` is a group handed on whole, `**group`
    datasets   what a reader of files takes: keys of data.train and data.validation
    names      what the scripts import: parameters, how many values a call returns
    examples   keys of groups that NeMo-RL hands on to vLLM unread, as its own configs have them
    configs    keys of NeMo-RL's own configs for these models: what a config has to say
    rollouts   what NeMo-RL reads of a record, and of what Gym returns for it; paths that Gym's simple agent asks
    gym        config file -> its instances; app -> fields of its config class; keys of the global config
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from sources import Sources, parse_quietly

HERE = Path(__file__).parent
RECORD = HERE / "nemo_rl_schema.json"
RECIPES = HERE.parents[1] / "src/nemotron/recipes"
ROOTS = {
    "grpo": ("nemo_rl.algorithms.grpo", "MasterConfig"),
    "dpo": ("nemo_rl.algorithms.dpo", "MasterConfig"),
    "vllm": ("nemo_rl.models.generation.vllm.config", "VllmConfig"),  # what policy.generation is with vLLM
}
# Groups with keys that no class lists, as the sources call them; env is also `env_config`, and so on.
OPEN_GROUPS = {
    "megatron_cfg", "optimizer", "scheduler", "vllm_cfg", "vllm_kwargs", "serving_chat_kwargs", "chat_template_kwargs",
    "env", "env_config", "env_configs", "nemo_gym", "nemo_gym_dict", "initial_global_config_dict",
}  # fmt: skip
HANDED_TO_VLLM = ("vllm_kwargs", "http_server_serving_chat_kwargs", "chat_template_kwargs")
CONFIGS = {
    "nano3": "examples/nemo_gym/grpo_nanov3.yaml",
    "super3-rlvr": "examples/nemo_gym/nemotron-3-super/stage1_rlvr.yaml",
    "super3-swe1": "examples/nemo_gym/nemotron-3-super/stage2_swe1.yaml",
    "super3-swe2": "examples/nemo_gym/nemotron-3-super/stage2_swe2.yaml",
    "super3-rlhf": "examples/nemo_gym/nemotron-3-super/stage3_rlhf.yaml",
    "dpo": "examples/configs/dpo.yaml",
}
DATASETS = {
    "NemoGymDataset": "nemo_rl/data/datasets/response_datasets/nemogym_dataset.py",
    "PreferenceDataset": "nemo_rl/data/datasets/preference_datasets/preference_dataset.py",
}
ROLLOUT_FILES = ("nemo_rl/environments/nemo_gym.py", "nemo_rl/experience/rollouts.py", "nemo_rl/data/processors.py")
ROLLOUT_GROUPS = (
    "datum_dict", "row", "nemo_gym_row", "responses_create_params", "nemo_gym_result", "response", "output_item_dict",
    "full_result",
)  # fmt: skip
KINDS = ("resources_servers", "responses_api_models", "responses_api_agents")


def record_types(sources: Sources) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Root -> its class, and every class below: field -> annotation with whole names, and whether it is required."""
    types: dict[str, dict[str, Any]] = {}

    def visit(module: str, name: str) -> str:
        home, node = sources.definition(module, name)
        assert isinstance(node, ast.ClassDef)
        whole = f"{home}.{node.name}"
        if whole not in types:
            types[whole] = {}
            for base in node.bases:
                if isinstance(base, ast.Name):
                    with contextlib.suppress(LookupError):  # of another library, as TypedDict
                        types[whole] |= types[visit(home, base.id)]
            for entry in node.body:
                if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                    text = ast.unparse(entry.annotation)
                    required = not text.startswith("NotRequired[") and entry.value is None
                    text = with_whole_names(home, re.sub(r"^NotRequired\[(.*)\]$", r"\1", text))
                    types[whole][entry.target.id] = {"type": text, "required": required}
        return whole

    def with_whole_names(module: str, text: str) -> str:
        for name in sorted({node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}):
            try:
                _, node = sources.definition(module, name)
            except LookupError:
                continue
            if isinstance(node, ast.ClassDef):
                text = re.sub(rf"(?<![\w.]){name}\b", visit(module, name), text)
        return text

    return {root: visit(*where) for root, where in ROOTS.items()}, types


def record_reads(checkout: Path) -> dict[str, dict[str, str]]:
    """Key -> group that it is read from -> the first place: `group["key"]`, `group.get("key")`, `group.key`."""
    reads: dict[str, dict[str, str]] = {}
    for file in sorted((checkout / "nemo_rl").rglob("*.py")):
        place = file.relative_to(checkout).as_posix()
        for group, key, line in _reads_of(parse_quietly(file)):
            reads.setdefault(key, {}).setdefault(group, f"{place}:{line}")
    return reads


def _reads_of(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=owner, slice=ast.Constant(value=str(key)), ctx=ast.Load()):
                yield _group(owner), key, node.lineno
            case ast.Call(func=ast.Attribute(value=owner, attr="get" | "pop"), args=[ast.Constant(value=str(key)), *_]):
                yield _group(owner), key, node.lineno
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(key)), *_]):
                yield _group(owner), key, node.lineno
            case ast.Attribute(value=owner, attr=key, ctx=ast.Load()):
                yield _group(owner), key, node.lineno
            case ast.Call(keywords=keywords):
                for word in keywords:
                    if word.arg is None:
                        yield _group(word.value), "*", node.lineno
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if key is None:
                        yield _group(value), "*", node.lineno


def _group(owner: ast.expr) -> str:
    """What stands before the key: `megatron_cfg` of `config["megatron_cfg"]`, `self.megatron_cfg`, `megatron_cfg`."""
    match owner:
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return key
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(key)), *_]):
            return key
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def imported_names() -> set[tuple[str, str]]:
    """Module and name of all that our scripts import from NeMo-RL."""
    trees = [parse_quietly(file) for file in RECIPES.rglob("*_nemo_rl.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {
        (node.module, alias.name)
        for node in nodes
        if node.module and node.module.startswith("nemo_rl.")
        for alias in node.names
    }


def record_names(sources: Sources) -> dict[str, dict[str, Any]]:
    """What the scripts import -> parameters in order, those without a default, and how many values come back."""
    names: dict[str, dict[str, Any]] = {}
    for module, name in sorted(imported_names()):
        _, node = sources.definition(module, name)
        if isinstance(node, ast.ClassDef):
            names[f"{module}.{name}"] = {"class": True}
            continue
        parameters = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        returned = re.match(r"tuple\[(.*)\]$", ast.unparse(node.returns) if node.returns else "", re.DOTALL)
        count = ast.parse(returned[1], mode="eval").body if returned else None
        names[f"{module}.{name}"] = {
            "parameters": parameters,
            "required": parameters[: len(parameters) - len(node.args.defaults)],
            "returns": len(count.elts) if isinstance(count, ast.Tuple) else 1,
        }
    return names


def record_datasets(checkout: Path) -> dict[str, list[str]]:
    """Reader -> parameters; it swallows others."""
    found = {}
    for name, file in DATASETS.items():
        for node in ast.walk(parse_quietly(checkout / file)):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                found[name] = [argument.arg for argument in node.args.args[1:]]
    return found


def record_examples(checkout: Path) -> dict[str, list[str]]:
    """Keys of the groups that go to vLLM unread, from all of NeMo-RL's own configs."""
    found: dict[str, set[str]] = {group: set() for group in HANDED_TO_VLLM}

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in found and isinstance(inner, dict):
                    found[key] |= set(inner)
                visit(inner)

    for file in sorted((checkout / "examples").rglob("*.yaml")):
        visit(yaml.safe_load(file.read_text(encoding="utf-8")))
    return {group: sorted(keys) for group, keys in found.items()}


def record_configs(checkout: Path) -> dict[str, list[str]]:
    """Keys of NeMo-RL's own configs, with dots, those of Gym's servers left out."""
    found = {}
    for name, file in CONFIGS.items():
        keys = set(_paths(yaml.safe_load((checkout / file).read_text(encoding="utf-8"))))
        found[name] = sorted(key for key in keys if not key.startswith("env.nemo_gym."))
    return found


def _paths(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _paths(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def record_rollouts(checkout: Path, gym: Path) -> dict[str, list[str]]:
    """Group -> keys that have to be there: read as `group["key"]` or `group.pop("key")`, without a default."""
    found: dict[str, set[str]] = {group: set() for group in ROLLOUT_GROUPS}
    for name in ROLLOUT_FILES:
        tree = parse_quietly(checkout / name)
        if name.endswith("processors.py"):
            tree.body = [node for node in tree.body if getattr(node, "name", "") == "nemo_gym_data_processor"]
        for node in ast.walk(tree):
            match node:
                case ast.Subscript(value=owner, slice=ast.Constant(value=str(key)), ctx=ast.Load()):
                    found.get(_group(owner), set()).add(key)
                case ast.Call(func=ast.Attribute(value=owner, attr="pop"), args=[ast.Constant(value=str(key))]):
                    found.get(_group(owner), set()).add(key)
    agent = parse_quietly(gym / "responses_api_agents/simple_agent/app.py")
    words = [node for node in ast.walk(agent) if isinstance(node, ast.keyword) and node.arg == "url_path"]
    paths = {str(word.value.value) for word in words if isinstance(word.value, ast.Constant)}
    return {**{group: sorted(keys) for group, keys in found.items()}, "agent_paths": sorted(paths)}


def record_gym(folder: Path) -> dict[str, Any]:
    """The servers of the configs that ours name, whatever of them a config may set."""
    named: set[str] = set()
    for file in RECIPES.rglob("stage2_rl/config/**/*.yaml"):
        named |= set(re.findall(r"[\w/]+/configs/[\w.-]+\.yaml", file.read_text(encoding="utf-8")))
    sources, configs, apps = Sources([folder]), dict[str, Any](), dict[str, Any]()
    for name in sorted(named):
        instances = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
        configs[name] = {
            instance: [f"{kind}/{app}" for kind in KINDS for app in value.get(kind, {})]
            for instance, value in instances.items()
            if isinstance(value, dict)
        }
    listed = {app for instances in configs.values() for paths in instances.values() for app in paths}
    for app in sorted(listed | {"responses_api_models/local_vllm_model", "responses_api_models/genrm_model"}):
        module = f"{app.replace('/', '.')}.app"
        for node in sources.tree(module).body:
            # The config class of the app is what its server is annotated with: `config: NAME`.
            if isinstance(node, ast.ClassDef):
                for entry in node.body:
                    if isinstance(entry, ast.AnnAssign) and ast.unparse(entry.target) == "config":
                        config = re.split(r"\W", ast.unparse(entry.annotation))[0]  # of `A | B` what a config file sets
                        fields = sources.fields(module, config)
                        apps[app] = {name: ast.unparse(annotation) for name, annotation in sorted(fields.items())}
    constants = [node for node in sources.tree("nemo_gym.global_config").body if isinstance(node, ast.Assign)]
    names = [node.value.value for node in constants if isinstance(node.value, ast.Constant)]
    return {"configs": configs, "apps": apps, "global": sorted(name for name in names if isinstance(name, str))}


def main() -> None:
    """Read both folders and write the record."""
    checkout, gym = Path(sys.argv[1]), Path(sys.argv[2])
    sources = Sources([checkout])
    roots, types = record_types(sources)
    keys = {field for fields in types.values() for field in fields}
    reads = {}
    for key, places in sorted(record_reads(checkout).items()):
        untyped = {group: place for group, place in places.items() if group in OPEN_GROUPS}
        if key in keys or untyped:
            reads[key] = dict(sorted({**dict(list(places.items())[:3]), **untyped}.items()))
    version = ast.literal_eval(
        re.search(r"MAJOR = (\d+)\nMINOR = (\d+)\nPATCH = (\d+)", (checkout / "nemo_rl/package_info.py").read_text())
        .expand(r"('\1', '\2', '\3')")
    )  # fmt: skip
    commit = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    record = {
        "nemo_rl": {"version": ".".join(version), "commit": commit.stdout.strip()},
        "nemo_gym": {"version": "0.4.0"},
        "roots": roots,
        "types": types,
        "reads": reads,
        "datasets": record_datasets(checkout),
        "names": record_names(sources),
        "examples": record_examples(checkout),
        "configs": record_configs(checkout),
        "rollouts": record_rollouts(checkout, gym),
        "gym": record_gym(gym),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
