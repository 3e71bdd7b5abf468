"""What lies beside the weights of a model that is published."""

from __future__ import annotations

import json
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
    own = load_template("nano3").source + "{# theirs #}"
    (theirs / "chat_template.jinja").write_text(own)  # beside the settings, as on the Hub
    version = adopt_model(str(theirs), Registry(tmp_path / "artifacts"))
    assert version is not None
    base = Model.load(version.path)
    for _ in range(2):  # a run that was killed just after goes on here
        model = publish(NemotronH.from_pretrained(base.path), base.path, chat_template=base.chat_template)
    assert [file.parent for file in model.path.rglob("*.safetensors")] == [model.path]
    assert model.template is not None and Path(model.template).is_relative_to(model.path)
    for folder in (model.template, str(model.path)):  # engines read the latter
        assert load_template(folder).source == own


@pytest.mark.parametrize(
    ("theirs_say", "expected"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": 2},
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": [2, 11], "pad_token_id": 7},
        ),
        (None, {"pad_token_id": 7, "eos_token_id": [11, 2]}),
    ],
)
def test_a_model_keeps_how_its_base_samples_and_stops_at_the_end_of_its_turn(
    theirs: Path, publish: Callable[..., Model], theirs_say: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    config = json.loads((theirs / "config.json").read_text()) | {"pad_token_id": 7, "max_position_embeddings": 48}
    (theirs / "config.json").write_text(json.dumps(config))
    if theirs_say is not None:
        (theirs / "generation_config.json").write_text(json.dumps(theirs_say))
    folder = publish(NemotronH.from_pretrained(theirs), theirs, chat_template="nano3").path
    assert json.loads((folder / "generation_config.json").read_text()) == expected
    kept = {"pad_token_id": 7, "max_position_embeddings": 48}
    assert json.loads((folder / "config.json").read_text()).items() >= kept.items()
