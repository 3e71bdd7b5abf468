"""Kill a training run, start the same command again: the final weights are those of a run that nobody touched.

Runs the scripts as a user would, in subprocesses, on a model of a few thousand parameters.
"""

from __future__ import annotations

import json
import random
import signal
import time

import pytest
from safetensors.torch import load_file

from .house import NANO3, TORCHRUN, House

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

STEPS = 60

MODEL = (
    "hybrid_override_pattern=ME*-", "vocab_size=512", "hidden_size=16", "num_attention_heads=2",
    "num_key_value_heads=1", "head_dim=8", "mamba_num_heads=2", "mamba_head_dim=8", "ssm_state_size=4", "n_groups=1",
    "chunk_size=16", "n_routed_experts=4", "moe_intermediate_size=8", "moe_shared_expert_intermediate_size=8",
    "intermediate_size=16",
)  # fmt: skip
TRAINING = [
    f"train.train_iters={STEPS}", "train.global_batch_size=4", "train.micro_batch_size=2", "train.eval_interval=15",
    "train.eval_iters=2", "scheduler.lr_warmup_iters=5", "scheduler.lr_wsd_decay_iters=10",
    "checkpoint.save_interval=8", "evaluation.tasks_per_family=0", "logger.log_interval=1",
]  # fmt: skip
PRETRAIN = [NANO3 / "stage0_pretrain" / "train.py", "--config", "tiny", *TRAINING, "dataset.seq_length=32"]
PRETRAIN += [f"model.{setting}" for setting in MODEL]
SFT = [NANO3 / "stage1_sft" / "train.py", "--config", "tiny", *TRAINING, "train.early_stop_patience=2"]
# No fall of the loss is ever large enough: of the validations at 15, 30, 45 only the first is an improvement, so the
# ten steps of the final decay begin at 45.
SFT += ["train.early_stop_min_delta=10"]
SFT_STEPS = 55


def losses(house: House, output: str) -> dict[int, float]:
    """Training loss by step."""
    return {record["step"]: record["loss"] for record in house.steps(output)}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """A registry with pretraining data, a base model and SFT data."""
    house = House(tmp_path_factory.mktemp("house"))
    words = [
        "the",
        "model",
        "reads",
        "a",
        "line",
        "of",
        "text",
        "and",
        "writes",
        "what",
        "comes",
        "next",
        "after",
        "it",
    ]
    rng = random.Random(0)
    notes = house.root / "notes.jsonl"
    texts = [" ".join(rng.choices(words, k=80)) + f" {i}." for i in range(120)]
    notes.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = f"{{name: notes, paths: [{notes}], weight: 0.5, valid_fraction: 0.2}}"
    house.run([
        NANO3 / "stage0_pretrain" / "data_prep.py", "--config", "tiny", "stdlib.enabled=false", "tasks.num_tasks=2000",
        "tokenizer.vocab_size=400", "curation.evaluation_tasks=5", f"sources=[{source}]",
    ])  # fmt: skip
    house.run([
        NANO3 / "stage1_sft" / "data_prep.py", "--config", "tiny", "tasks.num_tasks=2000", "tasks.num_valid_tasks=500",
        "text.path=null",
    ])  # fmt: skip
    house.run(PRETRAIN, "unbroken-pretrain")
    house.run(SFT, "unbroken-sft")
    return house


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("command", "stage", "steps"),
    [
        pytest.param(PRETRAIN, "pretrain", STEPS, id="pretrain"),
        pytest.param([*SFT, "run.model=nano3-pretrain-model-tiny:1"], "sft", SFT_STEPS, id="sft"),
    ],
)
@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=lambda v: str(v)
)
def test_stopped_and_started_again_ends_with_the_same_weights(
    house: House, command: list[object], stage: str, steps: int, number: signal.Signals, exit_code: int
) -> None:
    name, unbroken = f"nano3-{stage}-model-tiny", f"unbroken-{stage}"
    expected, versions = house.digest(f"{name}:1"), house.registry.versions(name)
    output = f"{unbroken}-{number.name}"
    assert house.run_and_stop(command, output, 21, number) == exit_code
    assert house.registry.versions(name) == versions  # nothing half-published
    said = house.run(command, output)
    assert "resumed at step" in said
    assert house.digest(name) == expected
    assert losses(house, output) == losses(house, unbroken)
    assert sorted(losses(house, output)) == list(range(1, steps + 1))


@pytest.mark.gpu
def test_stochastic_rounding_of_nvfp4_goes_on_with_the_same_numbers(house: House) -> None:
    command = [*PRETRAIN, "mixed_precision=bf16_with_nvfp4_mixed", "run.output=nvfp4", "run.results=nvfp4-results"]
    house.run(command, "unbroken-nvfp4")
    expected = house.digest("nvfp4:1")
    assert house.run_and_stop(command, "nvfp4", 21, signal.SIGKILL) == -9
    assert "resumed at step" in house.run(command, "nvfp4")
    assert house.digest("nvfp4") == expected != house.digest("nano3-pretrain-model-tiny:1")
    assert losses(house, "nvfp4") == losses(house, "unbroken-nvfp4")


def test_another_config_starts_fresh_and_cannot_resume_there(house: House) -> None:
    assert house.run_and_stop(PRETRAIN, "stopped", 10, signal.SIGTERM) == 143
    (stopped,) = (house.root / "stopped" / "nano3" / "pretrain").iterdir()
    other = [*PRETRAIN, "optimizer.lr=1e-4"]
    process = house.start([*other, f"resume={stopped}"], "stopped")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and "optimizer.lr" in said and "Traceback" not in said
    assert "resumed" not in house.run(other, "stopped")
    assert "resumed at step" in house.run([*PRETRAIN, f"resume={stopped}"], "elsewhere")
    assert house.digest("nano3-pretrain-model-tiny") == house.digest("nano3-pretrain-model-tiny:1")


@pytest.fixture(scope="module")
def exact(house: House) -> dict[str, list[object]]:
    """Commands in fp32, run once each as `exact-STAGE`: bf16 rounds halves of a batch otherwise than a whole."""
    sft = [*SFT, "run.model=nano3-pretrain-model-tiny:1"]
    commands = {stage: [*command, "mixed_precision=fp32"] for stage, command in (("pretrain", PRETRAIN), ("sft", sft))}
    for stage, command in commands.items():
        house.run(command, f"exact-{stage}")
    return commands


@pytest.mark.parametrize("dist", ["dist.use_torch_fsdp2=false", "dist.use_torch_fsdp2=true"], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize(("stage", "steps"), [("pretrain", STEPS), ("sft", SFT_STEPS)], ids=["pretrain", "sft"])
def test_two_processes_train_as_one(
    house: House, exact: dict[str, list[object]], stage: str, steps: int, dist: str, request: pytest.FixtureRequest
) -> None:
    """Stopped half-way by a signal to torchrun, and taken up by one process."""
    command, output = exact[stage], f"two-{request.node.callspec.id}"
    assert house.run_and_stop([*TORCHRUN, *command, dist], output, 21, signal.SIGTERM) != 0
    stopped_at = max(losses(house, output))
    assert stopped_at < steps
    said = house.run(command, output)
    assert f"resumed at step {stopped_at}" in said
    alone, together = losses(house, f"exact-{stage}"), losses(house, output)
    assert sorted(together) == sorted(alone)
    # The same tokens in the same steps; only the order of the sums over them differs.
    assert [together[step] for step in range(1, 11)] == pytest.approx([alone[step] for step in range(1, 11)], rel=1e-5)
    assert together[steps] == pytest.approx(alone[steps], rel=1e-2)


def test_a_sharded_run_publishes_whole_weights(house: House) -> None:
    said = house.run([*TORCHRUN, *PRETRAIN, "dist.use_torch_fsdp2=true"], "sharded")
    assert "resumed" not in said
    expected, found = (house.registry.resolve(f"nano3-pretrain-model-tiny{version}").path for version in (":1", ""))
    expected_weights, weights = (load_file(path / "model.safetensors") for path in (expected, found))
    assert {name: w.shape for name, w in weights.items()} == {name: w.shape for name, w in expected_weights.items()}
    assert losses(house, "sharded")[STEPS] == pytest.approx(losses(house, "unbroken-pretrain")[STEPS], rel=1e-2)


@pytest.mark.parametrize(
    ("command", "stage"),
    [
        pytest.param(PRETRAIN, "pretrain", id="pretrain"),
        pytest.param([*SFT, "run.model=nano3-pretrain-model-tiny:1"], "sft", id="sft"),
    ],
)
def test_a_signal_during_evaluation_ends_it(house: House, command: list[object], stage: str) -> None:
    command = [*command, "evaluation.tasks_per_family=100", "evaluation.max_new_tokens=60"]
    output, name = f"evaluation-{stage}", f"nano3-{stage}-model-tiny"
    before, results = house.registry.versions(name), house.registry.versions(f"nano3-{stage}-results-tiny")
    process = house.start(command, output)
    assert process.stderr is not None
    while "evaluate" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(0.2)
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=60)  # about one second on an idle machine
    assert process.returncode == 143 and "Traceback" not in said
    assert len(house.registry.versions(name)) == len(before) + 1
    house.run(command, output)
    assert len(house.registry.versions(name)) == len(before) + 1  # published once
    assert len(house.registry.versions(f"nano3-{stage}-results-tiny")) == len(results) + 1
    assert house.digest(name) == house.digest(f"{name}:1")
