"""Plans of RL at the published size, whose generation has GPUs of its own or those of training."""

from __future__ import annotations

import copy
import tomllib
from dataclasses import replace
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemo_runspec.runspec import parse
from nemotron.kit.steps import RECIPES
from nemotron.recipes.tools.plan import JOB_HOURS, Options, find_step, flops_per_token, gpu_plan, page, plan
from nemotron.stack.planning.reading import read_training

SPEC = parse(RECIPES / "nano3/stage2_rl/rlvr.py")
# The layout of RLVR of Nemotron 3 Nano: 32 nodes, 128 x 16 sequences, TP2 PP2 CP4 EP8 (stage2_rl, NeMo-RL).
RLVR: dict[str, Any] = {
    "grpo": {"num_prompts_per_step": 128, "num_generations_per_prompt": 16, "max_num_steps": 100},
    "policy": {
        "precision": "bfloat16", "max_total_sequence_length": 49_152, "train_micro_batch_size": 1,
        "megatron_cfg": {
            "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 4,
            "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1, "sequence_parallel": True,
            "activation_checkpointing": True,
        },
        "generation": {"vllm_cfg": {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.5}},
    },
    "cluster": {"num_nodes": 32, "gpus_per_node": 8},
}  # fmt: skip


def planned(config: dict[str, Any], nodes: int | None = None, mean_tokens: int | None = None) -> dict[str, Any]:
    options = Options("nano3", "rlvr", None, [], None, nodes, 2.0, mean_tokens, False)
    return gpu_plan(read_training(config, "nano3"), "h100", SPEC, options)


def test_on_policy_all_gpus_do_both() -> None:
    numbers = planned(RLVR, mean_tokens=12_288)
    assert numbers["gpus"] == 256 and numbers["layout"] == "256 GPUs: TP2 PP2 CP4 EP8 DP16 SP"
    assert numbers["tokens_an_iteration"] == 128 * 16 * 12_288
    # 2,048 sequences of a quarter of the length are 512 rows: 32 for each of 16 replicas
    assert numbers["micro_batches"] == 32
    seconds = numbers["seconds"]
    assert numbers["iteration_seconds"] == pytest.approx(sum(seconds.values()))
    engine = numbers["engine"]
    assert engine["sequences"] == 2048 / (256 / 4)
    # 6 attention blocks with 2 x 2 x 128 values in bf16 a token; 31.578 B weights in bf16
    assert engine["kv_cache_bytes"] == pytest.approx(32 * 12_288 * 6 * 512 * 2 / 4)
    assert engine["weights_bytes"] == pytest.approx(2 * 31.578e9 / 4, rel=1e-4)
    assert numbers["cost"] == pytest.approx(2 * 256 * 100 * numbers["iteration_seconds"] / 3600)


def test_the_layout_shows_what_shares_the_experts_matrices() -> None:
    config = copy.deepcopy(RLVR)
    config["policy"]["megatron_cfg"]["expert_tensor_parallel_size"] = 2
    assert planned(config)["layout"] == "256 GPUs: TP2 PP2 CP4 EP8 ETP2 DP16 SP"


def test_off_policy_the_slower_half_decides() -> None:
    config = copy.deepcopy(RLVR)
    config["grpo"]["async_grpo"] = {"enabled": True, "max_trajectory_age_steps": 1}
    config["policy"]["generation"]["colocated"] = {"enabled": False, "resources": {"num_nodes": 16}}
    numbers = planned(config)
    assert numbers["gpus"] == 256 and numbers["layout"].startswith("128 GPUs:")
    assert numbers["generation_gpus"] == 128
    parts = numbers["seconds"]
    slower = max(parts["training"], parts["generation"])
    assert numbers["iteration_seconds"] == pytest.approx(slower + parts["all else"])
    assert numbers["engine"]["sequences"] == 2048 / (128 / 4)
    with pytest.raises(UserError, match="128 GPUs generate, and there are 128 in all"):
        planned(config, nodes=16)


def test_gpus_of_judges_are_paid_for() -> None:
    config = copy.deepcopy(RLVR)
    config["env"] = {"nemo_gym": {"num_gpu_nodes": 4}}
    numbers, without = planned(config), planned(RLVR)
    assert numbers["iteration_seconds"] == without["iteration_seconds"]
    assert numbers["cost"] == pytest.approx(2 * (256 + 32) * 100 * numbers["iteration_seconds"] / 3600)
    named = {"family": "nano3", "stage": "rlhf", "config": "default"}
    assert "\nand 32 GPUs of judges\n" in page(numbers | named, 2.0)
    assert "judges" not in page(without | named, 2.0)


def test_the_page_says_what_the_config_leaves_open() -> None:
    config = copy.deepcopy(RLVR)
    config["grpo"]["max_num_steps"] = 1_000_000
    numbers = planned(config) | {"family": "nano3", "stage": "rlvr", "config": "default"}
    text = page(numbers, None)
    assert "the config leaves open how many" in text and "hours" not in text
    assert "room for" in text and "KV cache" in text


@pytest.mark.parametrize(
    ("family", "stage", "name"),
    [("nano3", "pretrain", "pretrain"), ("super3", "pretrain", "pretrain-phase1"), ("nano3", "rlvr", "rl"),
     ("super3", "mtp-healing", "mtp-healing"), ("super3", "rlvr2", "rlvr2")],
)  # fmt: skip
def test_a_stage_is_a_step_or_the_last_word_of_its_command(family: str, stage: str, name: str) -> None:
    assert find_step(family, stage).name == name


def test_a_step_without_a_config_of_the_published_size_is_not_planned_as_another() -> None:
    with pytest.raises(UserError, match="no config was chosen, and sft-budget has none") as error:
        plan(Options("super3", "sft-budget", None, [], None, None, None, None, False))
    assert error.value.hint == "choose one with -c NAME: smoke-budget, tiny-budget"


def test_a_plan_of_the_cpu_takes_nothing_that_is_of_gpus() -> None:
    with pytest.raises(UserError, match="--nodes is for plans of GPUs"):
        plan(Options("nano3", "pretrain", "tiny", [], "cpu", 4, None, None, False))


def test_quantisation_aware_distillation_counts_the_model_twice() -> None:
    """Super 3 on 128 GPUs, TP4 EP64 (config/qad/default.yaml): the teacher's weights are as many as the student's."""
    numbers = plan(Options("super3", "qad", None, [], "h100", None, None, None, False))
    memory, seconds = numbers["memory_bytes"], numbers["seconds"]
    experts, hidden = 40 * 512 * 2 * 1024 * 2688, 4096  # of 40 blocks, each in the latent width
    whole = 40 * hidden * (512 + 2 * 1024) + 89 * hidden  # router, latent projections, norms
    sharded = experts / 64 + (120.669e9 - experts - whole) / 4 + whole
    assert memory["teacher"] == pytest.approx(2 * sharded, rel=1e-4)
    assert memory["teacher"] == memory["weights"] and memory["logits"] == 131_072 / 16 * 131_072 / 4 * 36
    assert numbers["memory_total_bytes"] < numbers["memory_usable_bytes"]
    assert numbers["iteration_seconds"] == pytest.approx(sum(seconds.values()))
    assert 2 / 3 < 3 * seconds["teacher"] / sum(seconds[part] for part in seconds if part != "teacher") < 4 / 3


def test_a_model_that_teaches_itself_adds_a_third_of_its_flops() -> None:
    layout = read_training(RLVR, "nano3").layout  # without multi-token prediction, which a teacher does not do
    assert flops_per_token(replace(layout, teacher=layout.model)) == pytest.approx(4 / 3 * flops_per_token(layout))


def test_a_pruned_model_learns_from_the_large_one() -> None:
    numbers = plan(Options("nano2", "distil", "9b", [], "h100", None, None, None, False))
    memory = numbers["memory_bytes"]
    assert memory["teacher"] == pytest.approx(2 * 12.310e9 / 4, rel=1e-3)  # TP4
    assert memory["weights"] == pytest.approx(2 * 8.888e9 / 4, rel=1e-3)


def test_phase_1_keeps_what_the_longest_merge_needs() -> None:
    """Windows of up to 500 B tokens are merged (arXiv 2604.12374, section 2): intervals, and their ends."""
    numbers = plan(Options("super3", "pretrain", None, [], None, None, None, None, False))
    interval = numbers["save_interval"] * numbers["tokens_an_iteration"]
    assert (numbers["checkpoints_kept"] - 2) * interval < 500e9 <= (numbers["checkpoints_kept"] - 1) * interval
    # of 120.669 B parameters and an MTP block: attention; router, experts, shared expert, latent; projection
    mtp = 4096 * 128 * (2 * 32 + 2 * 2) + 512 * (4096 + 2 * 1024 * 2688) + 2 * 4096 * (5376 + 1024) + 2 * 4096**2
    assert numbers["checkpoint_bytes"] == pytest.approx(14 * (120.669e9 + mtp), rel=1e-4)
    jobs = -(-794_729 * numbers["iteration_seconds"] // (4 * 3600))
    assert f" days, {jobs:,.0f} jobs of 4 h\n" in page(numbers, None)
    example = tomllib.loads((RECIPES.parents[2] / "env.example.toml").read_text(encoding="utf-8"))
    assert example["dgx"]["time"] == f"{JOB_HOURS:02}:00:00"
    assert "\ncheckpoint  1.73 TB  11 of 398 are kept: 19.04 TB\n" in page(numbers, None)  # the last one at the end


def test_how_many_checkpoints_of_rl_are_kept() -> None:
    bounded, ended = copy.deepcopy(RLVR), copy.deepcopy(RLVR)
    # the best two, and the newest: remove_old_checkpoints of NeMo-RL
    bounded["checkpointing"] = {"save_period": 30, "keep_top_k": 2, "metric_name": "val:total_reward/mean"}
    newest = copy.deepcopy(bounded)
    newest["checkpointing"] |= {"keep_top_k": 3, "metric_name": None}
    ended["checkpointing"] = {"save_period": 30, "keep_top_k": 1_000_000}
    opened = copy.deepcopy(ended)
    opened["grpo"]["max_num_steps"] = 1_000_000
    named = {"family": "nano3", "stage": "rlvr", "config": "default"}
    for config, note in (
        (bounded, "3 of 4 are kept: 1.33 TB"), (newest, "3 of 4 are kept: 1.33 TB"),
        (ended, "4 of 4 are kept: 1.77 TB"), (opened, "one in 30 iterations, and all are kept"),
    ):  # fmt: skip
        assert f"checkpoint  0.44 TB  {note}\n" in page(planned(config) | named, 2.0)
    opened["checkpointing"]["keep_top_k"] = 100
    assert "up to 100 are kept: 44.21 TB" in page(planned(opened) | named, None)


def test_super_on_hopper_wants_both_keys_that_the_hint_names() -> None:
    """phase1 has NVFP4, and MXFP8 for Mamba's out_proj: Hopper has neither."""

    def on_h100(*keys: str) -> dict[str, Any]:
        return plan(Options("super3", "pretrain", None, list(keys), "h100", 64, None, None, False))

    with pytest.raises(UserError, match="h100 has no nvfp4") as error:
        on_h100()
    keys = str(error.value.hint).rpartition(": ")[2].split()
    with pytest.raises(UserError, match="h100 has no mxfp8"):
        on_h100(keys[0])
    assert on_h100(*keys)["precision"] == "bf16"


def test_a_phase_that_would_end_before_it_begins() -> None:
    keys = ["train.train_iters=900000", "train.train_tokens=22_649_241_600_000"]  # x 3,072 x 8,192
    with pytest.raises(UserError, match="900,000 ends before this phase begins, at iteration 933,806"):
        plan(Options("nano3", "pretrain", "phase2", keys, None, None, None, None, False))


@pytest.mark.parametrize("stage", ["pretrain", "dpo"])
def test_a_training_that_generates_nothing_takes_no_mean_of_tokens(stage: str) -> None:
    with pytest.raises(UserError, match="--mean-tokens is of generation"):
        plan(Options("nano3", stage, None, [], None, None, None, 4096, False))


@pytest.mark.parametrize("config", ["lora", "tiny-lora"])
def test_adapters_are_refused_before_their_data_is_looked_for(config: str) -> None:
    with pytest.raises(UserError, match="no plan for adapters"):
        plan(Options("nano3", "sft", config, [], None, None, None, None, False))


@pytest.mark.parametrize(("family", "stage"), [("lightning35", "data-pretrain"), ("nano2", "prune")])
def test_a_step_that_trains_nothing_is_no_stage(family: str, stage: str) -> None:
    with pytest.raises(UserError, match=f"{family} has no stage '{stage}'"):
        find_step(family, stage)
