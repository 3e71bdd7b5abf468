"""Kill an RL run, start the same command again: the final weights are those of a run that nobody touched.

The models have a few thousand parameters and no training behind them. The head is set so that one answers with a random
option letter, which makes some rollouts right, and hence gradients and a policy that moves; another one also calls
tools, well-formed or not.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from nemotron.data_prep.tokens.tokenizer import MIN_VOCAB_SIZE, save_tokenizer, train_tokenizer
from nemotron.kit import Model
from nemotron.stack.environments import Task
from nemotron.stack.environments.sandbox import sandbox_failure
from nemotron.stack.evaluation.scoring import prompt_text
from nemotron.stack.models import NemotronH, NemotronHConfig

from .house import NANO3, TORCHRUN, House

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

REPOSITORY = Path(__file__).resolve().parents[2]
STAGE = NANO3 / "stage2_rl"
STEPS = 9
RL = [
    STAGE / "rlvr.py", "--config", "tiny", "run.model=start:1", "run.data=nano3-rl-data-tiny:1",
    f"grpo.max_num_steps={STEPS}", "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=8",
    "grpo.val_period=4", "grpo.val_tasks_per_family=3", "env.families={multiple_choice: 3, math: 1}",
    "env.enable_thinking=false", "policy.optimizer.lr=2e-3", "policy.lr_warmup_iters=2",
    "policy.max_total_sequence_length=128", "policy.generation.max_new_tokens=4", "policy.generation.batch_size=24",
    "checkpoint.save_interval=3", "evaluation.tasks_per_family=0",
]  # fmt: skip
OUTPUT = "nano3-rl-model-tiny"
AHEAD = "grpo.async_grpo={enabled: true, max_trajectory_age_steps: 2}"
TOOLS = [
    *RL, "run.model=caller:1", "env.families={multiple_choice: 3, workplace_assistant: 1}",
    "policy.max_total_sequence_length=1024", "policy.generation.max_new_tokens=12", "grpo.max_rollout_turns=3",
    "grpo.invalid_tool_call_advantage=-5", "grpo.val_period=0",
]  # fmt: skip
CALL = "<tool_call><function=x></function></tool_call><|im_end|>"
REPAIR = [
    *RL, "run.model=agent:1", "env.families={multiple_choice: 3, repository_repair: 1}",
    "policy.max_total_sequence_length=1536", "policy.generation.max_new_tokens=14", "grpo.max_rollout_turns=3",
    "grpo.invalid_tool_call_advantage=-5", "grpo.val_period=0",
    "grpo.async_grpo={enabled: true, max_trajectory_age_steps: 1}",
]  # fmt: skip


def weights(house: House, ref: str) -> dict[str, torch.Tensor]:
    """Tensors of a published model."""
    return load_file(house.registry.resolve(ref).path / "model.safetensors")


def set_model(vocab_size: int, first: dict[int, float], follows: dict[int, dict[int, float]]) -> NemotronH:
    """Draws a token by the one before it alone, with the probabilities of `follows`, or of `first`."""
    torch.manual_seed(0)
    config = NemotronHConfig(
        "ME*-", vocab_size=vocab_size, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        mamba_num_heads=2, mamba_head_dim=8, ssm_state_size=4, n_groups=1, chunk_size=16, n_routed_experts=4,
        moe_intermediate_size=8, moe_shared_expert_intermediate_size=8, intermediate_size=16,
    )  # fmt: skip
    model = NemotronH(config)
    with torch.no_grad():
        for coordinate, (token, probabilities) in enumerate([(None, first), *follows.items()]):
            tokens = [t for t in range(vocab_size) if t not in follows] if token is None else [token]
            # After the norm this coordinate is sqrt(hidden_size) = 4.
            model.backbone.embeddings.weight[tokens, coordinate] += 4.0
            model.lm_head.weight[:, coordinate] = -12 / 4
            for following, probability in probabilities.items():
                model.lm_head.weight[following, coordinate] = math.log(probability) / 4
    return model


def letter_model(vocab_size: int, letters: list[int], end: int) -> NemotronH:
    """Draws an option letter with probability .15 each or the end of the turn with .4, whatever it has read."""
    return set_model(vocab_size, dict.fromkeys(letters, 0.15) | {end: 0.4}, {})


def save_model(house: House, name: str, model: NemotronH, tokenizer: Tokenizer) -> None:
    folder = house.root / name
    save_tokenizer(tokenizer, folder, model_max_length=1024, template="nano3")
    model.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNSPEC_ARTIFACTS_ROOT", str(house.root / "artifacts"))
        Model(path=folder, num_steps=0, tokenizer_path=folder, chat_template="nano3").save(name)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """A registry with prompts, a model to start from, and the model of an uninterrupted run."""
    house = House(tmp_path_factory.mktemp("house"))
    tokenizer = train_tokenizer(["A B C D"], MIN_VOCAB_SIZE)
    end, *letters = (tokenizer.token_to_id(token) for token in ("<|im_end|>", *"ABCD"))
    save_model(house, "start", letter_model(tokenizer.get_vocab_size(), letters, end), tokenizer)
    house.run([STAGE / "data_prep.py", "--config", "tiny", "tasks.num_tasks=2000", "tasks.num_valid_tasks=500",
               "tasks.families=[math, multiple_choice, workplace_assistant, repository_repair]"], "prep")  # fmt: skip
    house.run(RL, "unbroken")
    assert sorted(house.registry.resolve(OUTPUT).record["metrics"]["families"]) == ["math", "multiple_choice"]
    return house


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("number", "exit_code", "steps", "resumes"),
    [
        pytest.param(signal.SIGKILL, -9, 5, True, id="kill"),
        pytest.param(signal.SIGKILL, -9, 1, False, id="kill before the first checkpoint"),
        pytest.param(signal.SIGTERM, 143, 4, True, id="term"),
    ],
)
def test_stopped_and_started_again_ends_with_the_same_weights(
    house: House, number: signal.Signals, exit_code: int, steps: int, resumes: bool, request: pytest.FixtureRequest
) -> None:
    versions, output = house.registry.versions(OUTPUT), request.node.callspec.id.replace(" ", "-")
    assert house.run_and_stop(RL, output, steps, number) == exit_code
    assert len(house.steps(output)) < STEPS
    assert house.registry.versions(OUTPUT) == versions  # nothing half-published
    said = house.run(RL, output)
    assert ("resumed at step" in said) == resumes
    assert house.digest(OUTPUT) == house.digest(f"{OUTPUT}:1")
    assert house.records(output) == house.records("unbroken")
    assert [record["step"] for record in house.steps(output)] == list(range(1, STEPS + 1))
    assert house.records(output, "rollouts.jsonl") == house.records("unbroken", "rollouts.jsonl")


STOPS = (("generation", 14, 9), ("reward", 18, 9), ("update", 4, 9), ("generation", 3, 15))


def stopped_in_every_phase(
    house: House,
    command: list[object],
    output: str,
    stops: Sequence[tuple[str, int, int]] = STOPS,
    name: str = OUTPUT,
) -> None:
    """The same command once more than there are stops, each in the midst of a phase; compares with the run before."""
    expected = house.digest(name)
    for phase, call, number in stops:
        process = house.start([Path(__file__).with_name("stop_in.py"), phase, call, number, *command], output)
        errors = process.communicate(timeout=200)[1]
        assert process.returncode == (-9 if number == 9 else 143), (phase, errors)
    assert "resumed at step" in house.run(command, output)
    assert house.digest(name) == expected


@pytest.mark.gpu
def test_generation_ahead_stopped_in_generation_reward_and_update(house: House) -> None:
    command = [*RL, AHEAD]
    house.run(command, "ahead")
    assert house.digest(OUTPUT) != house.digest(f"{OUTPUT}:1")
    steps = house.steps("ahead")
    assert [record["avg_trajectory_age"] for record in steps] == [0, 1, *[2] * (STEPS - 2)]
    assert all(record["token_mult_prob_error"] <= 1 + 1e-6 for record in steps)
    assert max(record["policy_lag"] for record in steps) > 1 + 1e-4
    stopped_in_every_phase(house, command, "ahead-stopped")
    assert house.records("ahead-stopped") == house.records("ahead")
    assert house.records("ahead-stopped", "rollouts.jsonl") == house.records("ahead", "rollouts.jsonl")


def test_generation_ahead_on_two_processes_stopped_and_started_again(house: House) -> None:
    command = [*TORCHRUN, *RL, AHEAD]
    house.run(command, "two-ahead")
    expected = house.digest(OUTPUT)
    assert house.run_and_stop(command, "two-ahead-stopped", 4, signal.SIGTERM) != 0
    assert "resumed at step" in house.run(command, "two-ahead-stopped")
    assert house.digest(OUTPUT) == expected
    assert house.records("two-ahead-stopped") == house.records("two-ahead")


@pytest.mark.cluster
def test_workers_of_a_ray_draw_what_one_process_draws(house: House) -> None:
    """Three calls a step, two for one worker; then without, since who draws changes nothing."""
    pytest.importorskip("ray", reason="Ray is not installed; `make test-cluster` does it")
    command = [*RL, "cluster.rollout_workers=2"]
    assert house.run_and_stop(command, "workers", 2, signal.SIGTERM) == 143
    assert "resumed at step" in house.run(command, "workers")
    assert house.digest(OUTPUT) == house.digest(f"{OUTPUT}:1")
    assert house.records("workers") == house.records("unbroken")
    assert house.records("workers", "rollouts.jsonl") == house.records("unbroken", "rollouts.jsonl")


def save_caller(house: House, name: str, call: str, family: str) -> None:
    """A model that answers with a letter or with `call`, whole or broken off, and a tokenizer for its prompts."""
    tokenizer = train_tokenizer(["A B C D", *[call] * 9, *prompt_texts(house, family)], 2 * MIN_VOCAB_SIZE)
    end, *letters = (tokenizer.token_to_id(token) for token in ("<|im_end|>", *"ABCD"))
    ids = tokenizer.encode(call, add_special_tokens=False).ids
    follows = {token: Counter(after for before, after in pairwise(ids) if before == token) for token in ids[:-1]}
    rates = {token: {t: n / counts.total() for t, n in counts.items()} for token, counts in follows.items()}
    first = dict.fromkeys(letters, 0.1) | {ids[0]: 0.4, end: 0.2}
    save_model(house, name, set_model(tokenizer.get_vocab_size(), first, rates), tokenizer)


@pytest.mark.gpu
def test_conversations_with_tools_stopped_in_generation_reward_and_update(house: House) -> None:
    save_caller(house, "caller", CALL, "workplace_assistant")
    house.run(TOOLS, "tools")
    steps = house.steps("tools")
    assert max(record["avg_turns_per_sample"] for record in steps) > 1
    assert sum(record["grad_norm"] > 0 for record in steps) > STEPS / 2
    stopped_in_every_phase(house, TOOLS, "tools-stopped")
    assert house.records("tools-stopped") == house.records("tools")
    assert house.records("tools-stopped", "rollouts.jsonl") == house.records("tools", "rollouts.jsonl")


@pytest.mark.gpu
def test_an_agent_in_the_sandbox_stopped_in_generation_reward_and_update(house: House) -> None:
    """Generation is ahead, as in Super's SWE 2; what runs the tests of a repository ends with the process."""
    if why_not := sandbox_failure("bubblewrap"):
        pytest.skip(why_not)
    save_caller(house, "agent", CALL.replace("=x", "=run"), "repository_repair")
    house.run(REPAIR, "agent")
    steps = house.steps("agent")
    assert max(record["avg_turns_per_sample"] for record in steps) > 1
    assert sum(record["grad_norm"] > 0 for record in steps) > STEPS / 2
    shown = {record["completion"] for record in house.records("agent", "rollouts.jsonl")}
    assert any("failed: assert" in text for text in shown)
    stopped_in_every_phase(house, REPAIR, "agent-stopped")
    assert house.records("agent-stopped") == house.records("agent")
    assert house.records("agent-stopped", "rollouts.jsonl") == house.records("agent", "rollouts.jsonl")


def prompt_texts(house: House, family: str) -> list[str]:
    """Prompts of the tasks of a family, as the model reads them."""
    lines = (house.registry.resolve("nano3-rl-data-tiny:1").path / "train.jsonl").read_text().splitlines()
    tasks = [Task.from_dict(json.loads(line)["task"]) for line in lines]
    return [prompt_text(task, "nano3", False) for task in tasks if task.family == family][:200]


def test_two_processes_stopped_and_started_again(house: House) -> None:
    """Rollouts and validation are dealt out over both; a signal to torchrun reaches them at different moments."""
    command = [*TORCHRUN, *RL]
    house.run(command, "two")
    expected = house.digest(OUTPUT)
    assert house.run_and_stop(command, "two-stopped", 4, signal.SIGTERM) != 0
    assert "resumed at step" in house.run(command, "two-stopped")
    assert house.digest(OUTPUT) == expected
    assert house.records("two-stopped") == house.records("two")
    assert house.records("two-stopped", "rollouts.jsonl") == house.records("two", "rollouts.jsonl")
    validations = [record["step"] for record in house.records("two") if "valid_sampled" in record]
    assert validations == [0, 4, 8, STEPS]


def test_the_run_learned_from_rewards_with_a_frozen_router_and_a_moving_bias(house: House) -> None:
    """Otherwise equal weights would prove little."""
    steps = house.steps("unbroken")
    assert sum(record["grad_norm"] > 0 for record in steps) > STEPS / 2
    assert 0 < sum(record["reward"] for record in steps) < STEPS
    before, after = weights(house, "start:1"), weights(house, f"{OUTPUT}:1")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"lm_head.weight", "backbone.embeddings.weight", "backbone.layers.0.mixer.in_proj.weight"} <= changed
    assert "backbone.layers.1.mixer.gate.weight" not in changed
    assert "backbone.layers.1.mixer.gate.e_score_correction_bias" in changed
    assert after["backbone.layers.1.mixer.gate.e_score_correction_bias"].abs().max() <= STEPS * 1e-3 + 1e-6
    validations = [record["step"] for record in house.records("unbroken") if "valid_sampled" in record]
    assert validations == [0, 4, 8, STEPS]


def test_another_seed_ends_with_other_weights(house: House) -> None:
    house.run([*RL, "seed=1"], "other-seed")
    assert house.digest(OUTPUT) != house.digest(f"{OUTPUT}:1")


def test_the_guide_explains_every_metric(house: House) -> None:
    guide = (REPOSITORY / "docs/guides/rl-metrics.md").read_text(encoding="utf-8")
    names = {name for record in house.records("unbroken") for name in record}
    names = {re.sub("^reward_.*", "reward_FAMILY", name) for name in names - {"step", "time"}}
    explained = set(re.findall(r"`(\w+)`", guide))
    explained |= {f"probs_ratio{kind}{end}" for kind in ("", "_clamped") for end in ("_min", "_max")}
    explained |= {f"{which}_seq_mult_prob_error" for which in ("max", "mean", "min")}
    assert {"token_mult_prob_error", "num_masked_seqs", "reward_FAMILY"} <= names
    assert names <= explained
