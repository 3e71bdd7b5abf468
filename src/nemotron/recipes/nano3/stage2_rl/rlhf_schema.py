"""Every knob of `rlhf.py`; `rl.py` of nemotron.kit.schemas has those that RL scripts share.

"tech report": of Nemotron 3 Nano, arXiv 2512.20848, section 3.3; "recipe of Super 3": the public one, Nano 3 has none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from nemo_runspec.config.inputs import FieldOfArtifact
from nemotron.kit.schemas import rl
from nemotron.kit.schemas.evaluation import EvaluationConfig
from nemotron.kit.schemas.group import MODEL, RL_PROMPTS, ModelRunConfig
from nemotron.recipes.nano3.stage2_rl.schema import JudgedConfig


class GRPOConfig(rl.GRPOConfig):
    """GRPO on rewards by a judge."""

    max_error_rate: float = Field(
        0.05, ge=0, le=1, description="share of comparisons without a verdict in a step before the run stops"
    )


class LossConfig(rl.LossConfig):
    """The clipped policy gradient of RLVR, held to the initial policy."""

    reference_policy_kl_penalty: float = Field(
        1e-4, ge=0, description="weight of the KL to the initial policy (recipe of Super 3)"
    )


class JudgeConfig(rl.JudgeConfig):
    """Who judges, and how."""

    model_path: Annotated[Path, FieldOfArtifact("path", input="judge")] = Field(
        description="the judge: takes what `run.judge` takes, and is then that"
    )
    test_model_path: Annotated[Path | None, FieldOfArtifact("path", input="test_judge")] = Field(
        None, description="a second judge, which gives no reward: how often is the model after preferred to before?"
    )


class RunConfig(ModelRunConfig):
    """Identity, artifacts read and written."""

    model: Annotated[str, MODEL] = Field(description="model to train: name, name:version, directory or hf://ORG/NAME")
    judge: Annotated[str, MODEL] = Field(description="model that compares, as `nemotron nano3 rl genrm` trains it")
    test_judge: Annotated[str | None, MODEL] = Field(None, description="a judge of another seed, for measuring")
    data: Annotated[str, RL_PROMPTS] = Field(description="what to train on: RLPrompts, as name or name:version")


class RLHFConfig(JudgedConfig):
    """`nemotron nano3 rl rlhf`."""

    run: RunConfig
    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    loss_fn: LossConfig = Field(default_factory=LossConfig)
    reward: rl.GenRMRewardConfig = Field(default_factory=rl.GenRMRewardConfig)
    judge: JudgeConfig
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)

    @model_validator(mode="after")
    def _has_samples_to_compare(self) -> RLHFConfig:
        if self.evaluation.tasks_per_family and not self.evaluation.samples:
            raise ValueError(
                "evaluation.samples is 0: a judge compares samples; 1 or more, or evaluation.tasks_per_family=0"
            )
        return self
