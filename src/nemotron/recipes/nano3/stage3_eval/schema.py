"""Every knob of `evaluate.py`: type, default, unit, allowed range."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas.evaluation import ResponsesConfig, RulerConfig
from nemotron.kit.schemas.group import MODEL, PRETRAIN_BLEND, RL_PROMPTS, SFT_PACK, Group, RunConfig
from nemotron.kit.schemas.questions import Questions


class EvalRunConfig(RunConfig):
    """The models compared, what they were trained on, and the results written. A model that is null is left out."""

    models: Annotated[list[str], MODEL] = Field(
        [],
        description="models of any origin, each compared with the one before: name, name:version, directory, hf://. "
        "Beside the recipe's stages they need a `results` of their own",
    )
    base: Annotated[str | None, MODEL] = Field(None, description="the pretrained model, as name or name:version")
    sft: Annotated[str | None, MODEL] = Field(None, description="the model after SFT, all of its stages")
    sft_continued: Annotated[str | None, MODEL] = Field(None, description="SFT continued for as long as RL took")
    rl: Annotated[str | None, MODEL] = Field(None, description="the model after RLVR, all of its blends")
    swe1: Annotated[str | None, MODEL] = Field(None, description="the model after RL on single tool calls")
    swe2: Annotated[str | None, MODEL] = Field(None, description="the model after RL of the agent that repairs code")
    rlhf: Annotated[str | None, MODEL] = Field(None, description="the model after RLHF")
    final: Annotated[str | None, MODEL] = Field(None, description="the model after the second pass of RLVR")
    healed: Annotated[str | None, MODEL] = Field(None, description="the model whose MTP block was healed after RL")
    quantized: Annotated[str | None, MODEL] = Field(None, description="the model after quantisation without training")
    qad: Annotated[str | None, MODEL] = Field(None, description="the quantised model after distillation")
    pretrain_data: Annotated[str | None, PRETRAIN_BLEND] = Field(
        None, description="blend whose held-out text is scored"
    )
    pretrain_results: str | None = Field(None, description="results of pretraining: bits per byte beside the trigram's")
    healed_results: str | None = Field(None, description="results of the healing: acceptance length of its drafts")
    quantized_results: str | None = Field(None, description="results of quantisation: KL to the full model, bytes")
    qad_results: str | None = Field(None, description="results of the distillation of the quantised model: the same")
    sft_data: Annotated[str | None, SFT_PACK] = Field(None, description="conversations of SFT: tasks that training saw")
    rl_data: Annotated[str | None, RL_PROMPTS] = Field(None, description="prompts of RL: tasks that training saw")
    results: str | None = Field(None, description="name under which the results are published")
    output: None = Field(None, description="nothing: an evaluation makes no model")

    @model_validator(mode="after")
    def _stages_keep_their_results(self) -> Self:
        """What carries the name of a config's stages is about these alone: the report reads the latest of that name."""
        stages = (
            *(self.base, self.sft, self.sft_continued, self.rl, self.swe1, self.swe2, self.rlhf, self.final),
            *(self.healed, self.quantized, self.qad),
        )
        data = (self.pretrain_data, self.pretrain_results, self.sft_data, self.rl_data)
        is_named_after_config = bool(self.config) and (self.results or "").endswith(f"-eval-results-{self.config}")
        if self.models and any((*stages, *data)) and is_named_after_config:
            raise ValueError(
                f"{self.results} is for the stages of config {self.config} alone; name what run.models is part of: "
                "run.results=my-comparison, or take -c own, which evaluates run.models alone"
            )
        return self


class TasksConfig(ResponsesConfig):
    """The held-out tasks, the same ones in the same order for every model."""

    per_family: int = Field(128, ge=0, description="generated tasks of each family; 0: `questions` alone")
    base_samples: int = Field(
        0, ge=0, description="sampled responses a task of a model without chat template, which answers in plain text"
    )
    reasoning_off: bool = Field(True, description="also answer greedily with reasoning off (not the base model)")
    reasoning_budgets: list[Annotated[int, Field(ge=1)]] = Field(
        [], description="also answer greedily with at most so many tokens of reasoning (not the base model)"
    )
    lookup_tasks: int = Field(
        20_000, ge=0, description="training tasks a family that the nearest-neighbour look-up knows"
    )
    generations: int = Field(3, ge=0, description="tasks a family whose responses are kept for the reader")

    @model_validator(mode="after")
    def _budgets_leave_room(self) -> Self:
        for budget in self.reasoning_budgets:
            if budget >= self.max_new_tokens:
                raise ValueError(
                    f"reasoning_budgets: {budget} leaves no answer in max_new_tokens {self.max_new_tokens}"
                )
        return self


class TextConfig(Group):
    """Held-out text, scored with every model: what later stages cost the language model."""

    max_tokens: int = Field(40_000, ge=0, description="tokens a source, at most; 0: no text is scored")
    seq_length: int = Field(256, ge=2, description="tokens a window, as in pretraining")
    batch_size: int = Field(16, ge=1, description="windows a forward pass")


class BaseBands(Group):
    """What the base model must reach. Null: not checked."""

    below_trigram_min: float | None = Field(None, description="bits per byte below the interpolated trigram, at least")


class SFTBands(Group):
    """What SFT must reach, pass@1 as a share of 1."""

    greedy_mean_min: float | None = Field(None, ge=0, le=1, description="greedy, mean over the families")
    family_above_constant_min: float | None = Field(
        None, description="greedy of each family above its best constant answer"
    )
    family_above_base_min: float | None = Field(None, description="greedy of each family above the base model")
    bpb_over_base_max: float | None = Field(
        None, description="bits per byte of held-out text above the base model, on the worst source, at most"
    )


class RLBands(Group):
    """What RL must reach, against SFT on the same tasks: `rl` is the first pass of RLVR, or its last blend, `final` and
    `healed` the end of all."""

    sampled_gain_min: float | None = Field(None, description="sampled, mean over the families, above SFT")
    sampled_gain_low_min: float | None = Field(None, description="lower end of the 95 % interval of that gain")
    greedy_gain_min: float | None = Field(None, description="greedy, mean over the families, above SFT")
    families_worse_max: int | None = Field(None, ge=0, description="families significantly worse, sampled (Holm, 0.05)")


class HealedBands(RLBands):
    """What the model must reach whose MTP block was healed: what it answers is RL's, what it drafts is its own."""

    acceptance_length_min: float | None = Field(
        None, description="tokens that speculative decoding settles in a pass, greedy and sampled the smaller"
    )
    acceptance_gain_min: float | None = Field(None, description="of these over those before healing, the smaller")


class QuantizedBands(Group):
    """What a quantised model must keep, against the model that was quantised, on the same tasks."""

    sampled_loss_max: float | None = Field(None, description="sampled, mean over the families, below it, at most")
    gain_high_min: float | None = Field(
        None, description="upper end of the 95 % interval of sampled gain over it; at 0 or above the loss may be chance"
    )


class BandsConfig(Group):
    """Expected numbers; outside them the script exits with 1 after publishing."""

    base: BaseBands = Field(default_factory=BaseBands)
    sft: SFTBands = Field(default_factory=SFTBands)
    rl: RLBands = Field(default_factory=RLBands)
    swe2: RLBands = Field(default_factory=RLBands)
    final: RLBands = Field(default_factory=RLBands)
    healed: HealedBands = Field(default_factory=HealedBands)
    quantized: QuantizedBands = Field(default_factory=QuantizedBands)
    qad: QuantizedBands = Field(default_factory=QuantizedBands)


class EvalConfig(Group):
    """`nemotron nano3 eval`."""

    run: EvalRunConfig = Field(default_factory=EvalRunConfig)
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    questions: Questions = Field([])
    processes: int = Field(
        1, ge=1, description="models evaluated at once without a GPU, each in a process with its share of the cores"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the weights: bfloat16 takes half the memory, and gives some other answers"
    )
    text: TextConfig = Field(default_factory=TextConfig)
    ruler: RulerConfig = Field(default_factory=RulerConfig)
    bands: BandsConfig = Field(default_factory=BandsConfig)
