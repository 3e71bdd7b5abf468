"""Every knob of `data_prep_dpo.py`; "tech report" is arXiv 2512.20848 (Nemotron 3 Nano), appendix C."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from nemotron.kit.schemas import sources
from nemotron.kit.schemas.difficulty import Family
from nemotron.kit.schemas.group import MODEL, Group, Seed
from nemotron.kit.schemas.sandbox import SANDBOX, Sandbox
from nemotron.kit.schemas.sources import DataRunConfig, ScaleAll


class RunConfig(DataRunConfig):
    """Names of what is read and written."""

    model: Annotated[str, MODEL] = Field(
        description="model that answers: the one that is to be trained, by name, directory or hf://ORG/NAME"
    )


class TasksConfig(sources.TasksConfig):
    """Tasks from the environments' generators, none of the evaluation split."""

    families: list[Family] = Field(
        ["math", "multiple_choice"], min_length=1, description="which (tech report: math and multiple choice)"
    )
    num_tasks: int = Field(1_000, ge=1, description="tasks of each family (tech report)")
    num_valid_tasks: int = Field(20, ge=0, description="tasks of each family for validation pairs")
    seed: Seed = Field(4, description="of the generators; the split goes by the task, not by this")


class GenerationConfig(Group):
    """How answers are drawn: at temperature 1, from every token."""

    num_generations_per_prompt: int = Field(32, ge=2, description="answers to each task (tech report)")
    max_new_tokens: int = Field(4096, ge=1, description="longest response, tokens; a longer one is in no pair")
    max_turns: int = Field(8, ge=1, description="responses in an answer, at most, where tools answer")
    batch_size: int = Field(1024, ge=1, description="answers decoded at once")


class DPODataConfig(Group):
    """`nemotron nano3 data prep dpo`."""

    run: RunConfig
    scale_all: ScaleAll = None
    seed: Seed = Field(1234, description="of sampling, and of which answers are paired")
    enable_thinking: bool = Field(True, description="generation prompt with reasoning on")
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    max_pairs_per_task: int = Field(
        25, ge=1, description="pairs of a task, at most; those with a hallucinated tool first (about 25: tech report)"
    )
    max_error_rate: float = Field(
        0.01, ge=0, le=1, description="share of answers whose verification fails, above which nothing is published"
    )
    sandbox: Sandbox = Field("bubblewrap", description=SANDBOX)
