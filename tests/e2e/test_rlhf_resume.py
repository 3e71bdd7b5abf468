"""Kill the training of a judge, or RLHF with it, start the same command again: the final weights are the same."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from nemotron.data_prep.tokens.tokenizer import MIN_VOCAB_SIZE, save_tokenizer, train_tokenizer
from nemotron.kit import Model

from .house import NANO3, House
from .test_rl_resume import letter_model, stopped_in_every_phase

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

STAGE = NANO3 / "stage2_rl"
SHARED = [
    "run.data=nano3-rl-data-tiny:1", "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4",
    "env.families={multiple_choice: 3, math: 1}", "env.enable_thinking=false", "policy.optimizer.lr=2e-3",
    "policy.max_total_sequence_length=384", "policy.generation.batch_size=24", "checkpoint.save_interval=1",
]  # fmt: skip
GENRM = [
    STAGE / "genrm.py", "--config", "tiny", "run.model=start:1", *SHARED, "judge.imitation_steps=4",
    "grpo.max_num_steps=8", "grpo.val_period=4", "grpo.val_tasks_per_family=3", "policy.generation.max_new_tokens=8",
]  # fmt: skip
RLHF = [
    STAGE / "rlhf.py", "--config", "tiny", "run.model=start:1", "run.judge=nano3-genrm-model-tiny:1", *SHARED,
    "grpo.max_num_steps=6", "grpo.max_error_rate=1", "policy.generation.max_new_tokens=4",
    "judge.max_new_tokens=8", "judge.enable_thinking=false", "evaluation.tasks_per_family=2", "evaluation.samples=1",
    "evaluation.families=[multiple_choice]", "judge.test_model_path=nano3-genrm-model-tiny",
]  # fmt: skip


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """A registry with prompts, a model to start from, a judge, and the results of uninterrupted runs."""
    house = House(tmp_path_factory.mktemp("house"))
    tokenizer = train_tokenizer(["A B C D"], MIN_VOCAB_SIZE)
    folder = house.root / "start"
    save_tokenizer(tokenizer, folder, model_max_length=384, template="nano3")
    letters = [tokenizer.token_to_id(letter) for letter in "ABCD"]
    letter_model(tokenizer.get_vocab_size(), letters, tokenizer.token_to_id("<|im_end|>")).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(house.root / "artifacts"))
        Model(path=folder, num_steps=0, tokenizer_path=folder, chat_template="nano3").save("start")
    house.run([STAGE / "data_prep.py", "--config", "tiny", "tasks.num_tasks=400", "tasks.num_valid_tasks=100"], "prep")
    house.run(GENRM, "unbroken")
    house.run(RLHF, "unbroken-rlhf")
    return house


@pytest.mark.parametrize(
    ("command", "name", "unbroken", "steps"),
    [
        pytest.param(GENRM, "nano3-genrm-model-tiny", "unbroken", 3, id="judge in imitation"),
        pytest.param(GENRM, "nano3-genrm-model-tiny", "unbroken", 6, id="judge in GRPO"),
        pytest.param(RLHF, "nano3-rlhf-model-tiny", "unbroken-rlhf", 4, id="RLHF"),
    ],
)
def test_killed_and_started_again_ends_with_the_same_weights(
    house: House, command: list[object], name: str, unbroken: str, steps: int, request: pytest.FixtureRequest
) -> None:
    output = request.node.callspec.id.replace(" ", "-")
    assert house.run_and_stop(command, output, steps, signal.SIGKILL) == -9
    assert "resumed at step" in house.run(command, output)
    assert house.digest(name) == house.digest(f"{name}:1")
    assert house.records(output) == house.records(unbroken)
    assert house.records(output, "rollouts.jsonl") == house.records(unbroken, "rollouts.jsonl")


def test_rlhf_stopped_in_generation_in_the_judge_and_in_the_update(house: House) -> None:
    """SIGTERM while the judge answers, too: what it has said so far is not gone on from, but said again."""
    stops = [("generation", 2, 9), ("judge", 2, 9), ("judge", 1, 15), ("update", 4, 9)]
    stopped_in_every_phase(house, RLHF, "rlhf-phases", stops, "nano3-rlhf-model-tiny")
    assert house.records("rlhf-phases") == house.records("unbroken-rlhf")
    assert house.records("rlhf-phases", "rollouts.jsonl") == house.records("unbroken-rlhf", "rollouts.jsonl")


def test_the_runs_learned_something(house: House) -> None:
    """Otherwise equal weights would prove little."""
    losses = [record["loss"] for record in house.records("unbroken") if "loss" in record]
    assert len(losses) == 4 and losses[3] < losses[0]
    steps = house.steps("unbroken-rlhf")
    assert sum(record["grad_norm"] > 0 for record in steps) > 3
    assert any(0 < record["accuracy"] < 1 for record in steps)  # letters at random: some are right
    assert house.digest("nano3-rlhf-model-tiny:1") != house.digest("start:1")
    for model in ("nano3-genrm-model-tiny:1", "nano3-rlhf-model-tiny:1"):
        families = house.registry.resolve(model).record["metrics"]["families"]  # tiny's, and those of SHARED
        assert sorted(families) == ["math", "multiple_choice", "structured_output"]


def test_the_guide_explains_every_metric(house: House) -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs/guides/rl-metrics.md").read_text(encoding="utf-8")
    names = {name for output in ("unbroken", "unbroken-rlhf") for record in house.records(output) for name in record}
    own = {name for name in names if name.startswith("valid_") or name.endswith("_chars")}
    own |= {"loss", "accuracy", "forfeited", "comparisons_too_long"}
    assert own <= names and len(own) == 10
    assert [name for name in sorted(own) if f"`{name}`" not in guide] == []
