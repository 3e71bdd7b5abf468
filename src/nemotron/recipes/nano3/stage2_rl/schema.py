"""Every knob of `rlvr.py`: type, default, unit, allowed range, and where the default comes from.

Defaults are those of the published Nemotron 3 Nano where it states one ("tech report": arXiv 2512.20848, section 3.2;
"recipe": the public GRPO recipe); group and field names are NeMo-RL's. What other stages have, too, comes from
nemotron.kit.schemas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas import rl, training
from nemotron.kit.schemas.difficulty import RLVR_FAMILIES
from nemotron.kit.schemas.environments import Environments, check_known
from nemotron.kit.schemas.evaluation import EvaluationConfig
from nemotron.kit.schemas.group import MODEL, RL_PROMPTS, Group, ModelRunConfig, Seed
from nemotron.kit.schemas.sandbox import SANDBOX, Sandbox


class ValidatedGRPOConfig(rl.GRPOConfig):
    """GRPO with a validation now and then."""

    val_period: int = Field(5, ge=0, description="steps between validations; 0: none (recipe: 5)")
    val_tasks_per_family: int = Field(64, ge=1, description="validation prompts of each family")


class AsyncGRPOConfig(Group):
    """Generation ahead of the trainer (`nemotron.stack.rl.rollout_buffer`)."""

    enabled: bool = Field(False, description="draw the rollouts of coming steps while the trainer updates")
    max_trajectory_age_steps: int = Field(
        1, ge=1, description="the rollouts of a step are sampled by the weights of so many steps before (recipe: 1)"
    )


class GRPOConfig(ValidatedGRPOConfig):
    """GRPO in environments, some of which answer."""

    async_grpo: AsyncGRPOConfig = Field(default_factory=AsyncGRPOConfig)
    max_rollout_turns: int = Field(
        8, ge=1, description="responses in a completion, at most, where the environment answers with results of tools"
    )


class TasksConfig(Group):
    """Which environments the prompts are of; all of them at once, in a fixed ratio a batch."""

    families: dict[str, float] = Field(
        {"math": 1.0, "multiple_choice": 1.0, "instruction_following": 1.0, "structured_output": 1.0},
        description="share of each family among the prompts of a batch, relative",
    )
    environments: Environments = Field({})
    enable_thinking: bool = Field(True, description="generation prompt with reasoning on")
    sandbox: Sandbox = Field("bubblewrap", description=SANDBOX)


class EnvConfig(TasksConfig):
    """Environments that give the rewards.

    Nano 3's families are a default and in no config: what a command line says would be added to those of a config.
    """

    families: dict[str, float] = Field(
        dict.fromkeys(RLVR_FAMILIES, 1.0), description="share of each family among the prompts of a batch, relative"
    )
    effort_levels: rl.EffortConfig | None = Field(
        None, description="reward short responses to prompts that ask for low effort; null: no prompt does"
    )


class DataConfig(Group):
    """What is read."""

    path: Path = Field(description="payload of the data artifact: train.jsonl and valid.jsonl")


class RLVRDataConfig(DataConfig):
    """What is read, and in which order."""

    curriculum: rl.CurriculumConfig | None = Field(
        None, description="draw prompts by their pass rate, easy ones first; null: in a random order"
    )


class ClusterConfig(Group):
    """Who generates and verifies (`nemotron.stack.rl.ray_workers`)."""

    rollout_workers: int = Field(
        0, ge=0, description="Ray workers of each process, on the cluster of RAY_ADDRESS or else on this machine, that "
        "draw its rollouts, with the same result; 0: the process itself (NeMo-RL: policy.generation.colocated.enabled)",
    )  # fmt: skip


class CheckpointConfig(training.CheckpointConfig):
    """How often a run can be resumed from."""

    save_interval: int = Field(10, ge=1, description="steps between checkpoints (recipe); also on a signal, at the end")


class LoggerConfig(training.TrackersConfig):
    """What is written while it runs."""

    log_samples: int = Field(4, ge=0, description="rollouts of each step kept in rollouts.jsonl")


class RunConfig(ModelRunConfig):
    """Identity, artifacts read and written."""

    model: Annotated[str, MODEL] = Field(description="model to train: name, name:version, directory or hf://ORG/NAME")
    data: Annotated[str, RL_PROMPTS] = Field(description="what to train on: RLPrompts, as name or name:version")


class StageConfig(Group):
    """What every stage of GRPO has."""

    neutral_keys: ClassVar[tuple[str, ...]] = training.NEUTRAL_KEYS

    grpo: rl.GRPOConfig = Field(default_factory=rl.GRPOConfig)
    loss_fn: rl.LossConfig = Field(default_factory=rl.LossConfig)
    policy: rl.PolicyConfig
    env: TasksConfig = Field(default_factory=TasksConfig)
    data: DataConfig
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    seed: Seed = Field(42, description="of the prompt order and of sampling")
    mixed_precision: training.MixedPrecision = "bf16_mixed"
    resume: training.Resume = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.policy.generation.max_new_tokens >= self.policy.max_total_sequence_length:
            raise ValueError(
                f"policy.generation.max_new_tokens {self.policy.generation.max_new_tokens} leaves no room for a prompt "
                f"in policy.max_total_sequence_length {self.policy.max_total_sequence_length}"
            )
        if not self.env.families or min(self.env.families.values()) <= 0:
            raise ValueError("env.families needs at least one family, each with a share above 0")
        check_known(self.env.families, self.env.environments)
        if len(self.env.families) > self.grpo.num_prompts_per_step:
            raise ValueError("grpo.num_prompts_per_step is below the number of env.families")
        return self

    def check_machines(self, nodes: int, processes_per_node: int, _launcher: str) -> list[str]:
        """Before the job is submitted: ValueError where a step does not divide among its processes."""
        training.check_divides("grpo.num_prompts_per_step", self.grpo.num_prompts_per_step, nodes * processes_per_node)
        return []


class JudgedConfig(StageConfig):
    """What a stage has whose responses are compared: single ones."""

    @model_validator(mode="after")
    def _one_response(self) -> Self:
        for family in ("workplace_assistant", "repository_repair"):
            if family in self.env.families:
                raise ValueError(f"env.families: {family} has several turns; a judge compares single responses")
        if "tool_comparison" in self.env.families:
            raise ValueError("env.families: of tool_comparison the answer is a call of a tool; a judge compares texts")
        return self


class RLConfig(StageConfig):
    """`nemotron nano3 rl`."""

    neutral_keys: ClassVar = (*training.NEUTRAL_KEYS, "cluster")

    run: RunConfig
    data: RLVRDataConfig
    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    env: EnvConfig = Field(default_factory=EnvConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)

    @model_validator(mode="after")
    def _one_error_rate(self) -> Self:
        if "max_error_rate" not in self.evaluation.model_fields_set:
            self.evaluation = self.evaluation.model_copy(update={"max_error_rate": self.grpo.max_error_rate})
        return self

    @model_validator(mode="after")
    def _older_rollouts_are_weighted(self) -> Self:
        if self.grpo.async_grpo.enabled and not self.loss_fn.use_importance_sampling_correction:
            raise ValueError("grpo.async_grpo.enabled needs loss_fn.use_importance_sampling_correction: true")
        return self
