"""Where no sandbox starts, code generation is left out: by all ranks, in no fingerprint, and not half-way in a run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nemo_runspec.artifacts import Registry
from nemo_runspec.config import load_script_config
from nemo_runspec.errors import UserError
from nemo_runspec.fingerprint import config_fingerprint
from nemo_runspec.runspec import parse
from nemotron.recipes.nano3.stage2_rl import data_prep_dpo
from nemotron.recipes.nano3.stage3_eval import evaluate
from nemotron.stack.environments import families
from nemotron.stack.rl import prompts
from nemotron.stack.rl.prompts import check_same_families, verifiable_shares
from nemotron.stack.training.checkpoint import Restored

SHARES = {"math": 1.0, "code_generation": 2.0}
MISSING = "bubblewrap is not installed\ninstall it"


@pytest.fixture(autouse=True)
def _notes_are_printed() -> None:
    families._note_once.cache_clear()


class Opened(Exception):
    """A script has opened its run."""


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (evaluate, ["--config", "own", "run.models=[start]"]),
        (data_prep_dpo, ["--config", "tiny", "run.model=start"]),
    ],
)
def test_the_fingerprint_is_that_of_the_config(
    script: ModuleType, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "artifacts"))
    (tmp_path / "payload").write_text("weights")
    Registry(tmp_path / "artifacts").publish(
        "start", tmp_path / "payload", {"type": "Model", "types": ["Model", "Checkpoint"]}
    )
    monkeypatch.setattr(sys, "argv", [str(script.__file__), *words, "tasks.families=[math, code_generation]"])
    monkeypatch.setattr(families, "sandbox_failure", lambda sandbox: MISSING)

    def open_run(cfg: Any, script: str) -> None:
        raise Opened(config_fingerprint(cfg, parse(script)))

    monkeypatch.setattr(script, "open_run", open_run)
    with pytest.raises(Opened) as opened:
        script.main()
    assert capsys.readouterr().err == "code_generation is left out: bubblewrap is not installed; install it\n"
    untouched = config_fingerprint(load_script_config(str(script.__file__)), parse(str(script.__file__)))
    assert str(opened.value) == untouched


def test_one_rank_without_sandbox_is_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prompts, "sandbox_failure", lambda sandbox: "")
    assert verifiable_shares(SHARES, "bubblewrap") == SHARES
    monkeypatch.setattr(prompts, "gather_bytes", lambda own: [own, own, MISSING.encode()])
    monkeypatch.setenv("RANK", "1")
    assert verifiable_shares(SHARES, "bubblewrap") == {"math": 1.0}
    families._note_once.cache_clear()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert verifiable_shares(SHARES, "bubblewrap") == {"math": 1.0}
    line = "code_generation is left out: process 2: bubblewrap is not installed; install it\n"
    assert capsys.readouterr().err == line
    with pytest.raises(UserError, match="process 2: bubblewrap is not installed"):
        verifiable_shares({"code_generation": 1.0}, "bubblewrap")


def test_a_stopped_run_does_not_go_on_with_other_families() -> None:
    stopped = Restored(3, {"families": ["math"]})
    check_same_families(None, list(SHARES))
    check_same_families(stopped, ["math"])
    with pytest.raises(UserError, match="trains on math, and now math, code_generation can be verified"):
        check_same_families(stopped, list(SHARES))
