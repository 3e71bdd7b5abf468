"""Every knob of `merge.py`; "tech report" is arXiv 2604.12374 (Nemotron 3 Super). Those of training are nano3's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas.group import MODEL, PRETRAIN_BLEND, Group, ModelRunConfig


class RunConfig(ModelRunConfig):
    """Identity, artifacts read and written."""

    model: Annotated[str, MODEL] = Field(description="a pretraining that published weights of earlier steps")
    data: Annotated[str, PRETRAIN_BLEND] = Field(description="what it was trained on: its held-out text is scored")


class MergeConfig(Group):
    """`python merge.py`. Published: every 2,000 steps (50 B tokens), windows of 125, 250 and 500 B tokens."""

    run: RunConfig
    model_path: Path = Field(description="payload of the model")
    dataset_path: Path = Field(description="payload of the data")
    windows: list[Annotated[int, Field(ge=1)]] = Field(
        min_length=1,
        description="steps before the last kept one whose weights are merged, all at the constant rate; each is scored",
    )
    window: int = Field(ge=1, description="the one of them that is published (tech report: the longest, 500 B tokens)")
    lr_wsd_decay_style: Literal["linear", "minus_sqrt", "cosine"] = Field(
        "minus_sqrt", description="shape of the decay that is emulated (tech report)"
    )
    min_lr_share: float = Field(
        0.01, ge=0, lt=1, description="rate at its end as a part of the constant one (tech report: 4.5e-6 of 4.5e-4)"
    )
    seq_length: int = Field(ge=2, description="tokens of a window of held-out text")
    batch_size: int = Field(ge=1, description="such windows at once")

    @model_validator(mode="after")
    def _the_published_one_is_scored(self) -> Self:
        if self.window not in self.windows:
            raise ValueError(f"window {self.window} is none of windows {self.windows}")
        return self
