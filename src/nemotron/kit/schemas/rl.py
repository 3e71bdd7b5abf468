"""Keys of reinforcement learning that its stages share. Names are NeMo-RL's."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas.group import Group


class ClippedPGLossConfig(Group):
    """The clipped policy gradient (`nemotron.stack.rl.losses`), a mean over tokens."""

    ratio_clip_min: float = Field(0.2, ge=0, le=1, description="lower clip: ratio at least 1 - this")
    ratio_clip_max: float = Field(0.2, ge=0, description="upper clip: ratio at most 1 + this")
    force_on_policy_ratio: bool = Field(
        False, description="the ratio is 1 by definition, with its gradient: right with one update a batch"
    )
    use_importance_sampling_correction: bool = Field(
        False, description="weight tokens by the probability of the trainer over that of the generator"
    )
    truncated_importance_sampling_type: Literal["tis", "icepop"] | None = Field(
        None, description="what becomes of a weight out of bounds: tis clamps it, icepop sets it to 0; null: nothing"
    )
    truncated_importance_sampling_ratio: float | None = Field(None, gt=0, description="largest weight in bounds")
    truncated_importance_sampling_ratio_min: float | None = Field(
        None, ge=0, description="smallest weight in bounds; null, with tis only: none"
    )
    reference_policy_kl_penalty: float = Field(0.0, ge=0, description="weight of the KL to the initial policy")
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of the KL")
    use_on_policy_kl_approximation: bool = Field(
        False, description="weight the KL by the policy over the generator, with its gradient; else by 1, likewise"
    )
    kl_input_clamp_value: float | None = Field(
        20.0, gt=0, description="largest difference of two log-probabilities in the KL, nats; null: any"
    )
    kl_output_clamp_value: float | None = Field(10.0, gt=0, description="largest KL of a token, nats; null: any")

    @model_validator(mode="after")
    def _bounds_of_the_correction(self) -> Self:
        kind, prefix = self.truncated_importance_sampling_type, "truncated_importance_sampling_"
        low, high = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        if kind and not self.use_importance_sampling_correction:
            raise ValueError(f"{prefix}type {kind} needs use_importance_sampling_correction: true")
        if kind is None and (low is not None or high is not None):
            raise ValueError(f"{prefix}ratio and {prefix}ratio_min need a {prefix}type: tis or icepop")
        if kind and high is None:
            raise ValueError(f"{prefix}type {kind} needs {prefix}ratio")
        if kind == "icepop" and low is None:
            raise ValueError(f"{prefix}type icepop needs {prefix}ratio_min")
        if low is not None and high is not None and low >= high:
            raise ValueError(f"{prefix}ratio_min {low} must be below {prefix}ratio {high}")
        return self


class EffortConfig(Group):
    """Reward for short responses to prompts that ask for low effort (`nemotron.stack.rl.shaping`)."""

    low_string: str = Field(min_length=1, description="what such a prompt holds (Super 3: {reasoning effort: low})")
    low_weight: float = Field(gt=0, description="largest share of the reward that is added (Super 3: 0.2)")
    low_penalty: float = Field(ge=0, description="factor of what is subtracted above low_ub (Super 3: 1)")
    low_ub: int = Field(ge=1, description="tokens at which nothing is added or subtracted (Super 3: 3000)")


class DPOLossConfig(Group):
    """DPO with a likelihood term (`nemotron.stack.rl.preferences`); defaults are those of Nemotron 3 Nano."""

    reference_policy_kl_penalty: float = Field(0.05, gt=0, description="beta: there is no KL term beside it")
    preference_loss_weight: float = Field(1.0, ge=0, description="weight of the preference")
    sft_loss_weight: float = Field(0.2, ge=0, description="weight of the chosen answer's negative log-likelihood")


class GenRMRewardConfig(Group):
    """What a group of responses earns by the verdicts of a judge (`nemotron.stack.rl.genrm`). Names are NeMo Gym's."""

    reasoning_bonus: float = Field(
        0.5, ge=0, description="for the shortest reasoning, where its score is among the best (tech report 3.3)"
    )
    answer_bonus: float = Field(0.5, ge=0, description="likewise, for the shortest answer (tech report 3.3)")
    top_percentile: float = Field(0.2, ge=0, le=1, description="share of a group that are the best (tech report 3.3)")
    group_reasoning_length_penalty_coeff: float = Field(
        0.5, ge=0, description="weight of the length of the reasoning, relative to the group (tech report 3.3)"
    )
    group_answer_length_penalty_coeff: float = Field(
        0.5, ge=0, description="weight of the length of the answer, relative to the group (tech report 3.3)"
    )
    group_style_penalty_coeff: float = Field(
        0.0, ge=0, description="weight of headers, lists, bold and emoji in the answer (Super 3: 0.05)"
    )
