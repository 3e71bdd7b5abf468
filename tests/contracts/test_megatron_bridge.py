"""Scripts over Megatron-Bridge and their configs, against its sources: names, signatures, fields, types, readers."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from sources import Sources, accepts, call_faults, unpacked

import nemotron.recipes
from nemo_runspec.config.loader import load_config
from nemo_runspec.config.schema import load_schema
from nemo_runspec.execution.launch_script import Launch
from nemo_runspec.execution.node import node_command
from nemo_runspec.execution.place import Place
from nemo_runspec.runspec import find_script, parse
from nemotron.kit.megatron import FP32
from nemotron.kit.schemas.megatron import DIMENSIONS, MegatronConfig, MixedPrecision

RECIPES = Path(nemotron.recipes.__file__).parent
SCRIPTS = sorted(RECIPES.glob("*/*/train_megatron.py"))
TOOLS = sorted(RECIPES.glob("tools/megatron_*.py"))
# The groups of our configs that are handed on, and the class of the library whose fields they set.
CONFIG = "megatron.bridge.training.config"
GROUPS = {
    "model": ("megatron.bridge.models.hybrid.hybrid_provider", "HybridModelProvider"),
    "train": (CONFIG, "TrainingConfig"),
    "validation": (CONFIG, "ValidationConfig"),
    "optimizer": (CONFIG, "OptimizerConfig"),
    "scheduler": (CONFIG, "SchedulerConfig"),
    "ddp": (CONFIG, "DistributedDataParallelConfig"),
    "checkpoint": (CONFIG, "CheckpointConfig"),
    "logger": (CONFIG, "LoggerConfig"),
    "ft": (CONFIG, "FaultToleranceConfig"),
    "inprocess_restart": (CONFIG, "InProcessRestartConfig"),
    "nvrx_straggler": (CONFIG, "NVRxStragglerDetectionConfig"),
}
OURS = {"train": {"train_tokens"}}  # keys that are not handed on
PUBLISHED = {
    "nano3": {"default", "phase2", "long_context"},
    "super3": {"default", "phase1", "phase2", "long_context_1m", "long_context_mixed"},
    "nano2": {"phase1", "phase2", "phase3", "long_context"},
}

pytestmark = pytest.mark.usefixtures("libraries")


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(unpacked("megatron-bridge", "megatron-core"))


def configs_of(script: Path) -> list[Path]:
    """Configs of any family that name this script, themselves or by what they build on."""
    stage = script.parent.name
    files = sorted(RECIPES.glob(f"*/{stage}/config/**/*.yaml"))
    named = {file: load_config(file.parent, str(file)).data["run"].get("script") for file in files}
    return [
        file
        for file, name in named.items()
        if name and script == (find_script(file.parent, name) if "/" in name else file.parent.parent / name)
    ]


def precisions(sources: Sources) -> set[str]:
    """Names that `get_mixed_precision_config` knows."""
    tree = sources.tree("megatron.bridge.training.mixed_precision")
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if "register" in map(ast.unparse, node.decorator_list)}


def faults(values: dict[str, Any], sources: Sources) -> list[str]:
    """What the library would not take, or would not listen to, of one config."""
    found = []
    for group, (module, name) in GROUPS.items():
        fields = sources.fields(module, name)
        for key, value in (values.get(group) or {}).items():
            if key in OURS.get(group, ()):
                continue
            if key not in fields:
                found.append(f"{group}.{key}: no field of {name}")
            elif not accepts(fields[key], value):
                found.append(f"{group}.{key} = {value!r}: {name} has {ast.unparse(fields[key])}")
            elif key not in sources.attributes_read:
                found.append(f"{group}.{key}: nothing reads it")
    try:
        sources.definition("megatron.bridge.recipes.nemotronh", values["recipe"])
    except LookupError as error:
        found.append(f"recipe: {error}")
    if values["mixed_precision"] not in precisions(sources):
        found.append(f"mixed_precision: no recipe {values['mixed_precision']}")
    return found


def resolved(config: Path, script: Path) -> dict[str, Any]:
    """All values of a config, defaults of the schema included, as the script hands them on; artifacts as text."""
    spec = parse(script)
    values = load_config(config.parent, str(config)).data
    values["dataset"]["path"] = "data"
    for key in ("family", "env"):
        values["run"].pop(key, None)  # the toolkit's
    schema = load_schema(spec)
    assert schema is not None
    checked = schema.model_validate(values)
    assert isinstance(checked, MegatronConfig)
    return checked.model_dump() | {"model": checked.model.fields()}


CONFIGS = [(config, script) for script in SCRIPTS for config in configs_of(script)]


def test_every_published_phase_has_a_config() -> None:
    found = {(config.relative_to(RECIPES).parts[0], config.stem) for config, _ in CONFIGS}
    assert found == {(family, name) for family, names in PUBLISHED.items() for name in names}


@pytest.mark.parametrize(("config", "script"), CONFIGS, ids=lambda path: path.relative_to(RECIPES).as_posix())
def test_every_key_is_a_field_of_its_type_that_something_reads(config: Path, script: Path, sources: Sources) -> None:
    assert faults(resolved(config, script), sources) == []


@pytest.mark.parametrize(("config", "script"), CONFIGS, ids=lambda path: path.relative_to(RECIPES).as_posix())
def test_no_graph_of_the_router_is_within_recomputed_experts(config: Path, script: Path, sources: Sources) -> None:
    """`TransformerConfig` asserts it."""
    values = resolved(config, script)
    _, recipe = sources.definition("megatron.bridge.recipes.nemotronh", values["recipe"])
    graphed = "'moe_router'" in ast.unparse(recipe) and values["model"].get("cuda_graph_impl") != "none"
    assert not (graphed and "moe" in values["model"]["recompute_modules"])


def test_the_optimiser_s_own_defaults_are_fp32(sources: Sources) -> None:
    _, optimizer = sources.definition("megatron.core.optimizer.optimizer_config", "OptimizerConfig")
    defaults = {
        ast.unparse(node.target): ast.unparse(node.value)
        for node in optimizer.body
        if isinstance(node, ast.AnnAssign) and node.value is not None
    }
    assert [defaults[key] for key in FP32] == ["torch.float32"] * 4
    assert {*FP32, "use_precision_aware_optimizer"} <= set(sources.fields(CONFIG, "OptimizerConfig"))


def test_every_precision_that_a_config_may_name_exists(sources: Sources) -> None:
    assert set(get_args(MixedPrecision)) <= precisions(sources)


@pytest.mark.parametrize("model", [name for name in DIMENSIONS if name != "nemotron_3_super"])  # that one asks the Hub
def test_what_a_layout_has_to_divide_is_what_the_recipe_builds(model: str, sources: Sources) -> None:
    _, recipe = sources.definition("megatron.bridge.recipes.nemotronh", f"{model}_pretrain_config")
    provider = next(
        node
        for node in ast.walk(recipe)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "HybridModelProvider"
    )
    built = {
        word.arg: ast.literal_eval(word.value) for word in provider.keywords if isinstance(word.value, ast.Constant)
    }
    ours = DIMENSIONS[model]
    assert (ours.blocks, ours.heads) == (built["num_layers"], built["num_attention_heads"])
    assert (ours.mamba_heads, ours.groups) == (built["mamba_num_heads"], built["mamba_num_groups"])
    assert (ours.experts, ours.expert_width) == (built.get("num_moe_experts", 0), built.get("moe_ffn_hidden_size", 0))
    assert ours.blocks == len(built["hybrid_layer_pattern"])


def script_faults(text: str, sources: Sources) -> list[str]:
    """Calls of a script that the library would refuse, and names in its modules that are not there."""
    tree, found = ast.parse(text), []
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.")
        for alias in node.names
    }
    assert imported
    for module, name in imported.values():
        try:
            sources.definition(str(module), name)
        except LookupError:
            sources.tree(f"{module}.{name}")  # a module; LookupError: there is none, either
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in imported:
            module, name = imported[call.func.id]
            found += call_faults(call, sources.signature(str(module), name))
        elif isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in imported:
            module, name = imported[ast.unparse(call.func.value)]
            if name != "nemotronh":
                _, owner = sources.definition(str(module), name)
                if call.func.attr not in [node.name for node in owner.body if isinstance(node, ast.FunctionDef)]:
                    found.append(f"{name} has no {call.func.attr}")
    return found


@pytest.mark.parametrize("script", [*SCRIPTS, *TOOLS], ids=lambda script: script.relative_to(RECIPES).as_posix())
def test_what_a_script_imports_and_calls_exists(script: Path, sources: Sources) -> None:
    assert script_faults(script.read_text(encoding="utf-8"), sources) == []


@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        ("saves), forward_step, callbacks)", "saves))", "pretrain wants forward_step_func"),
        ("saves), forward_step, callbacks)", "saves), forward_step, None, saves)", "pretrain does not take that"),
        ("saves), forward_step, callbacks)", "saves), forward_step, config=cfg)", "pretrain does not take that"),
        ("saves), forward_step, callbacks)", "saves), forward=forward_step)", "pretrain does not take that"),
    ],
)
def test_a_planted_call_is_found(right: str, wrong: str, fault: str, sources: Sources) -> None:
    text = SCRIPTS[0].read_text(encoding="utf-8")
    assert right in text
    assert [found for found in script_faults(text.replace(right, wrong), sources) if fault in found]


def test_what_a_later_phase_sets_is_what_the_library_builds_its_data_from(sources: Sources) -> None:
    """Behind the checkpoint, before the data; and both are as they were when training begins."""
    built = ast.unparse(sources.tree("megatron.bridge.data.loaders"))
    assert "train_samples = cfg.train.train_samples" in built and "train_state.consumed_train_samples" in built
    setup = ast.unparse(sources.definition("megatron.bridge.training.setup", "setup")[1])
    steps = ("checkpoint_manager.load(", "fire('on_data_init_start'", "setup_data_iterators(")
    assert sorted(steps, key=setup.index) == list(steps)
    loop = ast.unparse(sources.definition("megatron.bridge.training.train", "train")[1])
    assert loop.index("fire('on_train_start'") < loop.index("consumed_train_samples +=")


def test_the_conversions_that_the_tools_call_take_what_they_give(sources: Sources) -> None:
    _, bridge = sources.definition("megatron.bridge", "AutoBridge")
    methods = {node.name: node.args for node in bridge.body if isinstance(node, ast.FunctionDef)}
    called = set()
    for call in (
        node for tool in TOOLS for node in ast.walk(ast.parse(tool.read_bytes())) if isinstance(node, ast.Call)
    ):
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in ("AutoBridge", "bridge"):
            taken = methods[call.func.attr]
            required = len(taken.args) - 1 - len(taken.defaults)
            assert required <= len(call.args) <= len(taken.args) - 1 and not call.keywords, ast.unparse(call)
            called.add(call.func.attr)
    assert called == {"from_hf_pretrained", "import_ckpt", "export_ckpt"}


def test_the_launcher_that_ends_what_hangs_takes_our_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "20001")
    roots = unpacked("nvidia-resiliency-ext")
    launcher = ast.parse((roots[0] / "nvidia_resiliency_ext/fault_tolerance/launcher.py").read_bytes())
    shared = ast.parse((roots[0] / "nvidia_resiliency_ext/fault_tolerance/cli_args.py").read_bytes())
    words = {node.value for tree in (launcher, shared) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    # Those of the guide, by the way of a profile.
    own = ["--max-restarts=3", "--ft-rank-section-timeouts=setup:600,step:180,checkpointing:420",
           "--ft-rank-out-of-section-timeout=300"]  # fmt: skip
    job = Launch(
        "demo", "torchrun", "t.py", "c.yaml", processes_per_node=8, launcher="ft_launcher", launcher_options=own
    )
    for nodes in (1, 2):
        command = node_command(job, Path("/bundle"), Place(0, nodes))
        module = command[command.index("-m") + 1]
        assert module == "nvidia_resiliency_ext.fault_tolerance.launcher"
        assert "def main" in ast.unparse(launcher) and any(
            isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in launcher.body
        )
        options = {word.partition("=")[0] for word in command[3 : command.index("/bundle/t.py")]}
        assert {"--nproc-per-node", *(word.partition("=")[0] for word in own)} < options <= words


TOKENIZER = ("megatron.bridge.training.tokenizers.config", "TokenizerConfig")
CLASSES = {  # of what a script sets in the recipe beside the groups of a config
    "tokenizer": TOKENIZER,
    "dataset": (CONFIG, "GPTDatasetConfig"),
    "mixed_precision": ("megatron.bridge.training.mixed_precision", "MixedPrecisionConfig"),
}


def assigned(script: Path) -> set[tuple[str, ...]]:
    """What a script sets in the library's config: (group, field), or a field of the whole."""
    tree = ast.parse(script.read_bytes())
    targets = [target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets]
    flat = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    names = [ast.unparse(target).split(".") for target in flat]
    return {tuple(words[1:]) for words in names if words[0] == "recipe" and len(words) > 1}


def unknown(names: set[tuple[str, ...]], sources: Sources) -> list[str]:
    """Those of them that the library does not have, or that nothing reads."""
    found = []
    for first, *rest in sorted(names):
        fields = sources.fields(CONFIG, "ConfigContainer")
        if rest and first in fields:
            fields = sources.fields(*(GROUPS | CLASSES)[first])
        name = rest[0] if rest else first
        if name not in fields or name not in sources.attributes_read:
            found.append(".".join([first, *rest]))
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_what_a_script_sets_in_the_recipe_is_a_field(script: Path, sources: Sources) -> None:
    names = assigned(script)
    assert {("mixed_precision",), ("checkpoint", "save"), ("train", "exit_signal_handler")} <= names
    assert unknown(names, sources) == []
    planted = {("train", "exit_signal_handle"), ("nvrx_stragler",), ("dataset", "blend_per_splits")}
    assert len(unknown(planted, sources)) == len(planted)


@pytest.mark.parametrize(
    ("group", "key", "value", "fault"),
    [
        ("scheduler", "lr_wsd_decay_itres", 5, "no field of SchedulerConfig"),
        ("scheduler", "lr_wsd_decay_style", "minus-sqrt", "SchedulerConfig has Literal"),
        ("train", "train_iters", "100", "TrainingConfig has int | None"),
        ("model", "sequence_parallel", 1, "HybridModelProvider has bool"),
        ("model", "recompute_modules", "moe", "HybridModelProvider has Optional[List[str]]"),
        ("model", "mtp_num_layers", 2.0, "HybridModelProvider has int | None"),
        ("model", "moe_aux_loss_coef", 1e-4, "no field of HybridModelProvider"),
        ("train", "exit_duration_in_min", 230, "no field of TrainingConfig"),
        ("checkpoint", "most_recent_k", "2", "CheckpointConfig has"),
        ("inprocess_restart", "soft_timout", 60.0, "no field of InProcessRestartConfig"),
    ],
)
def test_a_planted_mistake_is_found(sources: Sources, group: str, key: str, value: Any, fault: str) -> None:
    values = resolved(SCRIPTS[0].parent / "config/default.yaml", SCRIPTS[0])
    values[group][key] = value
    assert [text for text in faults(values, sources) if f"{group}.{key}" in text and fault in text]


def test_a_planted_name_of_another_version_is_found(sources: Sources) -> None:
    values = resolved(SCRIPTS[0].parent / "config/default.yaml", SCRIPTS[0])
    values |= {"recipe": "nemotron_3_nano_finetune_config", "mixed_precision": "bf16_mixd"}  # the first one is of 0.3
    assert len(faults(values, sources)) == 2


def test_a_field_that_nothing_reads_is_found(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text("class C:\n    a: int\n    b: int\n\ndef f(c):\n    c.b = 1\n    return c.a\n")
    assert Sources([tmp_path]).attributes_read == {"a"}


# ---- what a recipe sets and no key of a config covers

INHERITED = Path(__file__).with_name("megatron_bridge_inherited.yaml")
GROUP_OF = {name: group for group, (_, name) in (GROUPS | CLASSES).items()} | {
    "RNGConfig": "rng", "DistributedInitConfig": "dist", "CommOverlapConfig": "comm_overlap",
}  # fmt: skip


def set_by(home: str, name: str, sources: Sources) -> dict[str, str]:
    """Field -> value that a recipe function, or one of its package that it calls, sets in the library's config.

    `group.field`, or `group.function()` for a call that gets a group and stands elsewhere. The last value counts.
    """
    home, function = sources.definition(home, name)
    found: dict[str, str] = {}
    for node in in_order(function):
        if isinstance(node, ast.Assign):
            for target in map(ast.unparse, node.targets):
                if target.startswith(("cfg.", "model.")):
                    value = ast.unparse(node.value)
                    found |= {target.removeprefix("cfg."): "made here" if isinstance(node.value, ast.Call) else value}
        if not isinstance(node, ast.Call):
            continue
        called, given = ast.unparse(node.func), [ast.unparse(argument) for argument in node.args[:1]]
        if called in GROUP_OF:
            found |= {f"{GROUP_OF[called]}.{word.arg}": ast.unparse(word.value) for word in node.keywords}
        elif is_recipe(home, called, sources):
            found |= set_by(home, called, sources)
        elif given and given[0].startswith("cfg."):
            found[f"{given[0].removeprefix('cfg.')}.{called}()"] = ", ".join(map(ast.unparse, node.args[1:]))
    return found


def in_order(function: ast.AST) -> list[ast.AST]:
    """Its nodes, in the order of the source; a call before the assignment that it is the value of."""
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.Call)]
    return sorted(nodes, key=lambda node: (node.end_lineno, node.end_col_offset, -node.col_offset))


def is_recipe(home: str, name: str, sources: Sources) -> bool:
    """Whether a module knows a function of the recipes' package by that name."""
    try:
        module, node = sources.definition(home, name)
    except LookupError:
        return False
    return module.startswith("megatron.bridge.recipes.") and isinstance(node, ast.FunctionDef)


def inherited(config: Path, script: Path, sources: Sources) -> dict[str, str]:
    """What the recipe of a config sets and neither the config nor its script."""
    values = resolved(config, script)
    stated = {f"{group}.{key}" for group in GROUPS for key in values.get(group) or {}}
    stated |= {".".join(names) for names in assigned(script)} | {f"optimizer.{key}" for key in FP32}
    stated |= {"optimizer.use_precision_aware_optimizer"}  # `keep_in_fp32`
    return {
        field: value
        for field, value in set_by("megatron.bridge.recipes.nemotronh", values["recipe"], sources).items()
        if field not in stated and field.partition(".")[0] not in stated
    }


def test_what_is_inherited_from_recipes_is_listed_with_its_value_and_a_reason(sources: Sources) -> None:
    """A field, or a value, that a version of the library brings is decided upon: stated in the configs, or listed."""
    found: dict[str, set[str]] = {}
    for config, script in CONFIGS:
        for field, value in inherited(config, script, sources).items():
            found.setdefault(field, set()).add(value)
    listed = yaml.safe_load(INHERITED.read_text(encoding="utf-8"))
    fields = {field: entry for entries in listed.values() for field, entry in entries.items()}
    assert {field: sorted(values) for field, values in found.items()} == fields
    assert sum(map(len, listed.values())) == len(fields)  # none has two reasons


def test_a_field_or_a_value_that_a_version_brings_is_seen(tmp_path: Path) -> None:
    package = tmp_path / "megatron/bridge/recipes"
    package.mkdir(parents=True)
    (package / "nemotronh.py").write_text(
        "from megatron.bridge.recipes.common import base\n\n\ndef small_config():\n    cfg = base()\n"
        "    cfg.model = HybridModelProvider(num_layers=2)\n    cfg.model.qk_clip = True\n"
        "    cfg.rng.seed = 2\n    set_modules(cfg.model, ['attn'])\n    return cfg\n"
    )
    (package / "common.py").write_text("def base():\n    return ConfigContainer(rng=RNGConfig(seed=1, te=False))\n")
    found = set_by("megatron.bridge.recipes.nemotronh", "small_config", Sources([tmp_path]))
    assert found == {
        "model": "made here", "model.num_layers": "2", "model.qk_clip": "True", "model.set_modules()": "['attn']",
        "rng.seed": "2", "rng.te": "False",
    }  # fmt: skip
