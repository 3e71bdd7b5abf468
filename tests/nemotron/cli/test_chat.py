"""`FAMILY chat` finds the model and lets the chat script take its place, with the settings of every local job."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import UserError
from nemo_runspec.execution.local import CPU_SETTINGS
from nemotron.kit.commands import makers_by_artifact
from nemotron.kit.model_folder import Origin

Nemotron = Callable[..., subprocess.CompletedProcess[str]]
Tool = Callable[..., tuple[str, dict[str, Any], dict[str, str]]]


def model(folder: Path, **config: object) -> Path:
    """A directory as far as it is looked at."""
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text(json.dumps(config))
    return folder


@pytest.fixture
def start(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """`start("-c", "tiny")`: what chat would start, with two models in the registry."""
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "artifacts"))
    for name in ("nano3-pretrain-model-tiny", "nano3-final-model-tiny"):
        record = {"type": "Model", "fields": {}, "producer": {"name": "nano3/sft"}}
        Registry(tmp_path / "artifacts").publish(name, model(tmp_path / "payload", name=name), record)
    return lambda *words: tool("nano3", "chat", *words)


def test_the_script_gets_the_model_and_the_options(start: Tool, tmp_path: Path) -> None:
    script, options, environment = start("-c", "tiny", "--no-thinking", "--temperature=0.5", "What is 1 + 1?")
    assert script == "chat.py" and "RUNSPEC_DEBUG" not in environment
    path = str(Registry(tmp_path / "artifacts").resolve("nano3-final-model-tiny").path)
    assert options == {
        "model": path,
        "tokenizer": path,
        "template": "nano3",
        "max_reasoning": 0,
        "temperature": 0.5,
        "max_new_tokens": 256,
        "seed": 0,
        "prompt": "What is 1 + 1?",
    }


def test_without_a_stage_the_last_aligned_model_answers(start: Tool, tmp_path: Path) -> None:
    registry = Registry(tmp_path / "artifacts")
    record = {"type": "Model", "fields": {}, "producer": {"name": "nano3/rl"}}
    for stage in ("rl", "rlhf", "final"):
        path = registry.publish(f"nano3-{stage}-model-small", tmp_path / "payload", record).path
        assert start("-c", "small")[1]["model"] == str(path)


def test_the_models_of_nano2_have_no_config_in_their_names(start: Tool, tool: Tool, tmp_path: Path) -> None:
    registry = Registry(tmp_path / "artifacts")
    script = {"producer": {"name": None, "script": "training.py"}}  # as a script that is started by hand leaves it
    answering, base = (
        {"type": "Model", "fields": {"chat_template": name, "num_steps": 9}, **script} for name in ("nano2", None)
    )
    for stage in ("sft", "rl", "compressed"):
        path = registry.publish(f"nano2-{stage}-model", tmp_path / "payload", answering).path
        _, options, _ = tool("nano2", "chat", "--stage", stage, "What is 1 + 1?")
        assert (options["model"], options["template"]) == (str(path), "nano2")
    assert tool("nano2", "chat")[1]["model"] == str(registry.resolve("nano2-rl-model").path)
    path = registry.publish("nano2-long-model", tmp_path / "payload", base).path
    for words in (("--stage", "long"), ("-m", "nano2-long-model")):
        _, options, _ = tool("nano2", "chat", *words, "def main(")
        assert (options["model"], options["template"]) == (str(path), None)
    smoke = registry.publish("nano2-sft-model-smoke", tmp_path / "payload", answering)
    assert tool("nano2", "chat", "-c", "smoke")[1]["model"] == str(smoke.path)


def test_a_base_model_completes_text(start: Tool) -> None:
    _, options, environment = start("-c", "tiny", "--stage", "pretrain", "--debug")
    assert options["template"] is None and environment["RUNSPEC_DEBUG"] == "1"
    for option in ("--template=nano3", "--thinking", "--no-thinking", "--reasoning-budget=16"):
        with pytest.raises(UserError, match=f"{option.partition('=')[0]} is for answers, and this model completes"):
            start("-c", "tiny", "--stage", "pretrain", option)


def test_another_model_is_an_artifact_or_a_directory(start: Tool, tmp_path: Path) -> None:
    fields = {"chat_template": None, "num_steps": 9}
    base = {"type": "Model", "fields": fields, "producer": {"name": "mine/pretrain"}}
    Registry(tmp_path / "artifacts").publish("mine-base", tmp_path / "payload", base)
    assert start("-m", "mine-base")[1]["template"] is None  # its record says what it is
    assert start("-m", "mine-base", "--template", "nano3")[1]["template"] == "nano3"
    with pytest.raises(UserError, match=r"no chat template in .*, and none is known of the model"):
        start("-m", "mine-base", "--stage", "sft")
    added = {**base, "fields": {**fields, "num_steps": 0}, "producer": {"script": "add_model.py", "name": None}}
    Registry(tmp_path / "artifacts").publish("added", tmp_path / "payload", added)
    with pytest.raises(UserError, match="no chat template"):  # from elsewhere: its tokenizer knows whether it answers
        start("-m", "added")
    folder = model(tmp_path / "folder", chat_template="{{ messages }}")
    assert start("-m", f"{folder}/", "-s", "pretrain")[1].items() >= {
        "model": str(folder), "tokenizer": str(folder), "template": None
    }.items()  # fmt: skip


def test_a_model_trained_without_reasoning_is_asked_without(start: Tool, tmp_path: Path) -> None:
    for name, reasoning in (("plain", False), ("reasoner", True), ("unknown", None)):
        record = {
            "type": "Model",
            "fields": {"reasoning": reasoning, "chat_template": "nano3"},
            "producer": {"name": "mine/sft"},
        }
        Registry(tmp_path / "artifacts").publish(name, tmp_path / "payload", record)
    asked = [start("-m", name)[1]["max_reasoning"] for name in ("plain", "reasoner", "unknown")]
    assert asked == [0, None, None] and start("-m", "plain", "--thinking")[1]["max_reasoning"] is None
    budgets = [start("-m", name, "--reasoning-budget", "16")[1]["max_reasoning"] for name in ("plain", "reasoner")]
    assert budgets == [16, 16] and start("-m", "reasoner", "--reasoning-budget=0")[1]["max_reasoning"] == 0


def test_reasoning_is_not_turned_off_where_the_template_has_no_switch_for_it(
    start: Tool, tmp_path: Path, plain_chat: str
) -> None:
    record = {"fields": {"reasoning": False, "chat_template": plain_chat}, "producer": {"name": "mine/sft"}}
    Registry(tmp_path / "artifacts").publish("plain", tmp_path / "payload", {"type": "Model", **record})
    assert start("-m", "plain")[1]["max_reasoning"] == 0  # as it was trained
    for option in ("--no-thinking", "--reasoning-budget=0"):
        with pytest.raises(UserError, match="has no switch enable_thinking"):
            start("-m", "plain", option)


def test_an_exported_model_is_asked_as_its_directory_says(start: Tool, tmp_path: Path) -> None:
    said = {"artifact": f"m:1@{'0' * 64}", "num_steps": 1, "tokens": None, "sources": []}
    for name, is_base, reasoning in (("base", True, None), ("plain", False, False), ("reasoner", False, True)):
        (model(tmp_path / name) / "chat_template.jinja").write_text("{{ messages }}")
        Origin(is_base=is_base, reasoning=reasoning, **said).write(tmp_path / name)
        added = {"type": "Model", "fields": {"chat_template": None, "reasoning": reasoning}, "producer": {"name": None}}
        Registry(tmp_path / "artifacts").publish(name, tmp_path / name, added)
    for folder in (f"{tmp_path}/", ""):  # as it lies there, and as it was added
        asked = [start("-m", f"{folder}{name}")[1] for name in ("base", "plain", "reasoner")]
        assert [(options["template"], options["max_reasoning"]) for options in asked] == [
            (None, None), (asked[1]["model"], 0), (asked[2]["model"], None)
        ]  # fmt: skip
    assert start("-m", str(tmp_path / "plain"), "--thinking")[1]["max_reasoning"] is None


def test_a_budget_that_leaves_no_answer_or_contradicts_is_refused(here: Nemotron, tmp_path: Path) -> None:
    model(tmp_path / "x")
    refused = here("nano3 chat -m x --reasoning-budget 16 --max-new-tokens 16 hello")
    assert refused.returncode == 2 and "leaves no answer in --max-new-tokens 16" in refused.stderr
    refused = here("nano3 chat -m x --reasoning-budget 16 --no-thinking hello")
    assert refused.returncode == 2 and "--no-thinking and --reasoning-budget 16 contradict each" in refused.stderr
    refused = here("nano3 chat -m x --reasoning-budget 0 --thinking hello")
    assert refused.returncode == 2 and "--thinking and --reasoning-budget 0 contradict each other" in refused.stderr
    refused = here("nano3 chat -m ./x --stage pretrain --reasoning-budget 16 hello")
    assert refused.returncode == 2 and "this model completes text" in refused.stderr


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        ("nano2 chat -c smokee hi", "no model of config 'smokee': there is no nano2-rl-model-smokee", "mean smoke?"),
        (
            "nano2 chat -c tinny -s sft hi",
            "no model of config 'tinny': there is no nano2-sft-model-tinny",
            "mean tiny?",
        ),
        ("nano3 chat -c tny hi", "no model of config 'tny': there is no nano3-final-model-tny", "mean tiny?"),
        ("nano2 chat -c smoke hi", "no artifact 'nano2-rl-model-smoke'", "nemotron nano2 rl -c smoke"),
        ("nano2 chat hi", "no artifact 'nano2-rl-model'", "nemotron nano2 rl -c tiny"),
    ],
)
def test_a_model_that_no_config_makes_is_refused(here: Nemotron, words: str, error: str, hint: str) -> None:
    refused = here(words)
    assert refused.returncode == 2 and error in refused.stderr and hint in refused.stderr, refused.stderr


@pytest.mark.parametrize("family", ["nano2", "nano3", "super3", "lightning35"])
def test_the_base_model_of_the_help_is_one_that_a_config_makes(family: str) -> None:
    models = import_module(f"nemotron.cli.commands.{family}.app").MODELS
    assert models.artifact(models.base[0], models.base_config) in makers_by_artifact()


def test_a_config_beside_a_model_is_refused(here: Nemotron) -> None:
    refused = here("nano3 chat -m x -c small hello")
    assert refused.returncode == 2 and "--config and --model both name a model" in refused.stderr


def test_the_script_gets_the_cpu_settings_unless_the_user_has_set_them(
    start: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CPU_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert start("-c", "tiny")[2].items() >= CPU_SETTINGS.items()
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert start("-c", "tiny")[2]["OMP_WAIT_POLICY"] == "ACTIVE"
