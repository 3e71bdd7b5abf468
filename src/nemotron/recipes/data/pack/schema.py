"""Every knob of `pack.py`."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from nemotron.kit.chat_templates import TEMPLATES
from nemotron.kit.schemas import conversations
from nemotron.kit.schemas import sources as shared
from nemotron.kit.schemas.conversations import BinPacking, ConversationSource, PackTemplate, ReasoningConfig
from nemotron.kit.schemas.group import Group, Scale, Seed
from nemotron.kit.schemas.sources import SourcesConfig, check_weights, named


class SourceConfig(ConversationSource, shared.SourceConfig):
    """A source of conversations (JSONL, JSON, CSV, Parquet or Arrow). A path alone may stand for it."""

    fields: ClassVar[tuple[str, ...]] = (*ConversationSource.fields, "used_in")

    used_in: list[str] = Field([], description="keep records whose used_in names one of these; []: all")
    repeats: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="epochs of it: at most, where there are weights; null: one, or as many as num_tokens needs",
    )
    low_effort: bool = Field(
        False, description="its answers are those to a user who asks for little reasoning (super3)"
    )


class ExampleConfig(Group):
    """Conversations made up by `example.py`: two or three turns, reasoning, a tool or none."""

    num_conversations: int = Field(0, ge=0, description="how many, at scale full; 0: none")
    seed: Seed = Field(7, description="of what they are about")


class PackingConfig(conversations.PackingConfig):
    """Sequences into rows of one length."""

    seq_length: int = Field(4096, ge=16, description="tokens a row at most")
    algorithm: BinPacking = Field(
        "best_fit_decreasing", description="which row a sequence goes to: nemotron.data_prep.chat.bin_packing"
    )
    file_tokens: int = Field(16 * 2**20, ge=1, description="tokens a Parquet file, about: a task's work")
    pad_seq_to_mult: int = Field(
        1,
        ge=1,
        description="every sequence but for its last token is filled up to a multiple of so many, with the tokenizer's "
        "eos_token: what Megatron-Bridge wants of rows that context parallelism cuts, lcm(2 CP, CP TP)",
    )


class PackConfig(SourcesConfig):
    """`nemotron data pack`."""

    scale: Scale = Field("full", description="share of the made-up conversations to use")
    seed: Seed = Field(1234, description="of packing order, held-out splits and reasoning control")
    chat_template: PackTemplate = "nano3"
    sources: list[SourceConfig] = Field(
        [], description="conversations, source by source; a plain string is a path and becomes a source"
    )
    example: ExampleConfig = Field(default_factory=ExampleConfig)
    num_tokens: int | None = Field(
        None, ge=1, description="training tokens, with weights; null: the most that repeats allow"
    )
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    packing: PackingConfig = Field(default_factory=PackingConfig)
    shard_bytes: int = Field(32 * 2**20, ge=1, description="bytes of input a task, where a file can be cut")

    @model_validator(mode="before")
    @classmethod
    def _name_sources(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("sources"), list):
            data = {**data, "sources": named(data["sources"], "conversations")}
        return data

    @model_validator(mode="after")
    def _fits(self) -> Self:
        examples = ["example"] if self.example.num_conversations else []
        if not (self.sources or examples):
            raise ValueError("no conversations: give sources=[FOLDER, …]")
        self.check_sources(self.sources)
        if examples and any(source.name == "example" for source in self.sources):
            raise ValueError("sources: two of the name 'example'")
        unweighed = [source.name for source in self.sources if source.weight is None]
        if not check_weights(self.sources, unweighed + examples) and self.num_tokens is not None:
            raise ValueError("num_tokens goes with weights; without them every source is used `repeats` times")
        for source in self.sources:
            if source.weight and self.held_out(source):
                raise ValueError(f"source {source.name!r} is held out and has weight {source.weight:g}")
            if source.low_effort and self.chat_template in TEMPLATES and self.chat_template != "super3":
                raise ValueError(f"source {source.name!r}: low_effort is for chat_template super3")
        return self
