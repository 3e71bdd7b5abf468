"""Configs of the three data preparations: sources of one's own in a few words, and what is refused before any work."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from pydantic import ValidationError

from nemo_runspec.config.script import load_script_config
from nemo_runspec.errors import UserError, run_main
from nemotron.data_prep.curation.ingestion import DocumentSource
from nemotron.data_prep.long_documents import LONG
from nemotron.stack.evaluation.retrieval import SOURCE as RETRIEVAL

NANO3 = Path(__file__).resolve().parents[4] / "src" / "nemotron" / "recipes" / "nano3"
STAGES = {"stage0_pretrain": "Pretrain", "stage1_sft": "SFT", "stage2_rl": "RL"}
CAPS = {"stage0_pretrain": "max_documents", "stage1_sft": "max_conversations", "stage2_rl": "max_tasks"}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RUNSPEC_ARTIFACTS_ROOT", "RUNSPEC_OUTPUT_ROOT", "RUNSPEC_ENV_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "My Notes.2024").mkdir()
    for name in ("My Notes.2024/a.jsonl", "own.jsonl", "7.jsonl"):
        (tmp_path / name).write_text("{}\n")


def source_config(stage: str) -> Any:
    return importlib.import_module(f"nemotron.recipes.nano3.{stage}.data_schema").SourceConfig


@pytest.mark.parametrize("stage", STAGES)
def test_a_path_alone_is_a_source(stage: str) -> None:
    for path, name in (("own.jsonl", "own"), ("My Notes.2024", "my_notes"), ("My Notes.2024/", "my_notes")):
        source = source_config(stage).model_validate(path)
        assert source == source_config(stage)(name=name, paths=[path])
        assert getattr(source, CAPS[stage]) is None  # all of it
    with pytest.raises(ValidationError, match=r"write \{name: mine, paths: \[7\.jsonl\]\}"):
        source_config(stage).model_validate("7.jsonl")


@pytest.mark.parametrize("stage", STAGES)
def test_keys_of_other_commands_are_named_as_they_are_here(stage: str) -> None:
    own_names = {"locations": "paths", "path": "paths"}
    own_names |= {"text_field": "columns: {text: …}"} if stage == "stage0_pretrain" else {}
    own_names |= {"messages_field": "columns: {messages: …}"} if stage == "stage1_sft" else {}
    for key, own_name in own_names.items():
        arguments = ["--config", "tiny", f"sources=[{{name: a, {key}: own.jsonl}}]"]
        with pytest.raises(UserError, match=rf"unknown key sources\.0\.{key}") as caught:
            load_script_config(str(NANO3 / stage / "data_prep.py"), arguments)
        assert caught.value.hint == f"here it is called sources.0.{own_name}"


@pytest.mark.parametrize(
    "source",
    [
        "nano3.stage0_pretrain.data_schema",
        "nano3.stage1_sft.data_schema",
        "nano3.stage2_rl.data_schema",
        "data.tokenize.schema",
        "data.pack.schema",
    ],
)
def test_every_preparation_has_the_same_keys_for_the_files_of_the_user(source: str) -> None:
    config = importlib.import_module(f"nemotron.recipes.{source}").SourceConfig
    values = {"name": "a", "paths": ["own.jsonl"]}
    for field in config.fields:
        assert config.model_validate(values | {"columns": {field: "data.x"}}).columns == {field: "data.x"}
        with pytest.raises(ValidationError, match=rf"the wanted field comes first: \{{{field}: x\}}"):
            config.model_validate(values | {"columns": {"x": field}})
    with pytest.raises(ValidationError, match="unknown field `zzz`; there is"):
        config.model_validate(values | {"columns": {"zzz": "x"}})


@pytest.mark.parametrize("source", ["nano3.stage1_sft.data_schema", "data.pack.schema"])
def test_both_preparations_of_conversations_say_the_same_of_a_source(source: str) -> None:
    config = importlib.import_module(f"nemotron.recipes.{source}").SourceConfig
    values = {"name": "a", "paths": ["own.jsonl"]}
    asked = {"train_on": "last", "loss_weights": {"hard": 2.0}, "max_conversations": 3}
    assert config.model_validate(values | asked).model_dump().items() >= asked.items()
    with pytest.raises(ValidationError, match="unknown field `message`, did you mean `messages`"):
        config.model_validate(values | {"columns": {"message": "conversations"}})


@pytest.mark.parametrize(
    ("weights", "enabled", "fits"),
    [
        ({"a": 0.7}, True, True),
        ({"a": 0.7, "b": 0.7}, True, False),
        ({"a": 0.7, "b": 0.3}, True, False),  # nothing is left to the others
        ({"a": 1.0}, False, True),  # there are no others
        ({"a": 0.5, "named": 0.9}, True, True),  # the phase itself says how much there is of a source that it names
    ],
)
def test_weights_leave_a_share_to_the_other_sources(weights: dict[str, float], enabled: bool, fits: bool) -> None:
    config: dict[str, Any] = {
        "run": {"output": "x"},
        "stdlib": {"enabled": enabled},
        "tasks": {"num_tasks": 10 * enabled},
        "sources": [{"name": name, "paths": ["own.jsonl"], "weight": weight} for name, weight in weights.items()],
        "blend": [{"name": "only", "until": 1.0, "weights": {"stdlib_code": 0.5, "tasks": 0.5}}],
    }
    if "named" in weights:
        config["blend"][0]["weights"]["named"] = 2.0
    schema = importlib.import_module("nemotron.recipes.nano3.stage0_pretrain.data_schema").PretrainDataConfig
    with contextlib.nullcontext() if fits else pytest.raises(ValidationError, match=r"sources\.0\.weight.* must be"):
        schema.model_validate(config)


@pytest.mark.parametrize("name", [LONG, RETRIEVAL])
def test_a_source_does_not_take_the_name_of_one_of_the_long_context_phase(name: str) -> None:
    script, own = str(NANO3 / "stage0_pretrain" / "data_prep.py"), f"sources=[{{name: {name}, paths: [own.jsonl]}}]"
    assert load_script_config(script, ["--config", "tiny", own]).sources[0].name == name  # which has no such phase
    with pytest.raises(UserError, match=f"two of the name '{name}'; .*name: my_{name}"):
        load_script_config(script, ["--config", "tiny-long_context", own])


def test_own_sources_are_read_before_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    script = importlib.import_module("nemotron.recipes.nano3.stage0_pretrain.data_prep")

    def refuse(source: DocumentSource, *_: object) -> NoReturn:
        raise UserError(f"{source.name} was the first")

    def too_early(*_: object) -> NoReturn:
        raise AssertionError

    monkeypatch.setattr(script, "ingest_files", refuse)
    monkeypatch.setattr(script, "generate_tasks", too_early)
    monkeypatch.setattr(script.stdlib, "code_documents", too_early)
    monkeypatch.setattr(sys, "argv", [str(script.__file__), "--config", "tiny", "sources=[own.jsonl]"])
    assert run_main(script.main) == 2


def test_the_message_names_keys_sum_and_limit() -> None:
    sources = "sources=[{name: a, paths: [own.jsonl], weight: 0.7}, {name: b, paths: [own.jsonl], weight: 0.7}]"
    with pytest.raises(UserError) as caught:
        load_script_config(str(NANO3 / "stage0_pretrain" / "data_prep.py"), ["--config", "tiny", sources])
    assert caught.value.message == (
        "command line: sources.0.weight + sources.1.weight = 0.7 + 0.7 = 1.4 in blend phase 'diversity': "
        "must be below 1, to leave a share to stdlib_code, stdlib_docs, tasks"
    )
