"""How a model is measured on held-out tasks."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from nemotron.kit.schemas.difficulty import DEFAULT_FAMILIES, DifficultyConfig, Family
from nemotron.kit.schemas.environments import Environments
from nemotron.kit.schemas.group import Group, Seed, UserPath
from nemotron.kit.schemas.sandbox import SANDBOX, Sandbox


class ResponsesConfig(Group):
    """Which responses are drawn, and how hard the tasks are that they answer."""

    families: list[Family] = Field(list(DEFAULT_FAMILIES), min_length=1, description="of the generated tasks")
    environments: Environments = Field({})
    difficulty: DifficultyConfig = Field(
        default_factory=DifficultyConfig, description="per family, of the tasks; {} for the defaults"
    )
    samples: int = Field(4, ge=0, description="sampled responses a task at temperature 1, beside the greedy one")
    max_new_tokens: int = Field(64, ge=1, description="tokens a response, at most")
    max_turns: int = Field(8, ge=1, description="responses to a task, at most, where tools answer")
    batch_size: int = Field(256, ge=1, description="responses generated at once")
    seed: Seed = Field(0, description="of the tasks drawn and of sampling")
    max_error_rate: float = Field(
        0.01, ge=0, le=1, description="share of responses whose verification may fail before the run stops; in "
        "RLVR, unless it is given, grpo.max_error_rate",
    )  # fmt: skip
    sandbox: Sandbox = Field("bubblewrap", description=SANDBOX)


RulerTask = Literal[
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "variable_tracking", "common_words", "frequent_words", "qa",
]  # fmt: skip


class RulerConfig(Group):
    """RULER's tasks (arXiv 2404.06654) at these lengths, answered greedily."""

    lengths: list[Annotated[int, Field(ge=256)]] = Field(
        [], description="tokens of prompt and answer together, each filled; none: nothing is asked"
    )
    tasks: list[RulerTask] = Field(
        [task for task in get_args(RulerTask) if task != "qa"], min_length=1, description="of each length"
    )
    per_task: int = Field(32, ge=1, description="samples of each task and length")
    max_new_tokens: int = Field(64, ge=1, description="of a length, those kept for the answer, reasoning included")
    passages: UserPath | None = Field(
        None, description="JSONL for the task qa: passage, question, and answer, a text that stands in it or a list"
    )
    seed: Seed = Field(0, description="of the samples")


class EvaluationConfig(ResponsesConfig):
    """What a training script measures at its end; published as Results."""

    tasks_per_family: int = Field(200, ge=0, description="held-out tasks of each environment family; 0: none")
