"""Every knob of this stage's `data_prep.py`; "tech report" is arXiv 2512.20848 (Nemotron 3 Nano)."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas import sources
from nemotron.kit.schemas.difficulty import RLVR_FAMILIES, Family
from nemotron.kit.schemas.environments import Environments
from nemotron.kit.schemas.group import Group, Seed
from nemotron.kit.schemas.questions import MATCH, Match, Questions
from nemotron.kit.schemas.sources import DataPrepConfig, Fraction, OwnSourceConfig, check_names


class LowEffortConfig(Group):
    """Prompts that ask for little reasoning; `env.effort_levels` of rlvr.py rewards short responses to them."""

    share: Fraction = Field(0.0, description="share of the training prompts of `families` (Super 3: 0.02, later 0.01)")
    families: list[Family] = Field(
        ["math", "multiple_choice", "code_generation"], description="which may ask so (Super 3: math, STEM and code)"
    )
    text: str = Field(
        "{reasoning effort: low}", min_length=1, description="how: the end of the prompt, as template super3 writes it"
    )


class TasksConfig(sources.TasksConfig):
    """Prompts from the environments' generators."""

    families: list[Family] = Field(list(RLVR_FAMILIES), description="which, all that RLVR draws; [] for none")
    num_tasks: int = Field(
        200_000, ge=1, description="different prompts of each family and environment, at most, at scale full"
    )
    num_valid_tasks: int = Field(10_000, ge=1, description="different validation prompts of each family, as above")
    seed: Seed = Field(3, description="of the generators; the split goes by the task, not by this")
    low_effort: LowEffortConfig = Field(default_factory=LowEffortConfig)


class SourceConfig(OwnSourceConfig):
    """Tasks of your own: question and answer, or records as `Task.to_dict()` writes them."""

    fields: ClassVar[tuple[str, ...]] = (
        "question", "answer", "choices", "match", "family", "prompt", "canonical", "spec", "solution",
        "messages",
    )  # fmt: skip

    match: Match | None = Field(None, description=MATCH)

    max_tasks: int | None = Field(
        None, ge=1, description="records read at most, the first ones, at every scale; null: all"
    )


class RLDataConfig(DataPrepConfig):
    """`nemotron nano3 data prep rl`."""

    seed: Seed = Field(1234, description="of the order of the prompts")
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    sources: list[SourceConfig] = Field([], description="your own task records; a path alone is a source, too")
    environments: Environments = Field({})
    questions: Questions = Field([])
    evaluation_tasks: int = Field(500, ge=0, description="tasks a family whose prompts no source may contain")

    @model_validator(mode="after")
    def _something_to_read(self) -> Self:
        if not self.tasks.families and not self.sources and not self.environments:
            raise ValueError("no prompts: tasks.families, sources and environments are all empty")
        check_names([source.name for source in self.sources] + [*self.tasks.families, *self.environments])
        return self
