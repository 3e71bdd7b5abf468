"""`train_nemo_rl.py` and `dpo_nemo_rl.py` from beginning to end, with a stand-in for NeMo-RL that saves as it does.

What the stand-in has of the library is its names and signatures (`tests/contracts/test_nemo_rl.py` checks them), how
it counts steps, and the folders in which it leaves checkpoints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.artifacts import Registry
from nemotron.kit import Preferences, RLPrompts
from nemotron.kit.megatron import MegatronCheckpoint

from ..scripts import RECIPES

# Saves what it is given in given.json of the run's folder, and trains up to STOP_AT, where a time limit would be.
LIBRARY = """
import json, os
from pathlib import Path

class MasterConfig:
    def __init__(self, **values):
        self.__dict__.update(values)

def setup(master, tokenizer, train, valid):
    return (*["part"] * {parts}, master, *["teachers"] * {teachers})

def train(*parts, **named):
    master = named.get("master_config") or next(part for part in parts if isinstance(part, MasterConfig))
    steps = getattr(master, "grpo", None) or master.dpo
    folder = Path(master.checkpointing["checkpoint_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "given.json").write_text(json.dumps(vars(master)))
    for step in (1, int(os.environ.get("STOP_AT", steps["max_num_steps"]))):
        weights = folder / f"step_{{step}}/policy/weights/iter_0000000"
        weights.mkdir(parents=True, exist_ok=True)
        for name in (".metadata", "__0_0.distcp", "run_config.yaml"):
            (weights / name).write_text(str(step))
"""
READERS = """
import json
def lines(file): return open(file["data_path"]).read().splitlines()
def setup_response_data(tokenizer, data, env_configs=None): return lines(data["train"]), lines(data["validation"])
def setup_preference_data(tokenizer, data): return lines(data["train"]), {"default": lines(data["validation"])}
"""
MODULES = {
    "algorithms/grpo": LIBRARY.format(parts=10, teachers=2) + "grpo_train = async_grpo_train = train\n",
    "algorithms/dpo": LIBRARY.format(parts=8, teachers=0).replace(
        '["part"] * 8', '["part"] * 2, range(50), *["part"] * 5'
    )
    + "dpo_train = train\n",
    "algorithms/utils": "def get_tokenizer(config): return config['name']\n",
    "data/utils": READERS,
    "distributed/virtual_cluster": "def init_ray(): pass\n",
    "environments/nemo_gym": "def setup_nemo_gym_config(config, tokenizer): pass\n",
    "models/generation/__init__": "def configure_generation_config(config, tokenizer): return config\n",
}
RECORD = {"responses_create_params": {"input": "?"}, "agent_ref": {"name": "mcqa_simple_agent"}}
PAIR = {"prompt": [{"role": "user", "content": "?"}], "chosen": [{"role": "assistant", "content": "a"}],
        "rejected": [{"role": "assistant", "content": "b"}]}  # fmt: skip
SMALLER = ("grpo.num_prompts_per_step=8", "policy.train_global_batch_size=128")  # 25 prompts: 3 steps


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """The library, and what the scripts read."""
    for name, text in MODULES.items():
        file = tmp_path / "library/nemo_rl" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    registry = Registry(tmp_path / "output/artifacts")
    for kind, name, row, count in (
        (RLPrompts, "nano3-rl-data-published", RECORD, 25), (Preferences, "nano3-dpo-data-default", PAIR, 300),
    ):  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        for split, rows in (("train", count), ("valid", 4)):
            (folder / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * rows)
        files = {"train_path": folder / "train.jsonl", "valid_path": folder / "valid.jsonl"}
        kind(path=folder, num_examples=count, **files).save(name, registry=registry)
    weights = tmp_path / "sft"
    weights.mkdir()
    for name in (".metadata", "__0_0.distcp", "run_config.yaml"):
        (weights / name).write_text("sft")
    MegatronCheckpoint(path=weights, num_steps=5).save("nano3-sft-model-default", registry=registry)
    return registry


def run(cwd: Path, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(cwd / "library"), str(RECIPES.parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "RUNSPEC_OUTPUT_ROOT": str(cwd / "output"), **variables}
    file = RECIPES / "nano3/stage2_rl" / script
    command = [sys.executable, file, "--config", "default", *words]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)


def given(cwd: Path) -> dict[str, Any]:
    (file,) = (cwd / "output").glob("nano3/*/*/*/given.json")
    values: dict[str, Any] = json.loads(file.read_text())
    return values


@pytest.mark.slow
def test_a_run_that_left_for_the_time_limit_goes_on_and_publishes_its_last_step(
    tmp_path: Path, registry: Registry
) -> None:
    left = run(tmp_path, "train_nemo_rl.py", *SMALLER, STOP_AT="2")
    assert left.returncode == 143, left.stderr
    assert "step_2" in left.stderr and registry.names() and "nano3-rl-model-default" not in registry.names()
    done = run(tmp_path, "train_nemo_rl.py", *SMALLER)
    assert done.returncode == 0, done.stderr
    version = registry.resolve("nano3-rl-model-default")
    assert (version.record["fields"]["num_steps"], version.record["metrics"]["rollouts"]) == (3, 3 * 8 * 16)
    assert (version.path / "__0_0.distcp").read_text() == "3"
    inputs = {reference.partition(":")[0] for reference in version.record["inputs"].values()}
    assert inputs == {"nano3-rl-data-published", "nano3-sft-model-default"}

    values = given(tmp_path)
    grpo, data = values["grpo"], values["data"]
    assert (grpo["max_num_steps"], grpo["val_batch_size"]) == (3, 4)
    assert Path(data["train"]["data_path"]).parent == registry.resolve("nano3-rl-data-published").path
    start = values["checkpointing"]["pretrained_checkpoint"]["path"]
    assert Path(start) == registry.resolve("nano3-sft-model-default").path


def test_too_few_prompts_are_refused(tmp_path: Path, registry: Registry) -> None:
    refused = run(tmp_path, "train_nemo_rl.py")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == "error: 25 prompts are fewer than grpo.num_prompts_per_step"


def test_dpo_reads_pairs_as_the_library_does(tmp_path: Path, registry: Registry) -> None:
    done = run(tmp_path, "dpo_nemo_rl.py")
    assert done.returncode == 0, done.stderr
    version = registry.resolve("nano3-dpo-model-default")
    assert (version.record["fields"]["num_steps"], version.record["metrics"]["pairs"]) == (50, 50 * 128)
    pairs = Path(given(tmp_path)["data"]["train"]["data_path"])
    assert json.loads(pairs.read_text().splitlines()[0])["context"] == PAIR["prompt"]
