"""What a pretraining of any family may have: further parts of the model, phases, a model to go on from.

The defaults are a model without those parts and a run that begins with new weights and reads one blend to its end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from nemo_runspec.config.inputs import FieldOfArtifact
from nemotron.kit.schemas import evaluation, training
from nemotron.kit.schemas.group import MODEL, PRETRAIN_BLEND, Group, ModelRunConfig, Seed


class ModelConfig(training.LowPrecisionModelConfig):
    """LatentMoE and multi-token prediction, which Nemotron 3 Super has (arXiv 2604.12374)."""

    moe_latent_size: int | None = Field(
        None,
        ge=1,
        description="LatentMoE: width in which routed experts work, projected down and up; null: hidden_size",
    )
    num_nextn_predict_layers: int = Field(
        0, ge=0, le=1, description="stored blocks of multi-token prediction: none, or one for all depths"
    )
    mtp_hybrid_override_pattern: str = Field(
        "*E", pattern=r"^[M*E-]+$", description="that block: one symbol a layer, as in hybrid_override_pattern"
    )
    mtp_num_layers: int = Field(2, ge=0, description="depths: tokens ahead, beside the next, that training predicts")
    mtp_loss_scaling_factor: float = Field(
        0.1,
        ge=0,
        description="weight of the loss of multi-token prediction, a mean over depths (Megatron-Core's default)",
    )


class ShortConfig(Group):
    """Steps of short sequences between those of `dataset.seq_length`. Each has as many tokens as those."""

    seq_length: int = Field(ge=2, description="tokens of a short sequence; divides dataset.seq_length")
    share: float = Field(gt=0, lt=1, description="of the steps, spread evenly: 0.5 is every other one")
    phase: str | None = Field(None, description="phase of the data's own blend that they draw from; null: all of it")


class DatasetConfig(training.DatasetConfig):
    """What is read, and in which mixture."""

    seq_length: int = Field(ge=2, description="tokens a sequence")
    blend: str = Field(".", description="folder in the data whose blend.json is read: `.` or `long`, long documents")
    phase: str | None = Field(
        None, description="phase of that blend which all sequences are drawn from; null: all phases, one after another"
    )
    short: ShortConfig | None = Field(None, description="steps of shorter sequences between the others; null: none")

    @model_validator(mode="after")
    def _short_sequences_fill_a_long_one(self) -> Self:
        if self.short is not None and (
            self.short.seq_length >= self.seq_length or self.seq_length % self.short.seq_length
        ):
            raise ValueError(
                f"short.seq_length {self.short.seq_length} is no part of seq_length {self.seq_length}: "
                "a divisor below it expected, so that all steps have as many tokens"
            )
        return self


class RetrievalConfig(Group):
    """Retrieval from long text, before a run and after it: facts strewn over held-out text, each then asked for."""

    lengths: list[Annotated[int, Field(ge=64)]] = Field(
        min_length=1, description="tokens of the documents that are scored, also beyond those of training"
    )
    num_documents: int = Field(ge=1, description="documents of each length")
    facts: list[Annotated[int, Field(ge=1)]] = Field(
        min_length=1, description="facts a document, each of which is asked for; one after another"
    )
    words: int = Field(ge=2, description="words that keys are drawn from, and values; those of the training documents")
    seed: Seed = Field(0, description="of the documents")


class CheckpointConfig(training.CheckpointConfig):
    """What a run goes on from, and what it leaves for the next."""

    pretrained_checkpoint: Annotated[
        Path | None,
        FieldOfArtifact("path", input="model"),
        Field(
            description="model to go on from, of the same architecture: takes what `run.model` takes, and is then "
            "that; null: new weights"
        ),
    ] = None
    load_optim: bool = Field(
        False, description="go on with the moments that were published with that model; false: they begin anew"
    )
    save_optim: bool = Field(
        False, description="publish the optimizer's moments with the model; three times the size of it"
    )
    save_retain_interval: int | None = Field(
        None, ge=1, description="steps between weights that are published with the model, for merging; null: none"
    )

    @model_validator(mode="after")
    def _moments_are_those_of_a_model(self) -> Self:
        if self.load_optim and self.pretrained_checkpoint is None:
            raise ValueError("load_optim: true, but there is no pretrained_checkpoint to take the moments from")
        return self


class EvaluationConfig(evaluation.EvaluationConfig):
    """What is measured at the end."""

    retrieval: RetrievalConfig | None = Field(
        None, description="also score retrieval and long text, before this run and after it; null: not"
    )


class RunConfig(ModelRunConfig):
    """Identity, artifacts read and written."""

    model: Annotated[str | None, MODEL] = Field(
        None, description="model to go on from: name, name:version, directory or hf://ORG/NAME; null: new weights"
    )
    data: Annotated[str, PRETRAIN_BLEND] = Field(
        description="what to train on: a PretrainBlend, as name or name:version"
    )
