"""Configs of the training scripts: they validate, keep the published proportions, and the defaults are Nano 3's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from pydantic import ValidationError

from nemo_runspec.config.loader import load_config
from nemotron.kit.schemas.difficulty import RLVR_FAMILIES
from nemotron.kit.schemas.rl import GenRMRewardConfig
from nemotron.recipes.nano3.stage0_pretrain.schema import ModelConfig, PretrainConfig
from nemotron.recipes.nano3.stage1_sft.schema import SFTConfig
from nemotron.recipes.nano3.stage2_rl.genrm_schema import GenRMConfig, GRPOConfig, JudgeTrainingConfig
from nemotron.recipes.nano3.stage2_rl.rlhf_schema import LossConfig, RLHFConfig
from nemotron.recipes.nano3.stage2_rl.schema import EnvConfig
from nemotron.stack.models import NemotronH
from nemotron.stack.models.published.config_json import config_from_dict

NANO3 = Path(__file__).resolve().parents[4] / "src" / "nemotron" / "recipes" / "nano3"


def read(stage: str, name: str) -> dict[str, Any]:
    """A config file as plain values, with the artifact look-ups replaced by a path."""
    text = (NANO3 / stage / "config" / f"{name}.yaml").read_text()
    values = OmegaConf.to_container(
        OmegaConf.create(text.replace("${art:data,path}", "x").replace("${art:model,path}", "x"))
    )
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_pretrain_configs_keep_the_published_schedule(name: str) -> None:
    cfg = PretrainConfig.model_validate(read("stage0_pretrain", name))
    assert cfg.scheduler.lr_decay_style == "WSD"
    assert cfg.scheduler.lr_wsd_decay_iters == 0.2 * cfg.train.train_iters  # tech report: the last 20 %
    assert cfg.optimizer.min_lr == pytest.approx(0.01 * cfg.optimizer.lr)  # 1e-3 -> 1e-5
    assert (cfg.optimizer.adam_beta1, cfg.optimizer.adam_beta2) == (0.9, 0.95)
    assert (cfg.optimizer.weight_decay, cfg.optimizer.clip_grad) == (0.1, 1.0)
    config_from_dict(cfg.model.model_dump())


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_sft_configs_validate(name: str) -> None:
    cfg = SFTConfig.model_validate(read("stage1_sft", name))
    assert cfg.train.early_stop_patience > 0
    assert cfg.run.output == f"nano3-sft-model-{name}" and cfg.run.results == f"nano3-sft-results-{name}"


def test_default_architecture_is_the_published_one() -> None:
    config = config_from_dict(ModelConfig().model_dump())
    pattern = config.hybrid_override_pattern
    assert [pattern.count(symbol) for symbol in "ME*-"] == [23, 23, 6, 0]
    with torch.device("meta"):
        total, _ = NemotronH(config).num_parameters()
    assert total / 1e9 == pytest.approx(31.578, abs=0.001)


@pytest.mark.parametrize(
    ("group", "key", "value", "message"),
    [
        ("scheduler", "lr_warmup_iters", 10_000, "exceed train.train_iters"),
        ("optimizer", "min_lr", 1.0, "exceeds optimizer.lr"),
        ("model", "n_groups", 3, "multiple of n_groups"),
        ("model", "num_experts_per_tok", 99, "exceeds n_routed_experts"),
        ("model", "hybrid_override_pattern", "MEX", "pattern"),
        ("train", "train_iter", 5, "Extra inputs"),
        ("model", "mtp_num_layers", 300, "nothing that far ahead"),
    ],
)
def test_bad_values_are_refused(group: str, key: str, value: object, message: str) -> None:
    values = read("stage0_pretrain", "tiny")
    values["model"]["num_nextn_predict_layers"] = 1
    values[group][key] = value
    with pytest.raises(ValidationError, match=message):
        PretrainConfig.model_validate(values)


def test_fp8_trains_blocks_without_experts_in_pretraining_only() -> None:
    values = read("stage0_pretrain", "tiny")
    values["mixed_precision"] = "bf16_with_fp8_subchannel_scaling_mixed"
    with pytest.raises(ValidationError, match="not for experts"):
        PretrainConfig.model_validate(values)
    values["model"]["hybrid_override_pattern"] = "M-M*-M-M"
    with pytest.raises(ValidationError, match="leave none of the 8 blocks for FP8"):  # 4 and 4, the published default
        PretrainConfig.model_validate(values)
    values["model"]["num_layers_at_end_in_bf16"] = 3
    PretrainConfig.model_validate(values)
    with pytest.raises(ValidationError, match="mixed_precision"):
        SFTConfig.model_validate(read("stage1_sft", "tiny") | {"mixed_precision": values["mixed_precision"]})


def test_nvfp4_trains_super_3s_layers_in_pretraining_only() -> None:
    values = read("stage0_pretrain", "tiny") | {"mixed_precision": "bf16_with_nvfp4_mixed"}
    recipe = PretrainConfig.model_validate(values).model.quant_recipe
    assert (recipe.out_proj, recipe.experts, recipe.qkv_proj) == ("mxfp8", "nvfp4", "bf16")
    values["model"]["quant_recipe"] = {"out_proj": "nvfp4"}
    assert PretrainConfig.model_validate(values).model.quant_recipe == recipe.model_copy(update={"out_proj": "nvfp4"})
    values["model"]["num_layers_at_end_in_bf16"] = 7
    with pytest.raises(ValidationError, match="leave none of the 7 blocks for NVFP4"):
        PretrainConfig.model_validate(values)
    with pytest.raises(ValidationError, match="mixed_precision"):
        SFTConfig.model_validate(read("stage1_sft", "tiny") | {"mixed_precision": values["mixed_precision"]})


def test_sft_says_what_to_lower_with_the_iterations() -> None:
    values = read("stage1_sft", "tiny")
    values["train"]["train_iters"] = 1
    with pytest.raises(ValidationError, match=r"exceed train\.train_iters 1: lower those, too"):
        SFTConfig.model_validate(values)


@pytest.mark.parametrize(("schema", "name"), [(GenRMConfig, "genrm/tiny"), (RLHFConfig, "rlhf/tiny")])
def test_tasks_of_several_turns_are_not_compared(schema: Any, name: str) -> None:
    values = read("stage2_rl", name)
    del values["run"]["processes"]  # known to every config without being declared
    schema.model_validate(values)
    with pytest.raises(ValidationError, match="workplace_assistant has several turns"):
        schema.model_validate({**values, "env": {"families": {"math": 1, "workplace_assistant": 1}}})


def test_rlhf_without_samples_has_nothing_to_compare() -> None:
    values = read("stage2_rl", "rlhf/tiny")
    del values["run"]["processes"]
    values["evaluation"] = {**values["evaluation"], "samples": 0}
    with pytest.raises(ValidationError, match=r"evaluation\.samples is 0: a judge compares samples"):
        RLHFConfig.model_validate(values)
    values["evaluation"]["tasks_per_family"] = 0
    RLHFConfig.model_validate(values)


@pytest.mark.parametrize("name", ["tiny", "small", "tiny-final", "curriculum"])
def test_families_on_the_command_line_of_rlvr_are_all_that_it_draws(name: str) -> None:
    folder = NANO3 / "stage2_rl" / "config"
    assert load_config(folder, name, ("env.families={math: 2}",)).data["env"]["families"] == {"math": 2}
    env = EnvConfig.model_validate(load_config(folder, name, ()).data.get("env", {}))
    assert list(env.families) == list(RLVR_FAMILIES)


def test_defaults_of_the_judge_and_of_rlhf_are_the_published_ones() -> None:
    judge, reward, grpo = JudgeTrainingConfig(), GenRMRewardConfig(), GRPOConfig()
    assert (judge.format_penalty, judge.ranking_weight) == (10, 1)
    assert (grpo.num_prompts_per_step, grpo.num_generations_per_prompt) == (128, 8)
    assert (reward.reasoning_bonus, reward.answer_bonus, reward.top_percentile) == (0.5, 0.5, 0.2)
    assert reward.group_reasoning_length_penalty_coeff == reward.group_answer_length_penalty_coeff == 0.5
    assert (LossConfig().reference_policy_kl_penalty, LossConfig().reference_policy_kl_type) == (1e-4, "k3")
