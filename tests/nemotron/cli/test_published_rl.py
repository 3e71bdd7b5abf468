"""What a dry run of RL at the published size shows: image, mounts, nodes and config, for Slurm and for Ray."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from nemo_runspec import cli as runspec
from nemo_runspec.artifacts import Registry
from nemo_runspec.errors import UserError
from nemotron.cli import main as nemotron

IMAGE = "nvcr.io#nvidia/nemo-rl:v0.7.0"
PROFILES = """
[dgx]
executor = "slurm"
account = "research"
partition = "batch"
time = "04:00:00"
tunnel = "ssh"
host = "login.example"
user = "me"
job_dir = "/lustre/jobs"
mounts = ["/lustre:/lustre"]
[ray]
executor = "ray"
address = "http://head:8265"
"""
STAGES = [("nano3 rl rlvr", 32), ("nano3 rl dpo", 2), ("super3 rl rlvr -c rlvr1", 183), ("super3 rl rlhf", 100)]


@pytest.fixture(autouse=True)
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env.toml").write_text(PROFILES, encoding="utf-8")
    monkeypatch.setenv("RUNSPEC_ENV_FILE", str(tmp_path / "env.toml"))
    monkeypatch.setenv("RUNSPEC_OUTPUT_ROOT", str(tmp_path / "output"))
    monkeypatch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(tmp_path / "artifacts"))


@pytest.mark.parametrize(("command", "nodes"), STAGES, ids=[command for command, _ in STAGES])
def test_slurm_gets_image_mounts_and_the_nodes_of_trainer_generator_and_judges(
    command: str, nodes: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*shlex.split(command), "--run", "dgx", "--dry-run"]
    monkeypatch.setattr("sys.argv", ["nemotron", *words])
    assert runspec.run_app(nemotron.app, "nemotron", words) == 0
    shown = capsys.readouterr().out
    assert f"{nodes} nodes of 8 GPUs, in {IMAGE}" in shown
    assert f"#SBATCH --nodes={nodes}\n" in shown and f"--container-image {IMAGE}" in shown
    assert "/lustre:/lustre" in shown
    assert "tensor_model_parallel_size" in shown and "max_total_sequence_length" in shown


def test_ray_gets_the_same_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registry, payload = Registry(tmp_path / "artifacts"), tmp_path / "payload"
    payload.mkdir()
    (payload / "content").touch()
    fields = {"train_path": "art://.", "valid_path": "art://."}
    for name, kind in (("nano3-sft-model-default", "Checkpoint"), ("nano3-rl-data-published", "RLPrompts")):
        record = {"type": kind, "types": [kind], "fields": fields, "metrics": {}, "inputs": {}, "sources": []}
        registry.publish(name, payload, record)
    assert runspec.run_app(nemotron.app, "nemotron", ["nano3", "rl", "rlvr", "--run", "ray", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "http://head:8265" in shown and "train_nemo_rl.py" in shown and "launch.sh" in shown


def test_a_torchrun_script_of_the_same_command_still_has_no_place_on_a_ray_cluster() -> None:
    with pytest.raises(UserError) as refused:
        runspec.run_app(nemotron.app, "nemotron", ["nano3", "rl", "rlvr", "-c", "tiny", "--run", "ray"])
    assert 'scripts with launch = "ray" or "direct" run there' in str(refused.value.hint)
