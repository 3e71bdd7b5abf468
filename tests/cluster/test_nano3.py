"""The nano3 commands on a real two-node Slurm, here and over SSH: what `--run` promises, with real training.

The data and the numbers of steps are small; architecture and code are those of the tiny recipe.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from .slurm import Slurm, wait_for
from .sshd import LoginNode

SRC = Path(__file__).parents[2] / "src"
PREP = ["stdlib.enabled=false", "tasks.num_tasks=60000", "tokenizer.vocab_size=400", "curation.evaluation_tasks=20"]
# Enough steps for a signal to come in the middle; a checkpoint every ten.
TRAIN = [
    *["train.train_iters=40", "train.eval_interval=40", "train.eval_iters=2", "checkpoint.save_interval=10"],
    *["scheduler.lr_warmup_iters=4", "scheduler.lr_wsd_decay_iters=10", "logger.log_interval=1"],
    *["evaluation.trigram_baseline=false", "evaluation.tasks_per_family=8", "evaluation.max_new_tokens=8"],
]
STEPS = {
    "data-pretrain": PREP,
    "pretrain": TRAIN,
    "data-sft": ["tasks.num_tasks=20000", "tasks.num_valid_tasks=2000", "evaluation_tasks=20"],
    "sft": [
        "train.train_iters=4",
        "train.eval_interval=4",
        "scheduler.lr_warmup_iters=1",
        "scheduler.lr_wsd_decay_iters=1",
    ],
    "rl": [
        "grpo.max_num_steps=2",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
        "grpo.val_period=2",
        "policy.generation.max_new_tokens=8",
    ],
    "eval": ["tasks.per_family=8", "tasks.samples=1", "tasks.max_new_tokens=8", "text.max_tokens=2000"],
}


@dataclass
class Desk:
    """Where somebody works: a folder with env.toml and output, and the `nemotron` command."""

    folder: Path
    env: dict[str, str]

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def start(self, *words: str, program: str = "nemotron.cli.main") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", f"from {program} import main; main()", *words]
        return subprocess.Popen(
            command, env=self.env, cwd=self.folder, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *words: str, program: str = "nemotron.cli.main", code: int = 0) -> str:
        process = self.start(*words, program=program)
        said, _ = process.communicate(timeout=280)
        assert process.returncode == code, said
        return said

    def digest(self, name: str, output: Path | None = None) -> str:
        record = (output or self.output) / "artifacts" / name / "1" / "artifact.json"
        return str(json.loads(record.read_text())["digest"])

    def record(self, name: str) -> dict[str, object]:
        record: dict[str, object] = json.loads((self.output / "artifacts" / name / "1" / "artifact.json").read_text())
        return record

    def losses(self, output: Path | None = None) -> list[float]:
        (metrics,) = (output or self.output).glob("nano3/pretrain/tiny-*/metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        return [line["loss"] for line in lines if "loss" in line]


def desk_in(folder: Path, slurm: Slurm, startup_command: str) -> Desk:
    folder.mkdir(exist_ok=True)
    (folder / "env.toml").write_text(
        f"""
[slurm]
executor = "slurm"
account = "test"
partition = "batch"
nodes = 2
gpus_per_node = 0
time = "10"
env = {{ OMP_NUM_THREADS = "1" }}
startup_commands = [{json.dumps(startup_command)}]
"""
    )
    env = slurm.env | {"PYTHONPATH": str(SRC), "HOME": str(folder / "home"), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return Desk(folder, env)


@pytest.fixture
def desk(slurm: Slurm, tmp_path: Path, startup_command: str) -> Desk:
    return desk_in(tmp_path / "desk", slurm, startup_command)


@pytest.fixture(scope="session")
def undisturbed(slurm_cluster: Slurm, tmp_path_factory: pytest.TempPathFactory, startup_command: str) -> Desk:
    """Data, made here, and a base model, trained on both nodes; no test changes what is in this folder."""
    desk = desk_in(tmp_path_factory.mktemp("undisturbed"), slurm_cluster, startup_command)
    desk.run("nano3", "data", "prep", "pretrain", "-c", "tiny", *PREP)
    said = desk.run("nano3", "pretrain", "-c", "tiny", "--run", "slurm", *TRAIN)
    assert re.search(r"^job \d+ \(nano3-pretrain-tiny\) running on node\[1-2\]$", said, re.M), said
    return desk


def with_data_of(other: Desk, desk: Desk) -> Desk:
    """The same data in a registry of its own, so that nothing is found published."""
    name = "nano3-pretrain-data-tiny"
    (desk.output / "artifacts").mkdir(parents=True)
    subprocess.run(["cp", "-r", str(other.output / "artifacts" / name), str(desk.output / "artifacts")], check=True)
    return desk


def test_two_nodes_train_like_two_processes_here(undisturbed: Desk, desk: Desk) -> None:
    """The same losses to the last digit, the same weights, and a record that says which code it was."""
    with_data_of(undisturbed, desk)
    desk.run("nano3", "pretrain", "-c", "tiny", "--dry-run", *TRAIN)
    script = SRC / "nemotron/recipes/nano3/stage0_pretrain/train.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    subprocess.run([*command, "--config", "tiny", *TRAIN], env=desk.env, cwd=desk.folder, check=True)
    assert len(desk.losses()) == 40
    assert undisturbed.losses() == desk.losses()
    assert undisturbed.digest("nano3-pretrain-model-tiny") == desk.digest("nano3-pretrain-model-tiny")
    producer = undisturbed.record("nano3-pretrain-model-tiny")["producer"]
    assert isinstance(producer, dict) and re.fullmatch(r"[0-9a-f]{64}", producer["code_digest"])


@pytest.mark.slow
def test_a_request_to_save_requeues_and_ends_with_the_same_weights(undisturbed: Desk, desk: Desk, slurm: Slurm) -> None:
    with_data_of(undisturbed, desk)
    process = desk.start("nano3", "pretrain", "-c", "tiny", "--run", "slurm", *TRAIN)
    metrics = "nano3/pretrain/tiny-*/metrics.jsonl"
    wait_for("some steps", lambda: any(len(p.read_text().splitlines()) > 12 for p in desk.output.glob(metrics)), 120)
    (job,) = slurm.run("squeue -h -o %i").stdout.split()
    slurm.run(f"scancel --signal=USR1 {job}")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert f"job {job} (nano3-pretrain-tiny) requeued: restart 1 of 3" in said, said
    assert re.search(r"^resumed at step \d+ of 40$", said, re.M)
    assert desk.losses() == undisturbed.losses()
    assert desk.digest("nano3-pretrain-model-tiny") == undisturbed.digest("nano3-pretrain-model-tiny")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_time_limit_requeues_and_ends_with_the_same_weights(
    undisturbed: Desk, desk: Desk, slurm: Slurm, tmp_path: Path, startup_command: str
) -> None:
    """A minute is the shortest limit that Slurm has: steps enough that it comes in the middle of them."""
    long = ["train.train_iters=600", "train.eval_interval=600", "evaluation.tasks_per_family=8"]
    with_data_of(undisturbed, desk)
    command = ("nano3", "pretrain", "-c", "tiny", "--run", "slurm", *TRAIN, *long)
    said = desk.run(*command, "run.env.time=1", "run.env.signal=USR1@30", "run.env.max_restarts=9")
    assert "requeued: restart 1 of 9" in said, said
    whole = with_data_of(undisturbed, desk_in(tmp_path / "whole", slurm, startup_command))
    said = whole.run(*command)
    assert "requeued" not in said
    assert len(whole.losses()) == 600
    assert desk.losses() == whole.losses()
    assert desk.digest("nano3-pretrain-model-tiny") == whole.digest("nano3-pretrain-model-tiny")


@pytest.mark.slow
def test_data_on_ray_and_training_over_ssh(
    undisturbed: Desk, desk: Desk, login_node: LoginNode, startup_command: str
) -> None:
    """Nothing is shared with the cluster but the login: inputs are resolved there, when the job starts."""
    there = desk.folder.parent / "there"
    with (desk.folder / "env.toml").open("a") as file:
        file.write(
            f'[login]\nextends = "slurm"\ntunnel = "ssh"\nhost = "{login_node.host}"\nport = {login_node.port}\n'
            f'user = "{login_node.user}"\nidentity = "{login_node.identity}"\njob_dir = "{there}"\n'
        )
    desk.env |= login_node.env
    said = desk.run("nano3", "data", "prep", "pretrain", "-c", "tiny", "--run", "login", *PREP)
    assert "running on node[1-2]" in said
    name = "nano3-pretrain-data-tiny"
    assert desk.digest(name, there / "output") == undisturbed.digest(name)
    said = desk.run("nano3", "pretrain", "-c", "tiny", "--run", "login", *TRAIN)
    assert "data = nano3-pretrain-data-tiny:latest (resolved at start)" in said
    assert desk.losses(there / "output") == undisturbed.losses()
    assert not desk.output.exists()


@pytest.mark.slow
def test_what_batch_prints_works_in_another_shell(undisturbed: Desk, desk: Desk, slurm: Slurm) -> None:
    with_data_of(undisturbed, desk)
    said = desk.run("nano3", "pretrain", "-c", "tiny", "--batch", "slurm", "run.env.nodes=1", *TRAIN)
    follow, inspect, cancel = (
        re.search(rf"^  {word} +(.*)$", said, re.M)[1]  # type: ignore[index]
        for word in ("follow", "inspect", "cancel")
    )
    job = cancel.split()[-1]
    slurm.wait_state(job, "RUNNING")
    shown = subprocess.run(["timeout", "60", "bash", "-c", f"{follow} | grep -m1 loss"], env=slurm.env, stdout=-1)
    assert b"pretrain" in shown.stdout
    assert "RUNNING" in slurm.run(inspect).stdout
    slurm.run(cancel)
    assert slurm.wait_state(job, ("CANCELLED", "COMPLETED", "FAILED")) == "CANCELLED"


@pytest.mark.slow
def test_a_pipeline_stops_at_the_first_failure(undisturbed: Desk, desk: Desk) -> None:
    with_data_of(undisturbed, desk)
    words = [f"{step}:{word}" for step, all_words in STEPS.items() for word in all_words]
    said = desk.run(
        "nano3", "pipe", "-c", "tiny", "--run", "slurm", *words, "pretrain:optimizer.lr=1e30",
        "pretrain:optimizer.clip_grad=1e30", code=1,
    )  # fmt: skip
    assert "[1/7] data-pretrain: skipped, published already: nano3-pretrain-data-tiny:1" in said
    assert "error: loss is nan" in said
    assert "cancelled behind it: nano3-data-prep-sft-tiny, nano3-sft-tiny, " in said
    assert {path.name for path in (desk.output / "artifacts").glob("nano3-*")} == {"nano3-pretrain-data-tiny"}


@pytest.mark.slow
def test_a_pipeline_runs_all_steps_in_order(undisturbed: Desk, desk: Desk) -> None:
    """Each step reads what the one before it published. The evaluation itself fails: its numbers are out of band."""
    with_data_of(undisturbed, desk)
    words = [f"{step}:{word}" for step, all_words in STEPS.items() for word in all_words]
    said = desk.run("nano3", "pipe", "-c", "tiny", "--run", "slurm", *words, code=1)
    steps = [f"nano3-{name}-tiny" for name in ("pretrain", "data-prep-sft", "sft", "data-prep-rl", "rl")]
    assert re.findall(r"^job \d+ \(([\w-]+)\) completed$", said, re.M) == steps, said
    assert "numbers are outside their bands" in said
    inputs = desk.record("nano3-eval-results-tiny")["inputs"]
    assert isinstance(inputs, dict)
    read = {str(reference).partition("@")[0] for reference in inputs.values()}
    assert {"nano3-rl-model-tiny:1", "nano3-sft-model-tiny:1", "nano3-pretrain-model-tiny:1"} <= read


FOREIGN = """
# /// script
# [tool.runspec]
# schema = "1"
# name = "mine/job"
# ///
import hashlib, os, pathlib, sys
names = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "MY_SERVICE_PASSPHRASE"]
for name in names:
    print(name, hashlib.sha256(os.environ[name].encode()).hexdigest(), flush=True)
seen = b""
for process in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        seen += process.read_bytes()
    except OSError:
        pass
print("in command lines:", [name for name in names if os.environ[name].encode() in seen])
sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["slurm", "login"])
def test_a_script_of_another_project_gets_its_secrets_and_nobody_else_does(
    desk: Desk, login_node: LoginNode, profile: str
) -> None:
    names = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "MY_SERVICE_PASSPHRASE"]
    canaries = {name: f"canary-{index}-{time.time_ns()}" for index, name in enumerate(names)}
    there = desk.folder.parent / "there"
    with (desk.folder / "env.toml").open("a") as file:
        file.write(f"secrets = {json.dumps(names)}\n")
        file.write(
            f'[login]\nextends = "slurm"\ntunnel = "ssh"\nhost = "{login_node.host}"\nport = {login_node.port}\n'
            f'user = "{login_node.user}"\nidentity = "{login_node.identity}"\njob_dir = "{there}"\n'
        )
    desk.env |= canaries | login_node.env
    project = desk.folder / "mine"
    (project / "config").mkdir(parents=True)
    (project / "job.py").write_text(FOREIGN)
    (project / "config" / "default.yaml").write_text("value: 1\n")
    dry = desk.run("run", "mine/job.py", "--run", profile, "--dry-run", program="nemo_runspec.cli")
    said = desk.run("run", "mine/job.py", "--run", profile, program="nemo_runspec.cli", code=1)
    for name, canary in canaries.items():
        assert f"{name} {hashlib.sha256(canary.encode()).hexdigest()}" in said
        assert canary not in said + dry and f"{name}" in dry
    assert "in command lines: []" in said
    assert "(mine-job-default) failed with exit code 1" in said  # whatever is none of ours
    written = [path for path in desk.folder.parent.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(written) > 10
    for path in written:
        content = path.read_bytes()
        assert not any(canary.encode() in content for canary in canaries.values()), path
