"""Every knob of `evaluate.py`: type, default, unit, allowed range. Imports only the standard library and pydantic."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Group(BaseModel):
    """A group of keys; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


class RunConfig(Group):
    """The models compared, what they were trained on, and the results written. A model that is null is left out."""

    config: str = Field(default="", description="name of this config; filled in from its file")
    script: Literal["evaluate.py"] = Field(default="evaluate.py", description="the script that this config is for")
    base: str | None = Field(default=None, description="the pretrained model, as name or name:version")
    sft: str | None = Field(default=None, description="the model after SFT")
    sft_continued: str | None = Field(
        default=None, description="SFT continued for as long as RL took, to compare RL with"
    )
    rl: str | None = Field(default=None, description="the model after RL")
    pretrain_data: str | None = Field(default=None, description="the blend whose held-out text is scored")
    pretrain_results: str | None = Field(
        default=None, description="results of pretraining: bits per byte beside the trigram's"
    )
    sft_data: str | None = Field(default=None, description="conversations of SFT: which tasks training has seen")
    rl_data: str | None = Field(default=None, description="prompts of RL: which tasks training has seen")
    results: str | None = Field(default=None, description="name under which the results are published")
    output: None = Field(default=None, description="nothing: an evaluation makes no model")


class TasksConfig(Group):
    """The held-out tasks, the same ones in the same order for every model."""

    per_family: int = Field(default=128, ge=8, description="evaluation tasks of each family")
    difficulty: dict[str, dict[str, Any]] = Field(default={}, description="per family: fields of its difficulty class")
    samples: int = Field(
        default=4, ge=0, description="sampled responses a task at temperature 1, beside the greedy one"
    )
    base_samples: int = Field(default=0, ge=0, description="the same for the base model, which answers in plain text")
    reasoning_off: bool = Field(
        default=True, description="also answer greedily with reasoning off (not the base model)"
    )
    max_new_tokens: int = Field(default=64, ge=1, description="tokens a response, at most")
    batch_size: int = Field(default=256, ge=1, description="responses generated at once")
    seed: int = Field(default=0, ge=0, description="of the tasks drawn and of sampling")
    lookup_tasks: int = Field(
        default=20_000, ge=0, description="training tasks a family that the nearest-neighbour look-up knows"
    )
    generations: int = Field(default=3, ge=0, description="tasks a family whose responses are kept for the reader")


class TextConfig(Group):
    """Held-out text, scored with every model: what later stages cost the language model."""

    max_tokens: int = Field(default=40_000, ge=0, description="tokens a source, at most; 0: no text is scored")
    seq_length: int = Field(default=256, ge=2, description="tokens a window, as in pretraining")
    batch_size: int = Field(default=16, ge=1, description="windows a forward pass")


class BaseBands(Group):
    """What the base model must reach. Null: not checked."""

    bpb_max: float | None = Field(default=None, gt=0, description="bits per byte on all held-out text, at most")
    below_trigram_min: float | None = Field(
        default=None, description="bits per byte below the interpolated trigram, at least"
    )


class SFTBands(Group):
    """What SFT must reach, pass@1 as a share of 1."""

    greedy_mean_min: float | None = Field(default=None, ge=0, le=1, description="greedy, mean over the families")
    sampled_mean_min: float | None = Field(default=None, ge=0, le=1, description="sampled, mean over the families")
    family_above_constant_min: float | None = Field(
        default=None, description="greedy of each family above its best constant answer"
    )
    family_above_base_min: float | None = Field(default=None, description="greedy of each family above the base model")


class RLBands(Group):
    """What RL must reach, against SFT on the same tasks."""

    sampled_gain_min: float | None = Field(default=None, description="sampled, mean over the families, above SFT")
    sampled_gain_low_min: float | None = Field(default=None, description="lower end of the 95 % interval of that gain")
    greedy_gain_min: float | None = Field(default=None, description="greedy, mean over the families, above SFT")
    gain_over_continued_min: float | None = Field(
        default=None, description="sampled mean above SFT continued for as long"
    )
    families_worse_max: int | None = Field(
        default=None, ge=0, description="families significantly worse, sampled (Holm, 0.05)"
    )


class BandsConfig(Group):
    """Expected numbers; outside them the script exits with 1 after publishing."""

    base: BaseBands = Field(default_factory=BaseBands)
    sft: SFTBands = Field(default_factory=SFTBands)
    rl: RLBands = Field(default_factory=RLBands)


class EvalConfig(Group):
    """`nemotron nano3 eval`."""

    run: RunConfig = Field(default_factory=RunConfig)
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    text: TextConfig = Field(default_factory=TextConfig)
    bands: BandsConfig = Field(default_factory=BandsConfig)
