"""The nano3 commands on a real two-node Slurm, here and over SSH: what `--run` promises, with real training.

The data and the numbers of steps are small; architecture and code are those of the tiny recipe.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .desk import Desk
from .slurm import Slurm, wait_for
from .sshd import LoginNode

SCRIPT = Path(__file__).parents[2] / "src/nemotron/recipes/nano3/stage0_pretrain/train.py"
PREP = ["stdlib.enabled=false", "tasks.num_tasks=60000", "tokenizer.vocab_size=400", "curation.evaluation_tasks=20"]
# Enough steps for a signal to come in the middle; a checkpoint every ten.
TRAIN = [
    *["train.train_iters=40", "train.eval_interval=40", "train.eval_iters=2", "checkpoint.save_interval=10"],
    *["scheduler.lr_warmup_iters=4", "scheduler.lr_wsd_decay_iters=10", "logger.log_interval=1"],
    *["evaluation.trigram_baseline=false", "evaluation.tasks_per_family=8", "evaluation.max_new_tokens=8"],
]
GRPO = [
    *["grpo.max_num_steps=2", "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4"],
    "policy.generation.max_new_tokens=8",
]
STEPS = {
    "data-pretrain": PREP,
    "pretrain": TRAIN,
    "data-sft": ["text.path=null", "tasks.num_tasks=20000", "tasks.num_valid_tasks=2000", "evaluation_tasks=20"],
    "sft": [
        "train.global_batch_size=2",  # on two nodes
        "train.micro_batch_size=1",
        "train.train_iters=4",
        "train.eval_interval=4",
        "scheduler.lr_warmup_iters=1",
        "scheduler.lr_wsd_decay_iters=1",
    ],
    "rl": [*GRPO, "grpo.val_period=2"],
    "genrm": [*GRPO, "grpo.val_period=2", "judge.imitation_steps=1"],
    "rlhf": [*GRPO, "grpo.max_error_rate=1", "judge.max_new_tokens=8", "evaluation.tasks_per_family=2"],
    "rl-final": [*GRPO, "grpo.val_period=2"],
    "eval": ["tasks.per_family=8", "tasks.samples=1", "tasks.max_new_tokens=8", "text.max_tokens=2000"],
}
PIPE = [f"{step}:{word}" for step, words in STEPS.items() for word in words]
DATA, MODEL = "nano3-pretrain-data-tiny", "nano3-pretrain-model-tiny"


def record(output: Path, name: str) -> dict[str, Any]:
    """Of version 1 of an artifact."""
    content: dict[str, Any] = json.loads((output / "artifacts" / name / "1" / "artifact.json").read_text())
    return content


def losses(output: Path) -> list[float]:
    """Of every step of pretraining."""
    (metrics,) = output.glob("nano3/pretrain/tiny-*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="session")
def undisturbed(make_desk: Callable[[Path], Desk], tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """Data, made here, and a base model, trained on both nodes; no test changes what is in this folder."""
    desk = make_desk(tmp_path_factory.mktemp("undisturbed") / "desk")
    desk.run("nemotron nano3 data prep pretrain -c tiny", *PREP)
    printed = desk.run("nemotron nano3 pretrain -c tiny --run slurm", *TRAIN)
    assert re.search(r"^job \d+ \(nano3-pretrain-tiny\) running on node\[1-2\]$", printed, re.M), printed
    return desk


@pytest.fixture
def desk_with_data(undisturbed: Desk, desk: Desk) -> Desk:
    """The same data in a registry of its own, so that nothing else is found published."""
    (desk.output / "artifacts").mkdir(parents=True)
    subprocess.run(["cp", "-r", undisturbed.output / "artifacts" / DATA, desk.output / "artifacts"], check=True)
    return desk


def test_two_nodes_train_like_two_processes_here(undisturbed: Desk, desk_with_data: Desk) -> None:
    """The same losses to the last digit, the same weights, and a record that says which code it was."""
    desk = desk_with_data
    desk.run("nemotron nano3 pretrain -c tiny --dry-run", *TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    subprocess.run([*command, "--config", "tiny", *TRAIN], env=desk.env, cwd=desk.folder, check=True)
    assert len(losses(desk.output)) == 40
    assert losses(undisturbed.output) == losses(desk.output)
    there = record(undisturbed.output, MODEL)
    assert there["digest"] == record(desk.output, MODEL)["digest"]
    assert re.fullmatch(r"[0-9a-f]{64}", there["producer"]["code_digest"])


@pytest.mark.slow
def test_a_request_to_save_requeues_and_ends_with_the_same_weights(
    undisturbed: Desk, desk_with_data: Desk, slurm: Slurm
) -> None:
    desk = desk_with_data
    attached = desk.start("nemotron nano3 pretrain -c tiny --run slurm", *TRAIN)
    metrics = "nano3/pretrain/tiny-*/metrics.jsonl"
    wait_for("some steps", lambda: any(len(p.read_text().splitlines()) > 12 for p in desk.output.glob(metrics)), 120)
    slurm.run(f"scancel --signal=USR1 {attached.job}")
    printed = attached.end()
    assert f"job {attached.job} (nano3-pretrain-tiny) requeued: restart 1 of 3" in printed
    assert re.search(r"^resumed at step \d+ of 40$", printed, re.M)
    assert losses(desk.output) == losses(undisturbed.output)
    assert record(desk.output, MODEL)["digest"] == record(undisturbed.output, MODEL)["digest"]


@pytest.mark.slow
def test_data_on_ray_and_training_over_ssh(undisturbed: Desk, desk: Desk, login_node: LoginNode) -> None:
    """Nothing is shared with the cluster but the login: inputs are resolved there, when the job starts."""
    there = desk.folder.parent / "there"
    desk.profile("login", extends="slurm", job_dir=str(there), **login_node.profile)
    desk.env |= login_node.env
    printed = desk.run("nemotron nano3 data prep pretrain -c tiny --run login", *PREP)
    assert "running on node[1-2]" in printed and "CPUs on 2 nodes" in printed
    assert record(there / "output", DATA)["digest"] == record(undisturbed.output, DATA)["digest"]
    printed = desk.run("nemotron nano3 pretrain -c tiny --run login", *TRAIN)
    assert f"data = {DATA}:latest (resolved at start)" in printed
    assert losses(there / "output") == losses(undisturbed.output)
    assert not desk.output.exists()


@pytest.mark.slow
def test_a_pipeline_stops_at_the_first_failure(desk_with_data: Desk, slurm: Slurm) -> None:
    nan = ("pretrain:optimizer.lr=1e30", "pretrain:optimizer.clip_grad=1e30")
    printed = desk_with_data.run("nemotron nano3 pipe -c tiny --run slurm", *PIPE, *nan, code=1)
    assert f"[1/10] data-pretrain: skipped, published already: {DATA}:1" in printed
    assert "error: loss is nan" in printed
    assert "cancelled behind it: nano3-data-prep-sft-tiny, nano3-sft-tiny, " in printed
    assert slurm.run("squeue -h").stdout == ""
    assert {path.name for path in (desk_with_data.output / "artifacts").glob("nano3-*")} == {DATA}


@pytest.mark.slow
def test_a_pipeline_runs_all_steps_in_order(desk_with_data: Desk) -> None:
    """Each step reads what the one before it published. The evaluation itself fails: its numbers are out of band."""
    printed = desk_with_data.run("nemotron nano3 pipe -c tiny --run slurm", *PIPE, code=1)
    names = "pretrain", "data-prep-sft", "sft", "data-prep-rl", "rl", "genrm", "rlhf"
    steps = [*(f"nano3-{name}-tiny" for name in names), "nano3-rl-tiny-final"]
    assert re.findall(r"^job \d+ \(([\w-]+)\) completed$", printed, re.M) == steps, printed
    assert "numbers are outside their bands" in printed
    inputs = record(desk_with_data.output, "nano3-eval-results-tiny")["inputs"]
    read = {str(reference).partition("@")[0] for reference in inputs.values()}
    assert {"nano3-final-model-tiny:1", "nano3-rl-model-tiny:1", "nano3-sft-model-tiny:1", f"{MODEL}:1"} <= read
