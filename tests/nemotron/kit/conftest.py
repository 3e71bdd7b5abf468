"""A recipe script in a temporary folder, a registry of its own, and no run left open between tests."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_runspec.artifacts import Registry
from nemotron.kit import artifact, lineage, pipes, run

SCRIPT = '''
"""Train a toy."""
# /// script
# [tool.runspec]
# schema = "1"
# name = "toy/train"
# docs = "Train a toy."
# [tool.runspec.run]
# launch = "direct"
# [tool.runspec.config]
# dir = "./config"
# default = "tiny"
# schema = "schema.py:ToyConfig"
# ///
'''

SCHEMA = """
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

class Run(BaseModel):
    model_config = ConfigDict(extra="forbid")
    config: str = ""
    script: str = "train.py"
    data: str | None = None
    output: str | None = None
    results: str | None = None

class ToyConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    neutral_keys: ClassVar = ("save_interval",)
    run: Run
    lr: float = 0.1
    save_interval: int = 10
    resume: str | None = None
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Output and artifacts in the test's folder; what a test left open is closed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(tmp_path / "output"))
    for name in (
        "RUNSPEC_ARTIFACTS_ROOT",
        "RUNSPEC_ENV_FILE",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "RUNSPEC_JOB_DIR",
        "RUNSPEC_PUBLISHED_DIR",
    ):
        monkeypatch.delenv(name, raising=False)
    yield
    if (left := run.current_run()) is not None:
        left.close(finished=False)
    lineage._trackers = None
    artifact._scripts[:] = [artifact._Script()]
    pipes._read = None


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "output" / "artifacts")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """`train.py` with a schema, and a config `tiny` that reads `raw` and publishes `toy-train-model-tiny`."""
    folder = tmp_path / "recipe"
    (folder / "config").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT.lstrip())
    (folder / "schema.py").write_text(SCHEMA)
    config = """
        run:
          data: raw
          output: toy-train-model-tiny
          results: toy-train-results-tiny
    """
    (folder / "config" / "tiny.yaml").write_text(textwrap.dedent(config))
    return folder / "train.py"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A payload to publish."""
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "a"}\n')
    (folder / "valid.jsonl").write_text('{"text": "b"}\n')
    return folder
