"""Every knob of `genrm.py`, the training of a judge; `rl.py` of nemotron.kit.schemas has those that RL scripts share.

"tech report": of Nemotron 3 Nano, arXiv 2512.20848, section 3.2.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas import training
from nemotron.kit.schemas.group import MODEL, RL_PROMPTS, Group, ModelRunConfig
from nemotron.kit.schemas.sources import Location
from nemotron.recipes.nano3.stage2_rl import schema
from nemotron.recipes.nano3.stage2_rl.schema import JudgedConfig, ValidatedGRPOConfig


class GRPOConfig(ValidatedGRPOConfig):
    """GRPO on comparisons: `num_prompts_per_step` of them, each with a group of verdicts."""

    num_generations_per_prompt: int = Field(8, ge=2, description="verdicts on each comparison (tech report)")


class JudgeTrainingConfig(Group):
    """What a judge learns from, and what its verdicts earn."""

    format_penalty: float = Field(10.0, ge=0, description="C1: cost of a malformed verdict (tech report)")
    ranking_weight: float = Field(1.0, ge=0, description="C2: cost of a ranking that is off by one (tech report)")
    responses_per_task: int = Field(4, ge=2, description="drawn from the model as it was; two that differ are compared")
    imitation_steps: int = Field(
        0, ge=0, description="steps before GRPO that imitate right verdicts, for a model that does not know their form"
    )
    imitation_lr: float = Field(1e-3, gt=0, description="largest learning rate of those; it falls in their second half")


class DataConfig(schema.DataConfig):
    """What is read."""

    comparisons: list[Location] = Field(
        [], description="your own comparisons, JSONL, in place of generated ones: prompt, response_1, response_2 and "
        "ranking (1 to 6) or preference (1 or 2)",
    )  # fmt: skip


class RunConfig(ModelRunConfig):
    """Identity, artifacts read and written."""

    model: Annotated[str, MODEL] = Field(description="becomes the judge; what is compared is drawn from it, too")
    data: Annotated[str, RL_PROMPTS] = Field(description="tasks that are answered: RLPrompts, as name or name:version")


class GenRMConfig(JudgedConfig):
    """`nemotron nano3 rl genrm`."""

    run: RunConfig
    judge: JudgeTrainingConfig = Field(default_factory=JudgeTrainingConfig)
    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    data: DataConfig

    @model_validator(mode="after")
    def _imitation_comes_first(self) -> Self:
        if self.judge.imitation_steps > self.grpo.max_num_steps:
            raise ValueError(
                f"judge.imitation_steps {self.judge.imitation_steps} are the first of grpo.max_num_steps "
                f"{self.grpo.max_num_steps}, which are fewer"
            )
        if self.grpo.num_prompts_per_step % 2:
            raise ValueError("grpo.num_prompts_per_step must be even: each comparison is shown in both orders")
        return self

    def check_machines(self, nodes: int, processes_per_node: int, _launcher: str) -> list[str]:
        """Before the job is submitted: ValueError where a step does not divide among its processes."""
        training.check_divides(
            "half of grpo.num_prompts_per_step", self.grpo.num_prompts_per_step // 2, nodes * processes_per_node
        )
        return []
