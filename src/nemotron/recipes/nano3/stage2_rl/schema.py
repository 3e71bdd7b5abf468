"""Every knob of `train.py`: type, default, unit, allowed range, and where the default comes from.

Defaults are those of the published Nemotron 3 Nano where it states one ("tech report": arXiv 2512.20848, section 3.2;
"recipe": the public GRPO recipe); group and field names are NeMo-RL's. Imports only the standard library and pydantic,
so that a dry run needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator


class Group(BaseModel):
    """A group of keys; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


class GRPOConfig(Group):
    """The algorithm: how many prompts and completions, and how rewards become advantages."""

    max_num_steps: int = Field(1_000, ge=1, description="GRPO steps: one batch of rollouts and one update each")
    num_prompts_per_step: int = Field(128, ge=1, description="prompts a step, over all ranks (tech report 3.2)")
    num_generations_per_prompt: int = Field(16, ge=2, description="completions of each prompt (tech report 3.2)")
    normalize_rewards: bool = Field(True, description="divide advantages by the group's standard deviation (recipe)")
    overlong_filtering: bool = Field(
        True, description="leave completions that hit the length limit out of the loss (tech report; the recipe: false)"
    )
    max_error_rate: float = Field(
        0.01, ge=0, le=1, description="share of rollouts whose verification may fail in a step before the run stops"
    )
    val_period: int = Field(5, ge=0, description="steps between validations; 0: none (recipe: 5)")
    val_tasks_per_family: int = Field(64, ge=1, description="validation prompts of each family")


class LossConfig(Group):
    """Clipped policy gradient, token-level mean; all values are the recipe's."""

    ratio_clip_min: float = Field(0.2, gt=0, lt=1, description="lower clip: ratio at least 1 - this")
    ratio_clip_max: float = Field(0.28, gt=0, description="upper clip: ratio at most 1 + this")
    importance_bound: float = Field(
        2.0, gt=1, description="tokens whose trainer/generator ratio leaves [1/this, this] are masked (tech report 3.2)"
    )
    reference_policy_kl_penalty: float = Field(0.0, ge=0, description="weight of the k3 KL to the initial policy")


class OptimizerConfig(Group):
    """AdamW with the recipe's values."""

    lr: float = Field(3e-6, gt=0, description="constant after the warm-up")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="decay of the second moment")
    adam_eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.0, ge=0, description="decoupled")


class GenerationConfig(Group):
    """How completions are drawn: from the policy as it is, temperature 1 and every token (recipe)."""

    max_new_tokens: int = Field(49_152, ge=1, description="longest completion, tokens (tech report 3.2)")
    batch_size: int = Field(1024, ge=1, description="completions decoded at once on one rank")


class PolicyConfig(Group):
    """The model being trained."""

    model_name: Path = Field(description="payload of the model artifact: config.json, weights, tokenizer")
    max_total_sequence_length: int = Field(49_152, ge=2, description="tokens of a packed row; prompt + completion fit")
    train_micro_batch_size: int = Field(1, ge=1, description="packed rows a forward pass; changes memory, not results")
    max_grad_norm: float = Field(1.0, gt=0, description="largest norm of all gradients together")
    lr_warmup_iters: int = Field(10, ge=0, description="steps of linear warm-up (recipe)")
    freeze_moe_router: bool = Field(True, description="router weights stay as they are (tech report 3.2)")
    moe_router_bias_update_rate: float = Field(
        1e-3, ge=0, description="step of the expert bias towards equal loads; it moves although the router is frozen"
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)


class EnvConfig(Group):
    """Which environments give the rewards; all of them at once, in a fixed ratio a batch."""

    families: dict[str, float] = Field(
        {"math": 1.0, "multiple_choice": 1.0, "instruction_following": 1.0, "structured_output": 1.0},
        description="share of each family among the prompts of a batch, relative",
    )
    enable_thinking: bool = Field(True, description="generation prompt with reasoning on")


class DataConfig(Group):
    """What is read."""

    path: Path = Field(description="payload of the data artifact: train.jsonl and valid.jsonl")


class MathDifficulty(Group):
    """Integer arithmetic. All `…Difficulty` groups have the fields and defaults of nemotron.stack.environments."""

    min_digits: int = Field(2, ge=1, le=6, description="fewest digits of an operand")
    max_digits: int = Field(3, ge=1, le=6, description="most digits of an operand of + and -")
    multiply_digits: int = Field(2, ge=1, le=6, description="most digits of the number that is multiplied by 2..9")
    add: float = Field(0.5, ge=0, description="relative frequency of additions")
    subtract: float = Field(0.5, ge=0, description="relative frequency of subtractions")
    multiply: float = Field(0.0, ge=0, description="relative frequency of multiplications")
    careful_share: float = Field(0.7, ge=0, le=1, description="share of demonstrations that work digit by digit")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_digits > min(self.max_digits, self.multiply_digits):
            raise ValueError(f"min_digits {self.min_digits} exceeds max_digits or multiply_digits")
        if self.add + self.subtract + self.multiply <= 0:
            raise ValueError("one of add, subtract and multiply must be above 0")
        return self


class MultipleChoiceDifficulty(Group):
    """Lettered options, one of them right."""

    kinds: list[Literal["largest", "smallest", "starts_with", "ends_with", "category", "odd_one_out"]] = Field(
        ["largest", "smallest", "category"], min_length=1, description="kinds of question, equally frequent"
    )
    num_options: int = Field(4, ge=3, le=6, description="options of a question")
    min_digits: int = Field(2, ge=1, le=9, description="fewest digits of the numbers compared")
    max_digits: int = Field(2, ge=1, le=9, description="most digits of the numbers compared")
    words_per_category: int = Field(8, ge=2, le=16, description="words of each of the eight categories")
    careful_share: float = Field(0.7, ge=0, le=1, description="share of demonstrations that go through all options")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits {self.min_digits} exceeds max_digits {self.max_digits}")
        if "odd_one_out" in self.kinds and self.words_per_category < self.num_options - 1:
            raise ValueError("odd_one_out needs words_per_category >= num_options - 1")
        return self


class InstructionFollowingDifficulty(Group):
    """Words written under constraints."""

    kinds: list[Literal["repeat", "pick", "pick_not", "reorder", "first_last", "upper"]] = Field(
        ["repeat", "pick", "pick_not", "reorder", "first_last", "upper"],
        min_length=1,
        description="kinds of instruction, equally frequent",
    )
    min_times: int = Field(2, ge=1, le=9, description="fewest repetitions of a word")
    max_times: int = Field(3, ge=1, le=9, description="most repetitions of a word")
    num_given: int = Field(4, ge=4, le=8, description="words given to pick from")
    num_reorder: int = Field(3, ge=3, le=8, description="words to reorder")
    max_count: int = Field(4, ge=3, le=8, description="longest list of different words asked for; the shortest is 3")
    num_upper: int = Field(2, ge=1, le=4, description="words to write in upper case")
    words_per_category: int = Field(8, ge=2, le=16, description="words of each of the eight categories")
    in_order_share: float = Field(0.75, ge=0, le=1, description="share of demonstrations in the order of the prompt")
    careful_share: float = Field(0.6, ge=0, le=1, description="share of demonstrations that number the words first")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_times > self.max_times:
            raise ValueError(f"min_times {self.min_times} exceeds max_times {self.max_times}")
        return self


class StructuredOutputDifficulty(Group):
    """JSON objects that validate under a small schema."""

    min_keys: int = Field(2, ge=1, le=6, description="fewest keys of an object")
    max_keys: int = Field(3, ge=1, le=6, description="most keys of an object")
    max_number: int = Field(99, ge=2, le=1_000_000_000, description="largest number; the smallest is 1")
    numbers_as_strings: bool = Field(True, description="a number may be asked for as a string")
    flags: bool = Field(True, description="boolean keys occur")
    choices: bool = Field(True, description="enumerated keys occur")
    words_per_category: int = Field(8, ge=2, le=16, description="values of a key that holds a word")
    careful_share: float = Field(0.6, ge=0, le=1, description="share of demonstrations that write typed values first")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_keys > self.max_keys:
            raise ValueError(f"min_keys {self.min_keys} exceeds max_keys {self.max_keys}")
        return self


class DifficultyConfig(Group):
    """How hard the tasks of each family are; a family left out has its defaults."""

    math: MathDifficulty | None = Field(None, description="integer arithmetic")
    multiple_choice: MultipleChoiceDifficulty | None = Field(None, description="lettered options")
    instruction_following: InstructionFollowingDifficulty | None = Field(None, description="words under constraints")
    structured_output: StructuredOutputDifficulty | None = Field(None, description="JSON under a schema")

    def get(self, family: str) -> dict[str, Any] | None:
        """The fields of one family; None where its defaults are to be used."""
        given: dict[str, dict[str, Any]] = self.model_dump()
        return given.get(family)

    @model_serializer
    def _only_given(self) -> dict[str, dict[str, Any]]:
        # So that a config that leaves all of this out stays as short as it was written.
        return {name: group.model_dump() for name, group in self if group is not None}


class EvaluationConfig(Group):
    """What is measured at the end; published as Results."""

    tasks_per_family: int = Field(200, ge=0, description="held-out tasks of each environment family; 0: none")
    difficulty: DifficultyConfig = Field(
        default_factory=DifficultyConfig, description="per family, of the tasks; {} for the defaults"
    )
    samples: int = Field(4, ge=0, description="sampled responses a task at temperature 1, beside the greedy one")
    max_new_tokens: int = Field(64, ge=1, description="tokens a response, at most")
    batch_size: int = Field(256, ge=1, description="responses generated at once")
    seed: int = Field(0, ge=0, description="of the tasks drawn and of sampling")


class CheckpointConfig(Group):
    """How often a run can be resumed from."""

    save_interval: int = Field(10, ge=1, description="steps between checkpoints (recipe); also on a signal, at the end")
    keep_last: int = Field(2, ge=1, description="newest checkpoints kept")
    async_save: bool = Field(
        True, description="write them in the background, from a copy in CPU memory; a step waits for the copy only"
    )


class LoggerConfig(Group):
    """What is written while it runs; no part of the run's fingerprint."""

    log_samples: int = Field(4, ge=0, description="rollouts of each step kept in rollouts.jsonl")


class RunConfig(Group):
    """Identity, artifacts read and written."""

    config: str = Field("", description="name of this config; filled in from its file")
    script: Literal["train.py"] = Field("train.py", description="the script that this config is for")
    model: str = Field(description="model to train, as name or name:version")
    data: str = Field(description="prompts to train on: an RLPrompts artifact, as name or name:version")
    output: str | None = Field(None, description="name under which the model is published")
    results: str | None = Field(None, description="name under which the results are published")


class RLConfig(Group):
    """`nemotron nano3 rl`."""

    run: RunConfig
    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    loss_fn: LossConfig = Field(default_factory=LossConfig)
    policy: PolicyConfig
    env: EnvConfig = Field(default_factory=EnvConfig)
    data: DataConfig
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    seed: int = Field(42, ge=0, description="of the prompt order and of sampling")
    mixed_precision: Literal["fp32", "bf16_mixed"] = Field("bf16_mixed", description="type of the matrix products")
    resume: Path | None = Field(
        None, description="run directory to go on in, if not the one of this config and these inputs"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.policy.generation.max_new_tokens >= self.policy.max_total_sequence_length:
            raise ValueError(
                f"policy.generation.max_new_tokens {self.policy.generation.max_new_tokens} leaves no room for a prompt "
                f"in policy.max_total_sequence_length {self.policy.max_total_sequence_length}"
            )
        if not self.env.families or min(self.env.families.values()) <= 0:
            raise ValueError("env.families needs at least one family, each with a share above 0")
        if len(self.env.families) > self.grpo.num_prompts_per_step:
            raise ValueError("grpo.num_prompts_per_step is below the number of env.families")
        return self
