"""What a script gets from its own command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig

from nemo_runspec.artifacts import Registry
from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError


def test_the_default_config_is_the_runspec_s_or_the_choice_is_listed(project: Path) -> None:
    with pytest.raises(UserError, match="no config was chosen") as caught:
        load_script_config(project / "train.py", [])
    assert caught.value.hint == "choose one with -c NAME: tiny"
    (project / "config" / "default.yaml").write_text("train: {train_iters: 4}\n", encoding="utf-8")
    assert load_script_config(project / "train.py", []).train.train_iters == 4


def test_unknown_options_and_forgotten_values_are_refused(project: Path) -> None:
    with pytest.raises(UserError, match="unknown option --dry-run"):
        load_script_config(project / "train.py", ["--config", "tiny", "--dry-run"])
    with pytest.raises(UserError, match="option --config needs a value"):
        load_script_config(project / "train.py", ["--config"])


def test_piped_inputs_replace_the_config_s_but_not_the_command_line_s(project: Path) -> None:
    payload = project / "payload"
    payload.write_text("x", encoding="utf-8")
    for name in ("a", "b"):
        Registry.default().publish(name, payload, {})
    script, words = project / "train.py", ["--config", "tiny"]
    assert load_script_config(script, words, inputs=lambda: {"data": "art://a:1"}).run.data == "a:1"
    assert load_script_config(script, words, inputs=dict).run.data is None
    asked: list[str] = []

    def never() -> dict[str, str]:
        asked.append("stdin")
        return {"data": "a:1"}

    for given in ("run.data=b", "run={data: b}"):
        assert load_script_config(script, [*words, given], inputs=never).run.data == "b:1"
    with pytest.raises(SystemExit):
        load_script_config(script, ["--help"], inputs=never)
    assert asked == []
    # A reserved key is no input, nor is one that the schema does not declare.
    cfg = load_script_config(script, [*words, "run.root=/r"], inputs=lambda: {**never(), **OTHERS})
    assert (cfg.run.data, cfg.run.output, cfg.run.results, cfg.run.name) == ("a:1", TINY_OUTPUT, None, TINY_NAME)


OTHERS = {"results": "art://r:1", "output": "art://o:1", "name": "n:1", "config": "c:1", "teacher": "art://t:1"}
TINY_OUTPUT, TINY_NAME = "demo-train-model-tiny", "demo-train-tiny"


def test_a_script_without_a_schema_gets_an_omegaconf_config(project: Path) -> None:
    script = project / "free.py"
    script.write_text('# /// script\n# [tool.runspec]\n# schema = "1"\n# name = "free"\n# ///\n', encoding="utf-8")
    cfg = load_script_config(script, ["--config", "tiny", "text='\\${literal}'"])
    assert isinstance(cfg, DictConfig)
    assert cfg.optimizer.lr == 1e-4
    assert cfg.text == "${literal}"


def test_help_lists_configs_and_keys_with_their_limits(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_script_config(project / "train.py", ["--help"])
    assert caught.value.code == 0
    page = capsys.readouterr().out
    for text in ("Train a demo.", "tiny               The small one.", "writes  demo-train-model-tiny"):
        assert text in page
    assert "train.train_iters                    an integer from 1 to 1000, default 10: optimiser steps" in page
