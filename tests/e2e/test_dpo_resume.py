"""Your own preference pairs end to end; a DPO run that is killed ends with the weights of an unbroken run."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch

from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit import Model
from nemotron.stack.models import NemotronH, NemotronHConfig

from .house import NANO3, TORCHRUN, House

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

REPOSITORY = Path(__file__).resolve().parents[2]
STAGE = NANO3 / "stage2_rl"
STEPS = 12
DPO = [
    STAGE / "dpo.py", "--config", "own", "run.model=start:1", "run.data=nano3-dpo-data-own:1",
    f"dpo.max_num_steps={STEPS}", "dpo.val_period=4", "policy.train_global_batch_size=16",
    "policy.max_total_sequence_length=256", "policy.optimizer.lr=2e-3", "policy.moe_router_bias_update_rate=1e-3",
    "policy.lr_warmup_iters=2", "checkpoint.save_interval=3",
]  # fmt: skip
OUTPUT = "nano3-dpo-model-own"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """A registry with pairs, a model to start from, and the model of an uninterrupted run."""
    house = House(tmp_path_factory.mktemp("house"))
    pairs = [{"prompt": f"Is {n} odd?", "chosen": "no yes"[n % 2 * 3 :][:3], "rejected": "perhaps"} for n in range(90)]
    (house.root / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    folder = house.root / "start"
    tokenizer = train_tokenizer(["Is 12 odd? yes no perhaps"], 400)
    save_tokenizer(tokenizer, folder, model_max_length=256, template="nano3")
    torch.manual_seed(0)
    config = NemotronHConfig(
        "ME*-", vocab_size=tokenizer.get_vocab_size(), hidden_size=16, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, mamba_num_heads=2, mamba_head_dim=8, ssm_state_size=4, n_groups=1, chunk_size=16,
        n_routed_experts=4, moe_intermediate_size=8, moe_shared_expert_intermediate_size=8, intermediate_size=16,
    )  # fmt: skip
    NemotronH(config).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(house.root / "artifacts"))
        Model(path=folder, num_steps=0, tokenizer_path=folder, chat_template="nano3").save("start")
    sources = "sources=[{name: mine, paths: [pairs.jsonl], valid_fraction: 0.1}]"
    house.run([STAGE / "data_prep_pairs.py", "--config", "own", sources], "prep")
    house.run(DPO, "unbroken")
    return house


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("number", "exit_code", "steps"),
    [pytest.param(signal.SIGKILL, -9, 7, id="kill"), pytest.param(signal.SIGTERM, 143, 4, id="term")],
)
def test_stopped_and_started_again_ends_with_the_same_weights(
    house: House, number: signal.Signals, exit_code: int, steps: int, request: pytest.FixtureRequest
) -> None:
    output = request.node.callspec.id
    assert house.run_and_stop(DPO, output, steps, number) == exit_code
    assert len(house.steps(output)) < STEPS
    assert "resumed at step" in house.run(DPO, output)
    assert house.digest(OUTPUT) == house.digest(f"{OUTPUT}:1")
    assert house.records(output) == house.records("unbroken")


def test_two_processes_train_on_the_same_pairs(house: House) -> None:
    house.run([*TORCHRUN, *DPO], "two")
    for one, two in zip(house.records("unbroken"), house.records("two"), strict=True):
        assert one == pytest.approx(two, rel=1e-3, abs=1e-3)


def test_the_chosen_answers_gain_and_the_guide_explains_every_metric(house: House) -> None:
    first, *_, last = [record for record in house.records("unbroken") if "valid_accuracy" in record]
    assert first["step"] == 0 and last["step"] == STEPS
    assert first["valid_accuracy"] == first["valid_rewards_margin_mean"] == 0.0
    assert last["valid_accuracy"] == 1.0 and last["valid_rewards_chosen_mean"] > 0
    guide = (REPOSITORY / "docs/guides/rl-metrics.md").read_text(encoding="utf-8").split("# DPO")[1]
    names = {name.removeprefix("valid_") for record in house.records("unbroken") for name in record}
    assert names - {"step", "time"} <= set(re.findall(r"`(\w+)`", guide))
