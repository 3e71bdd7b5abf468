"""What is handed over to AutoModel, Data Designer and Curator, against their sources: targets, keys, names."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sources import Sources, unpacked

from nemotron.kit.steps import read_recipe

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples/ecosystem"
WHEELS = unpacked("nemo-automodel", "data-designer-config", "nemo-curator")

pytestmark = pytest.mark.usefixtures("libraries")


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(WHEELS)


def example(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))
    return config


# ---- AutoModel

TRAINER = "nemo_automodel.recipes.llm.train_ft"
TYPED = {  # section -> the dataclass that takes all of its keys
    "step_scheduler": ("nemo_automodel.components.training.step_scheduler", "StepSchedulerConfig"),
    "lr_scheduler": ("nemo_automodel.components.optim.optimizer", "LRSchedulerConfig"),
    "checkpoint": ("nemo_automodel.components.checkpoint.config", "CheckpointingConfig"),
    "dataset": ("nemo_automodel.components.datasets.llm.chat_dataset", "ChatDatasetConfig"),
}
OF_THE_RUN = {"step_scheduler": {"local_batch_size"}}  # read by the recipe itself


def targets(value: Any) -> Iterator[str]:
    """Every dotted name of the library in a config."""
    if isinstance(value, dict):
        for entry in value.values():
            yield from targets(entry)
    elif isinstance(value, str) and value.startswith("nemo_automodel."):
        yield value


def has(target: str, sources: Sources) -> bool:
    """Whether a module defines or hands on a name, or a class in it has the method."""
    module, _, name = target.rpartition(".")
    try:
        sources.definition(module, name)
    except LookupError:
        if name == "from_pretrained":  # of a class, which the package hands on lazily
            package, _, owner = module.rpartition(".")
            return owner in ast.unparse(sources.tree(package))
        return False
    return True


def automodel_faults(config: dict[str, Any], sources: Sources) -> list[str]:
    """Names and keys that AutoModel does not have, or that its recipe does not read."""
    found = [target for target in targets(config) if not has(target, sources)]
    if not has(f"{TRAINER}.{config['recipe']}", sources):
        found.append(f"recipe {config['recipe']}")
    read = ast.unparse(sources.tree(TRAINER)) + ast.unparse(sources.tree("nemo_automodel.recipes._typed_config"))
    for section in set(config) - {"recipe"}:
        if not re.search(rf"cfg\.{section}\b|get\('{section}[.']|'{section}'", read):
            found.append(f"{section}: nothing reads it")
    for section, (module, name) in TYPED.items():
        fields = sources.fields(module, name)
        known = set(fields) | OF_THE_RUN.get(section, set()) | {"_target_"}
        found += [f"{section}.{key}" for key in config[section] if key not in known]
    parser = ast.unparse(sources.tree("nemo_automodel.recipes._dist_utils"))
    strategy = sources.fields("nemo_automodel.components.distributed.config", "FSDP2Config")
    for key in config["distributed"]:
        if key not in strategy and f"'{key}'" not in parser:
            found.append(f"distributed.{key}")
    return sorted(found)


def test_automodels_config_has_its_names_and_keys(sources: Sources) -> None:
    config = example("automodel_nano3_sft.yaml")
    assert automodel_faults(config, sources) == []
    planted = copy.deepcopy(config)
    planted["recipe"] = "TrainFinetuneRecipe"
    planted["lr_scheduler"]["warmup_steps"] = planted["lr_scheduler"].pop("lr_warmup_steps")
    planted["dataset"]["_target_"] = "nemo_automodel.components.datasets.llm.chat_dataset.ChatData"
    planted["distributed"]["expert_parallel"] = planted["distributed"].pop("ep_size")
    planted["optimiser"] = planted.pop("optimizer")
    assert automodel_faults(planted, sources) == [
        "distributed.expert_parallel", "lr_scheduler.warmup_steps",
        "nemo_automodel.components.datasets.llm.chat_dataset.ChatData", "optimiser: nothing reads it",
        "recipe TrainFinetuneRecipe",
    ]  # fmt: skip


def test_what_the_paper_says_of_sft_is_in_automodels_config() -> None:
    config = example("automodel_nano3_sft.yaml")
    assert config["step_scheduler"]["global_batch_size"] == 64  # arXiv 2512.20848, section 3.1
    assert (config["optimizer"]["lr"], config["lr_scheduler"]["lr_warmup_steps"]) == (5e-5, 800)


# ---- Data Designer

COLUMNS = "data_designer.config.column_configs"
SAMPLERS = "data_designer.config.sampler_params"
MODELS = "data_designer.config.models"


def designer_faults(config: dict[str, Any], sources: Sources) -> list[str]:
    """Keys and kinds of columns that Data Designer does not have."""
    designer = config["data_designer"]
    top = sources.fields("data_designer.config.data_designer_config", "DataDesignerConfig")
    found = [key for key in designer if key not in top]
    classes = {}
    for node in sources.tree(COLUMNS).body:
        if isinstance(node, ast.ClassDef):
            kind = [entry for entry in node.body if ast.unparse(entry).startswith("column_type: Literal")]
            classes |= {ast.literal_eval(entry.value): node.name for entry in kind if isinstance(entry, ast.AnnAssign)}  # type: ignore[arg-type]
    for column in designer["columns"]:
        if column["column_type"] not in classes:
            found.append(f"column_type {column['column_type']}")
            continue
        fields = sources.fields(COLUMNS, classes[column["column_type"]])
        found += [f"{column['name']}.{key}" for key in column if key not in fields]
        if column["column_type"] == "sampler":
            name = f"{column['sampler_type'].capitalize()}SamplerParams"
            params = sources.fields(SAMPLERS, name)
            found += [f"{column['name']}.params.{key}" for key in column["params"] if key not in params]
    aliases = {model["alias"] for model in designer["model_configs"]}
    for model in designer["model_configs"]:
        found += [f"model.{key}" for key in model if key not in sources.fields(MODELS, "ModelConfig")]
        known = sources.fields(MODELS, "ChatCompletionInferenceParams")
        found += [f"inference_parameters.{key}" for key in model["inference_parameters"] if key not in known]
    used = [column["model_alias"] for column in designer["columns"] if "model_alias" in column]
    return found + [f"model {alias}" for alias in used if alias not in aliases]


def test_data_designers_config_has_its_columns_and_keys(sources: Sources) -> None:
    config = example("data_designer_chats.yaml")
    assert designer_faults(config, sources) == []
    planted = copy.deepcopy(config)
    columns = planted["data_designer"]["columns"]
    columns[0]["params"]["choices"] = columns[0]["params"].pop("values")
    columns[2]["column_type"] = "llm"
    columns[3]["extract_reasoning"] = columns[3].pop("extract_reasoning_content")
    columns[3]["model_alias"] = "reader"
    planted["data_designer"]["model_configs"][0]["inference_parameters"]["max_new_tokens"] = 8
    assert designer_faults(planted, sources) == [
        "topic.params.choices", "column_type llm", "answer.extract_reasoning", "inference_parameters.max_new_tokens",
        "model reader",
    ]  # fmt: skip


def test_reasoning_gets_the_column_that_data_preparation_is_told(sources: Sources) -> None:
    """The name of the column is the library's: the answer's, with a suffix."""
    text = (EXAMPLES / "data_designer_chats.yaml").read_text(encoding="utf-8")
    assert "columns: {reasoning: answer__reasoning_content}" in text
    assert "{column_name}__reasoning_content" in ast.unparse(sources.tree(COLUMNS))


# ---- Curator

CURATION = "src/nemotron/recipes/data/curation/nemotron_cc"


def curator_names(text: str) -> dict[str, list[str]]:
    """Step of ours -> names of Curator, of the table in the guide: `a.b.Name`, below nemo_curator.stages."""
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|", text, re.MULTILINE)
    return {step: re.findall(r"`([\w.]+\.[A-Z]\w*)`", cell) for step, cell in rows}


def missing(names: list[str], sources: Sources) -> list[str]:
    return [name for name in names if not has(f"nemo_curator.stages.{name}", sources)]


def test_curators_equivalents_exist_and_every_step_has_a_row(sources: Sources) -> None:
    table = curator_names((ROOT / "docs/guides/ecosystem.md").read_text(encoding="utf-8"))
    assert list(table) == [step.name for step in read_recipe(ROOT / CURATION).steps]
    names = [name for step in table.values() for name in step]
    assert len(names) > 20 and missing(names, sources) == []
    assert missing(["text.filters.heuristic.WordsCountFilter"], sources) == ["text.filters.heuristic.WordsCountFilter"]
