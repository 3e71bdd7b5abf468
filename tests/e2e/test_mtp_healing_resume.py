"""Healing that is killed, or stopped by a signal, ends with the block, results and records of an unbroken run."""

from __future__ import annotations

import signal

import pytest
import torch

from nemotron.data_prep.tokens.tokenizer import MIN_VOCAB_SIZE, save_tokenizer, train_tokenizer
from nemotron.kit import Model
from nemotron.stack.models import NemotronH, NemotronHConfig

from .house import NANO3, RECIPES, TORCHRUN, House

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

STEPS = 10
HEALING = [
    RECIPES / "super3" / "stage2_rl" / "mtp_healing.py", "--config", "smoke", "run.model=start:1",
    "run.data=nano3-rl-data-tiny:1", f"boosting.max_num_steps={STEPS}", "boosting.val_period=4",
    "policy.optimizer.lr=2e-2", "policy.generation.batch_size=6", "checkpoint.save_interval=3",
]  # fmt: skip
OUTPUT, RESULTS = "super3-mtp-healing-model-smoke", "super3-mtp-healing-results-smoke"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """A registry with prompts, a model to start from, and the model of an uninterrupted run."""
    house = House(tmp_path_factory.mktemp("house"))
    folder = house.root / "start"
    tokenizer = train_tokenizer(["A B C D"], MIN_VOCAB_SIZE)
    save_tokenizer(tokenizer, folder, model_max_length=1024, template="super3")
    torch.manual_seed(0)
    config = NemotronHConfig(
        "ME*-", vocab_size=tokenizer.get_vocab_size(), hidden_size=16, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, mamba_num_heads=2, mamba_head_dim=8, ssm_state_size=4, n_groups=1, chunk_size=16,
        n_routed_experts=4, moe_intermediate_size=8, moe_shared_expert_intermediate_size=8, intermediate_size=16,
        num_nextn_predict_layers=1, initializer_range=0.3,
    )  # fmt: skip
    NemotronH(config).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(house.root / "artifacts"))
        Model(path=folder, num_steps=0, tokenizer_path=folder, chat_template="super3").save("start")
    house.run([NANO3 / "stage2_rl" / "data_prep.py", "--config", "tiny", "tasks.num_tasks=2000",
               "tasks.num_valid_tasks=500", "tasks.families=[math, multiple_choice]"], "prep")  # fmt: skip
    house.run(HEALING, "unbroken")
    return house


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("number", "exit_code", "steps"),
    [pytest.param(signal.SIGKILL, -9, 7, id="kill"), pytest.param(signal.SIGTERM, 143, 5, id="term")],
)
def test_stopped_and_started_again_ends_with_the_same_block(
    house: House, number: signal.Signals, exit_code: int, steps: int, request: pytest.FixtureRequest
) -> None:
    output = request.node.callspec.id
    assert house.run_and_stop(HEALING, output, steps, number) == exit_code
    assert len(house.steps(output)) < STEPS
    assert "resumed at step" in house.run(HEALING, output)
    for name in (OUTPUT, RESULTS):
        assert house.digest(name) == house.digest(f"{name}:1")
    assert house.records(output) == house.records("unbroken")


def test_the_block_has_moved(house: House) -> None:
    assert house.digest(OUTPUT) != house.digest("start")
    losses = [record["loss"] for record in house.steps("unbroken")]
    assert len(losses) == STEPS and losses[-1] < losses[0]


def test_two_processes_take_part(house: House) -> None:
    """Each draws responses of its own to its share of the prompts; all train one block."""
    house.run([*TORCHRUN, *HEALING], "two")
    one, two = house.records("unbroken"), house.records("two")
    assert [record["step"] for record in one] == [record["step"] for record in two]
    assert two[0]["valid_acceptance_length_greedy"] == pytest.approx(one[0]["valid_acceptance_length_greedy"])
    assert house.steps("two")[0]["loss"] == pytest.approx(house.steps("unbroken")[0]["loss"], rel=0.2)
