"""What becomes of conversations: reasoning taken off some of them, and rows of one length."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from nemo_runspec.user_files import TO_COME, UserFiles, local_path
from nemotron.kit.chat_templates import CHOICES, OF_TOKENIZER, TEMPLATES, is_path, unknown
from nemotron.kit.record_fields import ABOUT_IT, CONVERSATION, TEXT
from nemotron.kit.schemas.group import Group
from nemotron.kit.schemas.sources import Fraction, UserSource


def _check_template(template: str) -> str:
    """A family's template by name, or an absolute path; that there is something is looked at later (`UserFiles`)."""
    if template in TEMPLATES or TO_COME in template:
        return template
    if not is_path(template):
        raise ValueError(unknown(template))
    return str(local_path(template))


ChatTemplate: TypeAlias = Annotated[
    str,
    AfterValidator(_check_template),
    UserFiles(names=TEMPLATES),
    Field(description=f"how messages become text: {CHOICES}"),
]
PackTemplate: TypeAlias = Annotated[
    str,
    AfterValidator(lambda template: template if template == OF_TOKENIZER else _check_template(template)),
    UserFiles(names=(*TEMPLATES, OF_TOKENIZER)),
    Field(description=f"how messages become text: {CHOICES}; {OF_TOKENIZER}: the tokenizer's own"),
]
BinPacking = Literal[
    "best_fit",
    "best_fit_decreasing",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "modified_first_fit_decreasing",
]


class ConversationSource(UserSource):
    """What can be said of a source of conversations."""

    fields: ClassVar[tuple[str, ...]] = (*CONVERSATION, TEXT, *ABOUT_IT)
    other_names: ClassVar[dict[str, str]] = UserSource.other_names | {
        "messages_field": "columns: {messages: …}",
        "max_examples": "max_conversations",
        "train_on_last": "train_on: last",
        "mask_history": "train_on: last",
    }

    train_on: Literal["all", "last"] = Field(
        "all",
        description="which answers are trained: all, or the one to the last question, the steps with tools before it "
        "included",
    )
    loss_weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        {},
        description="category of a record -> what its tokens count in the loss, 1 for the others: {hard: 2}; "
        "`columns: {category: FIELD}` names the field. A record's own `loss_weight` multiplies it",
    )
    max_conversations: int | None = Field(
        None, ge=1, description="conversations read at most, of each file its share; null: all"
    )


class ReasoningConfig(Group):
    """Reasoning control: which conversations lose their reasoning, by hash."""

    off_share: Fraction = Field(0.0, description="share of conversations whose reasoning is stripped")
    truncated_share: Fraction = Field(0.0, description="share whose reasoning is cut at a random word")

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.off_share + self.truncated_share > 1:
            raise ValueError(f"off_share {self.off_share} + truncated_share {self.truncated_share} exceed 1")
        return self


class PackingConfig(Group):
    """Conversations into rows of one length."""

    seq_length: int = Field(ge=16, description="tokens a row at most")
    too_long: Literal["drop", "cut"] = Field("drop", description="what is done to a longer sequence; both are counted")
    algorithm: BinPacking = Field(description="which row a conversation goes to: nemotron.data_prep.chat.bin_packing")
    conversation_tokens: bool = Field(
        False,
        description="rows also say how many tokens are trained of the conversation that each sequence is of: what "
        "train.loss_reduction=conversation of SFT divides by",
    )
