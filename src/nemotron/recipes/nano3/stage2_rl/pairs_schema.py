"""Every knob of `data_prep_pairs.py`."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from nemotron.kit.record_fields import TURNS
from nemotron.kit.schemas.group import Group, Seed
from nemotron.kit.schemas.questions import Questions
from nemotron.kit.schemas.sources import OwnSourceConfig, PrepRunConfig, ScaleAll, check_names


class SourceConfig(OwnSourceConfig):
    """Preference pairs of your own. A path alone may stand for them."""

    fields: ClassVar[tuple[str, ...]] = (
        "prompt", "question", *TURNS, "chosen", "rejected", "system", "system_prompt", "tools", "category"
    )  # fmt: skip

    valid_fraction: float = Field(0.02, ge=0, lt=1, description="share held out, by hash of the prompt")
    max_pairs: int | None = Field(
        None, ge=1, description="pairs read at most, the first ones, at every scale; null: all"
    )


class PairsConfig(Group):
    """`nemotron nano3 data prep dpo` on pairs of your own."""

    run: PrepRunConfig
    scale_all: ScaleAll = None
    seed: Seed = Field(1234, description="of the order of the pairs and of what is held out")
    sources: list[SourceConfig] = Field(description="your own preference pairs; a path alone is a source, too")
    questions: Questions = Field([])
    evaluation_tasks: int = Field(500, ge=0, description="tasks a family whose prompts no source may contain")

    @model_validator(mode="after")
    def _something_to_read(self) -> Self:
        if not self.sources:
            raise ValueError("no pairs: sources is empty; name your own: 'sources=[pairs.jsonl]'")
        check_names(source.name for source in self.sources)
        return self
