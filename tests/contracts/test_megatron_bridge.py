"""Scripts over Megatron-Bridge and their configs, against its sources: names, signatures, fields, types, readers."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from sources import FOLDER, Sources, accepts, pins

import nemotron.recipes
from nemo_runspec.config.loader import load_config
from nemo_runspec.config.schema import load_schema
from nemo_runspec.runspec import parse

RECIPES = Path(nemotron.recipes.__file__).parent
SCRIPTS = sorted(RECIPES.glob("*/*/train_megatron.py"))
# The groups of our configs that are handed on, and the class of the library whose fields they set.
CONFIG = "megatron.bridge.training.config"
GROUPS = {
    "model": ("megatron.bridge.models.hybrid.hybrid_provider", "HybridModelProvider"),
    "train": (CONFIG, "TrainingConfig"),
    "validation": (CONFIG, "ValidationConfig"),
    "optimizer": (CONFIG, "OptimizerConfig"),
    "scheduler": (CONFIG, "SchedulerConfig"),
    "checkpoint": (CONFIG, "CheckpointConfig"),
    "logger": (CONFIG, "LoggerConfig"),
    "inprocess_restart": (CONFIG, "InProcessRestartConfig"),
    "nvrx_straggler": (CONFIG, "NVRxStragglerDetectionConfig"),
}
OURS = {"train": {"train_tokens"}}  # keys that are not handed on

pytestmark = pytest.mark.skipif(
    not all((FOLDER / pin).is_dir() for pin in pins()), reason="the libraries' sources are not here: `make contracts`"
)


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources([FOLDER / pin for pin in pins()])


def configs_of(script: Path) -> list[Path]:
    return [
        file
        for file in sorted((script.parent / "config").glob("*.yaml"))
        if f"script: {script.name}" in file.read_text(encoding="utf-8") or "defaults: [default]" in file.read_text()
    ]


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
    precision = sources.tree("megatron.bridge.training.mixed_precision")
    if values["mixed_precision"] not in [node.name for node in precision.body if isinstance(node, ast.FunctionDef)]:
        found.append(f"mixed_precision: no recipe {values['mixed_precision']}")
    return found


def resolved(config: Path, script: Path) -> dict[str, Any]:
    """All values of a config, defaults of the schema included, as the script hands them on; artifacts as text."""
    spec = parse(script)
    values = load_config(config.parent, str(config)).data
    values["dataset"]["path"] = "data"
    schema = load_schema(spec)
    assert schema is not None
    return schema.model_validate(values).model_dump()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_every_key_is_a_field_of_its_type_that_something_reads(script: Path, sources: Sources) -> None:
    configs = configs_of(script)
    assert configs
    for config in configs:
        assert faults(resolved(config, script), sources) == [], config


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_what_a_script_imports_and_calls_exists(script: Path, sources: Sources) -> None:
    tree = ast.parse(script.read_bytes())
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
            sources.tree(f"{module}.{name}")  # a module
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in imported:
            module, name = imported[call.func.id]
            keywords = {word.arg for word in call.keywords if word.arg}
            assert keywords <= sources.parameters(str(module), name), ast.unparse(call)


@pytest.mark.parametrize(
    ("group", "key", "value", "fault"),
    [
        ("scheduler", "lr_wsd_decay_itres", 5, "no field of SchedulerConfig"),
        ("scheduler", "lr_wsd_decay_style", "minus-sqrt", "SchedulerConfig has Literal"),
        ("train", "train_iters", "100", "TrainingConfig has int | None"),
        ("model", "sequence_parallel", 1, "HybridModelProvider has bool"),
        ("model", "recompute_modules", "moe", "HybridModelProvider has Optional[List[str]]"),
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
