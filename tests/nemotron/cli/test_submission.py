"""What is left on this machine of a submitted job. The engines are stand-ins; the real ones: tests/cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import typer

from nemo_runspec import cli as runspec
from nemo_runspec import pipeline
from nemo_runspec.execution import slurm
from nemotron.cli import main as nemotron

ROOT = Path(__file__).resolve().parents[3]
PROFILES = '[slurm]\nexecutor = "slurm"\n[ray]\nexecutor = "ray"\naddress = "http://head:8265"\n'
SCRIPT = "src/nemotron/recipes/nano3/stage0_pretrain/data_prep.py"


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["slurm", "ray"])
@pytest.mark.parametrize(
    ("app", "command"), [(nemotron.app, "nano3 data prep pretrain"), (runspec.app, f"run {ROOT / SCRIPT}")]
)
def test_the_bundle_is_gone_while_the_job_is_followed(
    app: typer.Typer, command: str, profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "env.toml").write_text(PROFILES, encoding="utf-8")
    monkeypatch.setenv("RUNSPEC_ENV_FILE", str(tmp_path / "env.toml"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bundles_at: dict[str, int] = {}

    def look(when: str, answer: object) -> Callable[..., Any]:
        def called(*_: object, **__: object) -> object:
            bundles_at[when] = len(list(tmp_path.glob("runspec-bundle-*/code")))
            return answer

        return called

    monkeypatch.setattr(slurm, "load_nemo_run", MagicMock())
    monkeypatch.setattr(slurm, "create_executor", MagicMock())
    monkeypatch.setattr(slurm, "open_experiment", look("submitting", MagicMock()))
    monkeypatch.setattr(pipeline.ray, "hand_over", look("submitting", None))
    monkeypatch.setattr(slurm, "follow_or_leave", look("following", 7))
    monkeypatch.setattr(pipeline, "follow_ray_job", look("following", 7))
    assert runspec.run_app(app, "command", [*command.split(), "-c", "tiny", "--run", profile]) == 7
    assert bundles_at == {"submitting": 1, "following": 0}
