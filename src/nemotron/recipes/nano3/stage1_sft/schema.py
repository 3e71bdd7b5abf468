"""Every knob of `train.py`: type, default, unit, allowed range, and where the default comes from.

Defaults are those of the published Nemotron 3 Nano 30B-A3B where it states one ("tech report": arXiv 2512.20848); group
and field names are Megatron-Bridge's. Imports only the standard library and pydantic, so that a dry run needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator


class Group(BaseModel):
    """A group of keys; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid")


class ModelConfig(Group):
    """Balancing of the experts; the architecture is that of the model trained on."""

    moe_router_bias_update_rate: float = Field(
        1e-3, ge=0, description="step of the expert bias towards equal loads, once an optimiser step (tech report 2.3)"
    )
    moe_aux_loss_coeff: float = Field(1e-4, ge=0, description="weight of the load-balancing loss (tech report 3.1)")
    recompute_granularity: Literal["full", "selective"] | None = Field(
        None,
        description="blocks whose activations are computed again in the backward pass: all, or recompute_modules; "
        "less memory, same results",
    )
    recompute_modules: list[Literal["mamba", "attention", "moe", "mlp"]] = Field(
        ["mamba"], description="blocks that `selective` recomputes; M blocks keep most"
    )


class DatasetConfig(Group):
    """What is read; rows are as long as data preparation packed them."""

    path: Path = Field(description="payload of the data artifact: packed Parquet files")


class TrainConfig(Group):
    """How long."""

    train_iters: int = Field(13_000, ge=1, description="optimiser steps, at most (tech report 3.1)")
    global_batch_size: int = Field(64, ge=1, description="packed rows a step over all ranks (tech report 3.1)")
    micro_batch_size: int = Field(1, ge=1, description="rows a forward pass on one rank; changes memory, not results")
    eval_interval: int = Field(100, ge=1, description="steps between validations; the last step is always validated")
    eval_iters: int = Field(64, ge=1, description="global batches a validation, at most")
    early_stop_patience: int = Field(
        0, ge=0, description="validations in a row without improvement, after which the final decay begins; 0: never"
    )
    early_stop_min_delta: float = Field(1e-3, ge=0, description="fall of the validation loss that counts, nats a token")


class OptimizerConfig(Group):
    """AdamW; learning rate from the tech report, section 3.1, the rest as in pretraining."""

    lr: float = Field(5e-5, gt=0, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate of the last step; at most lr")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    adam_eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="decoupled; not on norms, biases, A_log, D, dt_bias")
    clip_grad: float = Field(1.0, gt=0, description="largest norm of all gradients together")


class SchedulerConfig(Group):
    """Learning rate over time. The report states the warm-up (800 steps) and no shape after it."""

    lr_warmup_iters: int = Field(0, ge=0, description="steps of linear warm-up")
    lr_decay_style: Literal["WSD", "cosine", "constant"] = Field("WSD", description="shape after the warm-up")
    lr_wsd_decay_iters: int = Field(0, ge=0, description="steps of the final decay of WSD")
    lr_wsd_decay_style: Literal["linear", "minus_sqrt", "cosine"] = Field("linear", description="shape of that decay")


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


class EvaluationConfig(Group):
    """What is measured at the end; published as Results."""

    tasks_per_family: int = Field(
        200, ge=0, description="held-out tasks of each environment family; 0: validation loss only"
    )
    difficulty: DifficultyConfig = Field(
        default_factory=DifficultyConfig, description="per family, of the tasks; {} for the defaults"
    )
    samples: int = Field(4, ge=0, description="sampled responses a task at temperature 1, beside the greedy one")
    max_new_tokens: int = Field(64, ge=1, description="tokens a response, at most")
    batch_size: int = Field(256, ge=1, description="responses generated at once")
    seed: int = Field(0, ge=0, description="of the tasks drawn and of sampling")


class DistConfig(Group):
    """How the model is spread over the processes of torchrun; no part of the run's fingerprint."""

    use_torch_fsdp2: bool = Field(
        False, description="each process holds a slice of weights, gradients and moments (FSDP2) instead of all of them"
    )


class CheckpointConfig(Group):
    """Where the weights come from, and how often a run can be resumed from."""

    pretrained_checkpoint: Path = Field(description="payload of the model artifact: config.json, weights, tokenizer")
    save_interval: int = Field(
        500, ge=1, description="steps between checkpoints; also saved at the end and on a signal"
    )
    keep_last: int = Field(2, ge=1, description="newest checkpoints kept")
    async_save: bool = Field(
        True, description="write them in the background, from a copy in CPU memory; a step waits for the copy only"
    )


class LoggerConfig(Group):
    """What is written while it runs; no part of the run's fingerprint."""

    log_interval: int = Field(10, ge=1, description="steps between lines of metrics.jsonl")


class RngConfig(Group):
    """Randomness."""

    seed: int = Field(1234, ge=0, description="of the data order")


class RunConfig(Group):
    """Identity, artifacts read and written."""

    config: str = Field("", description="name of this config; filled in from its file")
    script: Literal["train.py"] = Field("train.py", description="the script that this config is for")
    model: str = Field(description="model to tune, as name or name:version")
    data: str = Field(description="artifact to train on: an SFTPack, as name or name:version")
    output: str | None = Field(None, description="name under which the model is published")
    results: str | None = Field(None, description="name under which the results are published")


class SFTConfig(Group):
    """`nemotron nano3 sft`."""

    run: RunConfig
    model: ModelConfig = Field(default_factory=ModelConfig)
    dataset: DatasetConfig
    train: TrainConfig = Field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    dist: DistConfig = Field(default_factory=DistConfig)
    checkpoint: CheckpointConfig
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    rng: RngConfig = Field(default_factory=RngConfig)
    mixed_precision: Literal["fp32", "bf16_mixed"] = Field("bf16_mixed", description="type of the matrix products")
    resume: Path | None = Field(
        None, description="run directory to go on in, if not the one of this config and these inputs"
    )

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        decay = self.scheduler.lr_wsd_decay_iters if self.scheduler.lr_decay_style == "WSD" else 0
        if self.scheduler.lr_warmup_iters + decay > self.train.train_iters:
            raise ValueError(
                f"scheduler.lr_warmup_iters {self.scheduler.lr_warmup_iters} + scheduler.lr_wsd_decay_iters {decay} "
                f"exceed train.train_iters {self.train.train_iters}: lower those, too"
            )
        if self.optimizer.min_lr > self.optimizer.lr:
            raise ValueError(f"optimizer.min_lr {self.optimizer.min_lr} exceeds optimizer.lr {self.optimizer.lr}")
        return self
