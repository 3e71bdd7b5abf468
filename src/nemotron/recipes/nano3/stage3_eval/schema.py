"""Every knob of `evaluate.py`: type, default, unit, allowed range. Imports only the standard library and pydantic."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator


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


class TasksConfig(Group):
    """The held-out tasks, the same ones in the same order for every model."""

    per_family: int = Field(default=128, ge=8, description="evaluation tasks of each family")
    difficulty: DifficultyConfig = Field(
        default_factory=DifficultyConfig, description="per family, of the tasks; {} for the defaults"
    )
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
