"""What dry runs of the published size show under the profile for pyxis: image, mounts, nodes, layout, tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from quick_commands import pack_nothing

from nemo_runspec.errors import ArtifactError, UserError
from nemotron.cli.main import _run
from nemotron.kit.commands import command_hint

EXAMPLE = Path(__file__).resolve().parents[3] / "env.example.toml"
NEMO, NEMO_RL = "nvcr.io#nvidia/nemo:26.08", "nvcr.io#nvidia/nemo-rl:v0.7.0"
# Command: its image, nodes, and lines of the resolved config.
COMMANDS = {
    "nano3 pretrain": (NEMO, 16, ["expert_model_parallel_size: 8", "train_tokens: 23500000000000", "seq_length: 8192"]),
    "nano3 quantize": (NEMO, 1, ["routed_experts: FP8", "mamba_before_attention: BF16", "calib_size: 1024"]),
    "super3 quantize": (NEMO, 1, ["routed_experts: NVFP4", "fp8_scale_sweep: true", "seq_length: 65536"]),
    "super3 qad": (NEMO, 16, ["train_tokens: 5000000000", "context_parallel_size: 16", "lr: 1.0e-05"]),
    "nano2 compress prune -c 9b": (NEMO, 1, ["hidden_size: 4480", "num_layers: 56"]),
    "nano2 compress distil -c 9b": (NEMO, 16, ["train_tokens: 60000000000", "tensor_model_parallel_size: 4"]),
    "nano3 eval": (NEMO_RL, 1, ["config: benchmarks/gpqa/config.yaml", "num_repeats: 64", "published: 73.04"]),
    "super3 eval": (NEMO_RL, 1, ["config: benchmarks/gpqa/config.yaml", "published: 79.23"]),
}


@pytest.fixture(autouse=True)
def _nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_nothing(monkeypatch)


@pytest.mark.parametrize("command", COMMANDS)
def test_all_that_a_cluster_engineer_looks_for_is_in_view(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNSPEC_ENV_FILE", str(EXAMPLE))
    monkeypatch.setattr("nemo_runspec.execution.slurm.nemo_run_is_installed", lambda: False)
    monkeypatch.setattr("sys.argv", ["nemotron", *command.split(), "--run", "dgx", "--dry-run"])
    assert _run() == 0
    shown = capsys.readouterr().out
    image, nodes, lines = COMMANDS[command]
    for line in lines:
        assert re.search(rf"^[ -]*{re.escape(line)}$", shown, re.MULTILINE), line
    asked = ("account=research", "partition=batch", "time=04:00:00", "signal=USR1@1800", "exclusive", "mem=0")
    head = {f"#SBATCH --{each}" for each in asked}
    assert head | {f"#SBATCH --nodes={nodes}"} <= set(shown.splitlines())
    (srun,) = [line for line in shown.splitlines() if line.startswith("srun ")]
    given = dict(re.findall(r"--(container-\w+) (\S+)", srun))
    assert given["container-image"] == image
    mounts = given["container-mounts"].split(",")
    assert {"/lustre:/lustre", "/lustre/me/artifacts:/lustre/me/artifacts", "/lustre/me/jobs:/lustre/me/jobs"} <= {
        *mounts
    }
    assert "export HF_HOME=/lustre/me/hf" in shown and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("nano3 pretrain run.env.nodes=5", "global_batch_size 3072 is no multiple of 40 replicas"),
        ("nano3 sft run.env.nodes=2", "16 GPUs that train are no multiple of TP x PP x CP = 256"),
        ("super3 qad run.env.nodes=3", "24 GPUs that train are no multiple of TP x PP x CP ="),
        ("nano3 pretrain ft.enable_ft_package=true", "the profile's launcher is torchrun"),
        ("nano3 rl rlvr run.env.nodes=16", "cluster.num_nodes 32 has to be all nodes of the job"),
        ("super3 rl rlhf run.env.nodes=96", "cluster.num_nodes 96 + env.nemo_gym.num_gpu_nodes 4 has to be all nodes"),
    ],
)
def test_machines_on_which_the_config_does_not_fit_are_refused_before_they_are_asked_for(
    command: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNSPEC_ENV_FILE", str(EXAMPLE))
    monkeypatch.setattr("sys.argv", ["nemotron", *command.split(), "--run", "dgx", "--dry-run"])
    with pytest.raises(UserError, match=re.escape(problem)):
        _run()


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("pretrain -c tiny", "train.global_batch_size 8 does not divide among 16 processes"),
        ("rl rlvr -c small grpo.num_prompts_per_step=24", "grpo.num_prompts_per_step 24 does not divide among 16"),
        ("rl genrm -c small grpo.num_prompts_per_step=48", "half of grpo.num_prompts_per_step 24 does not divide"),
        ("rl dpo -c tiny policy.train_global_batch_size=8", "policy.train_global_batch_size 8 does not divide"),
    ],
)
def test_a_batch_that_does_not_divide_among_the_processes_is_refused_before_they_are_asked_for(
    command: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.toml").write_text('[two]\nexecutor = "slurm"\nnodes = 2\ngpus_per_node = 8\n')
    monkeypatch.setenv("RUNSPEC_ENV_FILE", str(tmp_path / "env.toml"))
    monkeypatch.setattr("sys.argv", ["nemotron", "nano3", *command.split(), "--run", "two", "--dry-run"])
    with pytest.raises(UserError, match=re.escape(problem)):
        _run()


def test_a_batch_that_does_not_divide_among_the_processes_of_this_machine_is_refused_by_a_dry_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nemo_runspec.execution.local.visible_gpus", lambda: 0)
    monkeypatch.setattr("sys.argv", ["nemotron", "nano3", "pretrain", "-c", "tiny", "run.processes=3", "--dry-run"])
    problem = "on 3 processes of this machine: train.global_batch_size 8 does not divide among 3 processes"
    with pytest.raises(UserError, match=problem):
        _run()


def test_what_a_layout_is_known_for_is_said_before_the_job_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNSPEC_ENV_FILE", str(EXAMPLE))
    monkeypatch.setattr("sys.argv", ["nemotron", "nano3", "sft", "--run", "dgx", "--dry-run"])
    _run()
    assert "warning: context_parallel_size 8 with Mamba: NaN has been reported" in capsys.readouterr().err


def test_the_launcher_of_base_evaluations_runs_on_a_login_node_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNSPEC_ENV_FILE", str(EXAMPLE))
    monkeypatch.setattr("nemo_runspec.execution.slurm.nemo_run_is_installed", lambda: False)
    monkeypatch.setattr("sys.argv", ["nemotron", "nano3", "eval", "-c", "base", "--run", "dgx", "--dry-run"])
    assert _run() == 0
    shown = capsys.readouterr().out
    assert "container-image" not in shown and "--gpus-per-node" not in shown


def test_a_dry_run_without_its_input_shows_the_rest_and_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the registry can be reached and has no such artifact: layout and tokens are in the config all the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNSPEC_ENV_FILE", str(EXAMPLE))
    for words in ("nano3 pretrain", "super3 sft"):
        monkeypatch.setattr("sys.argv", ["nemotron", *words.split(), "--run", "slurm", "--dry-run"])
        with pytest.raises(ArtifactError, match=r"run\.\w+ = \S+: no artifact") as refused:
            _run()
        shown = capsys.readouterr().out
        assert re.search(r"^  reads +data = [\w-]+:latest \(resolved at start\)$", shown, re.MULTILINE)
        assert ": 16 nodes of " in shown and re.search(r"^  train_tokens: \d+$", shown, re.MULTILINE)
        assert refused.value.exit_code == 2
        assert (command_hint(refused.value) or "").startswith("make it: nemotron ")
    assert not list(tmp_path.iterdir())
