"""What lies beside the weights of a model that is published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_runspec.artifacts import Registry
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import Model
from nemotron.kit.chat_template import load_template
from nemotron.kit.model_folder import adopt_model
from nemotron.stack.models import NemotronH
from nemotron.stack.training.publish import publish_model


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Model]:
    """`publish_model` of a run whose folder is `tmp_path / "run"`; nothing is saved in a registry."""
    run: Any = SimpleNamespace(output_dir=tmp_path / "run")

    def publish(model: NemotronH, tokenizer_dir: Path, **fields: Any) -> Model:
        with monkeypatch.context() as patch:
            patch.setattr(Model, "save", lambda self, **_: self)
            return publish_model(run, model, tokenizer_dir, {}, num_steps=1, **fields)

    return publish


@pytest.fixture
def theirs(tmp_path: Path, small_model: Callable[..., NemotronH]) -> Path:
    """A model's directory from elsewhere, with its own template."""
    folder = tmp_path / "theirs"
    tokenizer = train_tokenizer(["one two three"], 300)
    small_model("M-", 0, vocab_size=tokenizer.get_vocab_size()).save_pretrained(folder)
    save_tokenizer(tokenizer, folder, model_max_length=64, template="nano3")
    return folder


def test_of_a_model_from_elsewhere_its_template_is_kept_and_not_its_weights(
    theirs: Path, publish: Callable[..., Model], tmp_path: Path
) -> None:
    version = adopt_model(str(theirs), Registry(tmp_path / "artifacts"))
    assert version is not None
    base = Model.load(version.path)
    for _ in range(2):  # a run that was killed just after goes on here
        model = publish(NemotronH.from_pretrained(base.path), base.path, chat_template=base.chat_template)
    assert [file.parent for file in model.path.rglob("*.safetensors")] == [model.path]
    assert model.template is not None and Path(model.template).is_relative_to(model.path)
    assert load_template(model.template).source == load_template("nano3").source
