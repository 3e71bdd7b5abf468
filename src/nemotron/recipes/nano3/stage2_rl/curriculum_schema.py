"""Every knob of `data_prep_curriculum.py`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from nemotron.kit.schemas.environments import Environments
from nemotron.kit.schemas.group import MODEL, RL_PROMPTS, Group, Seed
from nemotron.kit.schemas.sandbox import SANDBOX, Sandbox
from nemotron.kit.schemas.sources import DataRunConfig, ScaleAll


class RunConfig(DataRunConfig):
    """Names of what is read and written."""

    model: Annotated[str, MODEL] = Field(
        description="model whose pass rates are measured: the one that is to be trained, by name, directory or hf://…"
    )
    data: Annotated[str, RL_PROMPTS] = Field(description="prompts to measure: RLPrompts, as name or name:version")


class GenerationConfig(Group):
    """How a prompt is answered: at temperature 1, from every token."""

    num_generations_per_prompt: int = Field(8, ge=1, description="rollouts of each prompt (Llama-Nemotron 5.1)")
    max_new_tokens: int = Field(49_152, ge=1, description="longest response, tokens (tech report 3.2)")
    max_turns: int = Field(8, ge=1, description="responses in a rollout, at most, where tools answer")
    batch_size: int = Field(1024, ge=1, description="rollouts decoded at once")


class CurriculumDataConfig(Group):
    """`nemotron nano3 data prep rl -c curriculum`."""

    run: RunConfig
    scale_all: ScaleAll = None
    seed: Seed = Field(1234, description="of sampling")
    num_prompts: int | None = Field(None, ge=1, description="prompts of each family, the first ones; null: all")
    environments: Environments = Field({})
    enable_thinking: bool = Field(True, description="generation prompt with reasoning on")
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    max_error_rate: float = Field(
        0.01, ge=0, le=1, description="share of rollouts whose verification may fail, above which nothing is published"
    )
    sandbox: Sandbox = Field("bubblewrap", description=SANDBOX)
