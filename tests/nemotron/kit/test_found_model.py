"""A model by its name or its place, and what its record or its export says of how it is talked to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import UserError
from nemotron.kit.found_model import FoundModel, chat_template_of, find_model
from nemotron.kit.model_folder import Origin


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "artifacts"))
    return Registry(tmp_path / "artifacts")


def folder_of(path: Path, *names: str) -> Path:
    """A directory with files of these names."""
    path.mkdir()
    for name in names or ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).write_text("{}")
    return path


def test_an_artifact_is_what_its_record_says(registry: Registry, tmp_path: Path) -> None:
    payload = folder_of(tmp_path / "payload")

    def found(fields: dict[str, Any], producer: str = "nano3/sft") -> FoundModel:
        version = registry.publish("mine", payload, {"type": "Model", "fields": fields, "producer": {"name": producer}})
        model = find_model(version.ref)
        assert (model.folder, model.tokenizer, model.name) == (version.path, version.path, "mine")
        return model

    base = found({"num_steps": 3, "chat_template": None}, "nano3/pretrain")
    assert base.is_base and base.template == "nano3"  # its family's, were it to answer
    answers = found({"num_steps": 3, "chat_template": "super3", "reasoning": False})
    assert (answers.is_base, answers.template, answers.reasons) == (False, "super3", False)
    elsewhere = found({"num_steps": 0, "chat_template": None}, "others/model")
    assert (elsewhere.is_base, elsewhere.template, elsewhere.reasons) == (False, None, True)


def test_a_tokenizer_in_another_folder(registry: Registry, tmp_path: Path) -> None:
    tokenizer = folder_of(tmp_path / "tokenizer", "tokenizer.json", "chat_template.jinja")
    payload = folder_of(tmp_path / "payload", "config.json", "model.safetensors")
    registry.publish("mine", payload, {"type": "Model", "fields": {"tokenizer_path": str(tokenizer)}})
    found = find_model("mine")
    assert (found.tokenizer, found.template) == (tokenizer, str(tokenizer))


def test_a_directory_is_what_its_export_says(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "export", "config.json", "tokenizer.json", "a.safetensors", "chat_template.jinja")
    assert find_model(f"{folder}/") == FoundModel(folder, folder, "export", str(folder), is_base=False, reasons=True)
    said = {"artifact": f"m:1@{'0' * 64}", "num_steps": 1, "tokens": None, "sources": []}
    Origin(is_base=True, reasoning=False, **said).write(folder)
    found = find_model(str(folder))
    assert found.is_base and not found.reasons


def test_what_is_no_model(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no artifact 'none'"):
        find_model("none")
    with pytest.raises(UserError, match="no directory"):
        find_model("./none/")
    for name in ("config.json", "tokenizer.json"):
        others = {"config.json", "tokenizer.json", "model.safetensors"} - {name}
        with pytest.raises(UserError, match=f"is no model: it has no {name}"):
            find_model(str(folder_of(tmp_path / f"without-{name}", *others)))
    with pytest.raises(UserError, match="no weights"):
        find_model(str(folder_of(tmp_path / "without-weights", "config.json", "tokenizer.json")))


def test_the_template_is_the_one_that_a_model_was_trained_with(tmp_path: Path) -> None:
    assert chat_template_of(tmp_path, "super3", "nano3/sft") == "super3"  # of the pack that SFT has read
    assert chat_template_of(tmp_path, None, "nano3/pretrain") == "nano3"
    assert chat_template_of(tmp_path, None, "mine/sft") is None and chat_template_of(tmp_path, None, None) is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert chat_template_of(tmp_path, "super3", "nano3/sft") == "super3"
    assert chat_template_of(tmp_path, "nano3", None) == str(tmp_path)  # from elsewhere: its tokenizer knows
