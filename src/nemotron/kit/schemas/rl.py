"""Keys of reinforcement learning that its stages share. Names are NeMo-RL's.

Defaults of GRPO are those of the published Nemotron 3 Nano where it states one ("tech report": arXiv 2512.20848,
section 3.2; "recipe": the public GRPO recipe).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas.group import Group, ModelPath
from nemotron.kit.schemas.optimizer import AdamWConfig


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


class GRPOConfig(Group):
    """The algorithm: how many prompts and completions, and how rewards become advantages."""

    max_num_steps: int = Field(1_000, ge=1, description="GRPO steps: one batch of rollouts and one update each")
    num_prompts_per_step: int = Field(128, ge=1, description="prompts a step, over all ranks (tech report 3.2)")
    num_generations_per_prompt: int = Field(16, ge=2, description="completions of each prompt (tech report 3.2)")
    use_leave_one_out_baseline: bool = Field(
        True, description="compare with the other completions of the prompt; false: with all of them (recipe: true)"
    )
    normalize_rewards: bool = Field(True, description="divide advantages by the standard deviation of those (recipe)")
    advantage_clip_low: float | None = Field(
        None, lt=0, description="smallest advantage; null: any (Super 3 recipe: -50; Nano 3: none)"
    )
    advantage_clip_high: float | None = Field(None, gt=0, description="largest advantage; null: any (Super 3: 50)")
    invalid_tool_call_advantage: float | None = Field(
        None, description="advantage of a response with a malformed tool call, in place of its own (Super 3 recipe: -5)"
    )
    malformed_thinking_advantage: float | None = Field(
        None, description="advantage of a response with a stray <think> or </think> (Super 3 recipe: -5)"
    )
    seq_logprob_error_threshold: float | None = Field(
        2.0, gt=1, description="leave out completions for which trainer and generator differ by more than this factor, "
        "mean over tokens; null: none (NeMo-RL's Nano 3 recipe: 2)",
    )  # fmt: skip
    overlong_filtering: bool = Field(
        True, description="leave completions that hit the length limit out of the loss (tech report; the recipe: false)"
    )
    max_error_rate: float = Field(
        0.01, ge=0, le=1, description="share of rollouts whose verification may fail in a step before the run stops"
    )


class LossConfig(ClippedPGLossConfig):
    """Clipped policy gradient with masked importance sampling (tech report 3.2); clips and KL are the recipe's."""

    ratio_clip_max: float = Field(0.28, ge=0, description="upper clip: ratio at most 1 + this (recipe)")
    force_on_policy_ratio: bool = Field(
        True, description="the ratio is 1 by definition, with its gradient: right with one update a batch"
    )
    use_importance_sampling_correction: bool = Field(
        True, description="weight tokens by the probability of the trainer over that of the generator (recipe)"
    )
    truncated_importance_sampling_type: Literal["tis", "icepop"] | None = Field(
        "icepop",
        description="what becomes of a weight out of bounds: tis clamps it, icepop sets it to 0; null: nothing",
    )
    truncated_importance_sampling_ratio: float | None = Field(
        5.0, gt=0, description="largest weight in bounds (NeMo-RL's example for icepop)"
    )
    truncated_importance_sampling_ratio_min: float | None = Field(
        0.5, ge=0, description="smallest weight in bounds (NeMo-RL's example for icepop); null, with tis only: none"
    )
    use_on_policy_kl_approximation: bool = Field(
        True, description="weight the KL by the policy over the generator, with its gradient; else by 1, likewise"
    )
    kl_input_clamp_value: float | None = Field(
        None, gt=0, description="largest difference of two log-probabilities in the KL, nats; null: any (recipe)"
    )
    kl_output_clamp_value: float | None = Field(
        None, gt=0, description="largest KL of a token, nats; null: any (recipe)"
    )


class OptimizerConfig(AdamWConfig):
    """AdamW with the recipe's values."""

    lr: float = Field(3e-6, gt=0, description="constant after the warm-up")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="decay of the second moment")
    weight_decay: float = Field(0.0, ge=0, description="decoupled; not on norms, biases, A_log, D, dt_bias")


class GenerationConfig(Group):
    """How completions are drawn: from the policy as it is, temperature 1 and every token (recipe)."""

    max_new_tokens: int = Field(
        49_152,
        ge=1,
        description="longest response, tokens; a completion of several turns has several (tech report 3.2)",
    )
    batch_size: int = Field(1024, ge=1, description="completions decoded at once on one rank")


class TrainedPolicyConfig(Group):
    """The model being trained, whatever its loss."""

    model_name: ModelPath
    max_total_sequence_length: int = Field(49_152, ge=2, description="tokens of a row: a prompt and completions")
    train_micro_batch_size: int = Field(
        1, ge=1, description="rows a forward pass, but in DPO more where they are shorter; changes memory, not results"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="largest norm of all gradients together")
    lr_warmup_iters: int = Field(10, ge=0, description="steps of linear warm-up (recipe)")
    freeze_moe_router: bool = Field(True, description="router weights stay as they are (tech report 3.2)")
    moe_router_bias_update_rate: float = Field(
        1e-3, ge=0, description="step of the expert bias towards equal loads; it moves although the router is frozen"
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)


class PolicyConfig(TrainedPolicyConfig):
    """The model being trained, on completions of its own."""

    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    mtp_num_layers: int = Field(
        0, ge=0, description="depths of multi-token prediction that the update trains, too; 0: the block stays "
        "as it is (public recipe of Super 3: 0; NeMo-RL's of v0.7: 5)",
    )  # fmt: skip
    mtp_loss_scaling_factor: float = Field(
        0.3, gt=0, description="weight of that loss, a mean over depths (NeMo-RL's recipe of Super 3)"
    )
    mtp_detach_heads: bool = Field(
        True, description="that loss moves the block alone, neither trunk nor embedding nor head (NeMo-RL's recipe)"
    )


class CurriculumConfig(Group):
    """Prompts by pass rate, easy ones first (`nemotron.stack.rl.curriculum`); means and deviation are not published."""

    drop_pass_rate: float = Field(
        1.0, gt=0, description="prompts of this pass rate and above are left out (tech report: 1; Llama-Nemotron: 0.75)"
    )
    start_mean: float = Field(0.875, ge=0, le=1, description="pass rate that the first batch is centred on")
    end_mean: float = Field(0.125, ge=0, le=1, description="pass rate that the last batch is centred on")
    std: float = Field(0.25, gt=0, description="standard deviation of the pass rates of a batch")


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


class JudgeConfig(Group):
    """How a judge is asked."""

    enable_thinking: bool = Field(True, description="let it reason before its verdict")
    temperature: float = Field(0.6, ge=0, description="of its sampling; 0 is greedy (recipe of Super 3)")
    top_p: float = Field(0.95, gt=0, le=1, description="smallest set of tokens that it draws from (recipe of Super 3)")
    max_new_tokens: int = Field(
        16_384, ge=1, description="longest verdict with its reasoning, tokens (recipe of Super 3)"
    )
    max_prompt_tokens: int = Field(49_152, ge=1, description="a comparison that is longer has no verdict")
    batch_size: int = Field(1024, ge=1, description="verdicts generated at once")
