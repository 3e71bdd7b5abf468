"""Every knob of this stage's `data_prep.py`; "tech report" is arXiv 2512.20848 (Nemotron 3 Nano)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from nemotron.kit.schemas import conversations, sources
from nemotron.kit.schemas.conversations import BinPacking, ConversationSource, PackTemplate
from nemotron.kit.schemas.difficulty import Family
from nemotron.kit.schemas.group import Group, Seed
from nemotron.kit.schemas.questions import Questions
from nemotron.kit.schemas.sources import (
    DataPrepConfig,
    Fraction,
    OwnSourceConfig,
    PrepRunConfig,
    TokenizerLocation,
    check_names,
)

MULTI_TURN, PASSAGES = "multi_turn", "text"  # names of what is generated beside the families


class RunConfig(PrepRunConfig):
    """Names of what is read and written."""

    tokenizer: str | None = Field(None, description="artifact that holds the tokenizer: the pretraining data")


class TasksConfig(sources.TasksConfig):
    """Conversations from the environments' generators, with their demonstrations."""

    num_tasks: int = Field(500_000, ge=1, description="training conversations of each family at scale full")
    num_valid_tasks: int = Field(12_500, ge=1, description="validation conversations of each family at scale full")
    shares: dict[Family, Fraction] = Field(
        {}, description="family -> share of these numbers that it has; 1 for a family not named"
    )
    seed: Seed = Field(2, description="of the generators; the split goes by the task, not by this")
    multi_turn_share: Fraction = Field(
        0.0,
        description="conversations of two or three tasks in a row, for each one of a single task without tools",
    )
    system_share: Fraction = Field(0.0, description="share of conversations that begin with a system message")


class TextConfig(Group):
    """General text among the conversations, so that SFT keeps what pretraining taught: passages of its blend."""

    path: Path | None = Field(None, description="payload of a blend of pretraining; null: no text")
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="source of the blend -> share of the passages"
    )
    num_passages: int = Field(100_000, ge=1, description="passages at scale full")
    loss_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        1.0, description="what a token of a passage counts in the loss; one of an answer counts 1"
    )
    passage_tokens: int = Field(128, ge=8, description="tokens of a passage at most; it ends with its document")

    @model_validator(mode="after")
    def _names_sources(self) -> Self:
        if self.path and not self.weights:
            raise ValueError("weights names no source of the blend: {stdlib_code: 0.7, stdlib_docs: 0.3}")
        return self


class SourceConfig(ConversationSource, OwnSourceConfig):
    """A source of your own conversations. A path alone may stand for it."""

    valid_fraction: float = Field(0.02, ge=0, lt=1, description="share held out, by hash of the conversation")


class ReasoningConfig(conversations.ReasoningConfig):
    """Reasoning control (tech report 3.1)."""

    off_share: Fraction = Field(0.10, description="share of conversations whose reasoning is stripped")
    truncated_share: Fraction = Field(0.03, description="share whose reasoning is cut at a random word")
    low_effort_share: Fraction = Field(
        0.0,
        description="share of the generated conversations of a family whose user asks for little reasoning, which is "
        "short (super3: 0.02, its tech report 3.1; no other template has such a switch)",
    )


class PackingConfig(conversations.PackingConfig):
    """Conversations into rows of one length."""

    seq_length: int = Field(262_144, ge=16, description="tokens a row at most (tech report 3.1)")
    algorithm: BinPacking = Field(
        "best_fit", description="which row a conversation goes to: nemotron.data_prep.chat.bin_packing"
    )


class SFTDataConfig(DataPrepConfig):
    """`nemotron nano3 data prep sft`."""

    run: RunConfig
    seed: Seed = Field(1234, description="of packing order, held-out split and reasoning control")
    tokenizer: TokenizerLocation
    chat_template: PackTemplate = "nano3"
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    text: TextConfig = Field(default_factory=TextConfig)
    sources: list[SourceConfig] = Field([], description="your own conversations; a path alone is a source, too")
    questions: Questions = Field([])
    evaluation_tasks: int = Field(500, ge=0, description="tasks a family whose prompts no source may contain")
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    packing: PackingConfig = Field(default_factory=PackingConfig)

    @model_validator(mode="after")
    def _something_to_read(self) -> Self:
        if not self.tasks.families and not self.sources:
            raise ValueError("no conversations: tasks.families and sources are both empty")
        check_names([source.name for source in self.sources] + self.generated_names)
        return self

    @property
    def generated_names(self) -> list[str]:
        """What is not read from your files: the conversations of each family, those of several turns, text."""
        several = [MULTI_TURN] if self.tasks.families and self.tasks.multi_turn_share else []
        return [*self.tasks.families, *several, *([PASSAGES] if self.text.path else [])]
