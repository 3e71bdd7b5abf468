"""Configs of super3's reinforcement learning: stages in the published order, with the published settings of each."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import nemotron.recipes.super3 as recipe
from nemo_runspec.config.loader import load_config
from nemotron.data_prep.rl.placeholders import PUBLISHED
from nemotron.kit import chat
from nemotron.kit.commands import command_for
from nemotron.kit.schemas.difficulty import RLVR_FAMILIES
from nemotron.recipes.nano3.stage2_rl.blend_schema import BlendConfig
from nemotron.recipes.nano3.stage2_rl.data_prep import _with_effort
from nemotron.recipes.nano3.stage2_rl.data_schema import RLDataConfig
from nemotron.recipes.nano3.stage2_rl.genrm_schema import GenRMConfig
from nemotron.recipes.nano3.stage2_rl.rlhf_schema import RLHFConfig
from nemotron.recipes.nano3.stage2_rl.schema import RLConfig
from nemotron.stack.environments import generate_tasks, verify

CONFIGS = Path(recipe.__file__).parent / "stage2_rl" / "config"
RLVR, SWE = ("rlvr1", "rlvr2", "rlvr3"), ("swe1", "swe2")


def read(folder: Path, name: str) -> dict[str, Any]:
    """A config as plain values, without what every run group has, and with paths in the place of artifacts."""
    text = OmegaConf.to_yaml(OmegaConf.create(load_config(folder, name, ()).data))
    for artifact in ("model", "data", "judge"):
        text = text.replace(f"${{art:{artifact},path}}", "x")
    values = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(values, dict)
    for key in ("script", "family", "processes"):
        values["run"].pop(key, None)
    return {str(key): value for key, value in values.items()}


@pytest.mark.parametrize("size", ["tiny", "smoke"])
def test_each_stage_goes_on_from_the_one_before(size: str) -> None:
    stages = [RLConfig.model_validate(read(CONFIGS, f"{size}-{stage}")) for stage in (*RLVR, *SWE)]
    assert stages[0].run.model == f"super3-sft-model-{size}-budget"
    for before, after in pairwise(stages):
        assert after.run.model == before.run.output
    rlhf = RLHFConfig.model_validate(read(CONFIGS / "rlhf", size))
    genrm = GenRMConfig.model_validate(read(CONFIGS / "genrm", size))
    assert (rlhf.run.model, rlhf.run.judge) == (stages[-1].run.output, genrm.run.output)
    data = RLDataConfig.model_validate(read(CONFIGS / "data_prep", size))
    assert data.run.output == f"super3-rl-data-{size}" == stages[0].run.data
    assert set(data.tasks.families) == {*RLVR_FAMILIES, "repository_repair", "tool_comparison"}
    if size == "tiny":
        assert len({stage.seed for stage in stages}) == len(stages)  # no two see the same prompts


@pytest.mark.parametrize("stage", [*RLVR, *SWE, "rlvr1-mtp"])
def test_published_settings(stage: str) -> None:
    """The public recipe's, as far as they do not go with size."""
    cfg = RLConfig.model_validate(read(CONFIGS, f"tiny-{stage}"))
    clip = 100 if stage in SWE else 50
    assert (cfg.grpo.advantage_clip_low, cfg.grpo.advantage_clip_high) == (-clip, clip)
    assert cfg.grpo.overlong_filtering == (stage in SWE)
    assert cfg.grpo.invalid_tool_call_advantage == cfg.grpo.malformed_thinking_advantage == -5
    assert cfg.grpo.seq_logprob_error_threshold == 2
    assert (cfg.grpo.async_grpo.enabled, cfg.grpo.async_grpo.max_trajectory_age_steps) == (True, 1)
    loss = cfg.loss_fn
    assert (loss.ratio_clip_min, loss.ratio_clip_max, loss.force_on_policy_ratio) == (0.2, 0.28, True)
    assert (loss.truncated_importance_sampling_type, loss.truncated_importance_sampling_ratio) == ("tis", 5)
    assert loss.reference_policy_kl_penalty == 0
    assert cfg.policy.mtp_num_layers == (2 if stage.endswith("mtp") else 0)
    assert (cfg.policy.mtp_detach_heads, cfg.policy.mtp_loss_scaling_factor) == (True, 0.3)
    families = {"swe1": ["tool_comparison"], "swe2": ["repository_repair"]}.get(stage, list(RLVR_FAMILIES))
    assert list(cfg.env.families) == families
    if stage in SWE:
        assert cfg.env.effort_levels is None
    else:
        effort = cfg.env.effort_levels
        assert effort is not None
        assert (effort.low_string, effort.low_weight, effort.low_penalty) == ("{reasoning effort: low}", 0.2, 1)


def test_published_settings_of_rlhf() -> None:
    cfg = RLHFConfig.model_validate(read(CONFIGS / "rlhf", "tiny"))
    reward = cfg.reward
    assert cfg.loss_fn.reference_policy_kl_penalty == 1e-4 and cfg.loss_fn.reference_policy_kl_type == "k3"
    assert reward.group_reasoning_length_penalty_coeff == 0.3 and reward.group_answer_length_penalty_coeff == 0.35
    assert (reward.group_style_penalty_coeff, reward.top_percentile) == (0.05, 0.2)
    assert reward.reasoning_bonus == reward.answer_bonus == 0.5
    assert (cfg.grpo.advantage_clip_low, cfg.grpo.advantage_clip_high) == (-50, 50)
    assert (cfg.judge.temperature, cfg.judge.top_p) == (0.6, 0.95)


def test_a_prompt_of_low_effort_ends_as_the_template_writes_it() -> None:
    effort = RLDataConfig.model_validate(read(CONFIGS / "data_prep", "tiny")).tasks.low_effort
    asked = chat.render([{"role": "user", "content": "2+2?"}], low_effort=True, template="super3")
    written = chat.render([{"role": "user", "content": f"2+2?\n\n{effort.text}"}], template="super3")
    assert asked == written
    cfg = RLConfig.model_validate(read(CONFIGS, "tiny-rlvr1"))
    assert cfg.env.effort_levels is not None and cfg.env.effort_levels.low_string == effort.text


def test_a_share_of_the_prompts_asks_for_low_effort_and_stays_the_same_task() -> None:
    cfg = RLDataConfig.model_validate(read(CONFIGS / "data_prep", "tiny"))
    asking = {}
    for family in ("math", "instruction_following", "tool_comparison"):
        tasks = generate_tasks(family, "train", 2000, distinct=True)
        prompts = [_with_effort(cfg, task) for task in tasks]
        assert [task.canonical for task in prompts] == [task.canonical for task in tasks]
        assert all(verify(task, task.solution.answer).status == "score" for task in prompts[:50])
        asking[family] = sum(task.prompt.endswith("\n\n{reasoning effort: low}") for task in prompts)
        assert asking[family] == sum(after != before for before, after in zip(tasks, prompts, strict=True))
    assert 70 < asking["math"] < 130  # 5 % of 2,000, within three standard deviations
    assert asking["instruction_following"] == asking["tool_comparison"] == 0


@pytest.mark.parametrize("stage", [*RLVR, *SWE, "rlhf"])
def test_every_published_stage_has_the_published_prompts(stage: str) -> None:
    """nvidia/Nemotron-RL-Super-Training-Blends has a file of that name for each; the last 100 rows are held out."""
    blend = BlendConfig.model_validate(read(CONFIGS / "data_prep", stage))
    assert blend.paths == [f"hf://datasets/nvidia/Nemotron-RL-Super-Training-Blends/{stage}.jsonl"]
    assert blend.valid_rows == 100 and set(blend.references) <= set(PUBLISHED)
    trained = read(CONFIGS / "rlhf", "default") if stage == "rlhf" else read(CONFIGS, stage)
    assert blend.run.output == trained["run"]["data"]
    assert command_for(trained["run"]["data"]) == f"nemotron super3 data prep rl -c {stage}"
