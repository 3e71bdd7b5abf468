"""Conversations for SFT: reading the user's own, reasoning control, and one training sequence per span of user turns.

Reasoning control follows the Nemotron 3 Nano report, section 3.1: traces are stripped from 10 % of the samples, so that
the model also answers with reasoning off, and 3 % are cut to a random budget with the original answer kept, so that it
can be made to stop thinking.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any, Literal, TypeVar

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.decontamination import Decontaminator, words
from nemotron.data_prep.sources.documents import Split, split_of, stable_hash
from nemotron.data_prep.sources.files import Format, SourceFile
from nemotron.data_prep.sources.locations import described
from nemotron.data_prep.sources.pieces import whole
from nemotron.data_prep.sources.reader import read_piece, row_id
from nemotron.data_prep.sources.reading import Reading, ReadReport
from nemotron.kit.chat import (
    CONTROL_TOKENS,
    NO_ANSWER,
    UntrainableError,
    check_conversation,
    normalize_messages,
    normalize_tools,
)
from nemotron.kit.chat_template import load_template

Item = TypeVar("Item")
_SHOWN = ("role", "content", "reasoning_content", "tool_calls")  # of a message, by the templates


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as `nemotron.kit.chat` defines them, the name of their source, and their split.

    `tools`: what is declared to the model. `low_effort`: the answers are those to a user who asks for little reasoning.
    """

    source: str
    messages: list[dict[str, Any]]
    split: Split
    tools: list[dict[str, Any]] | None = None
    low_effort: bool = False

    def key(self) -> str:
        """Canonical JSON of what templates show of the messages, and of tools if there are any: conversations that are
        equal but for the rest (the id of a message, its date) have equal keys."""
        messages = [{name: message[name] for name in _SHOWN if name in message} for message in self.messages]
        content = [messages, self.tools] if self.tools else messages
        return json.dumps(content, sort_keys=True, ensure_ascii=False)


@dataclass
class ConversationTable:
    """How many conversations were read, kept, and dropped for which reason, by source."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    capped: dict[str, str] = field(default_factory=dict)  # source -> the key that left out the rest of it

    def first(self, source: str, items: Iterable[Item], most: int | None, key: str) -> Iterator[Item]:
        """At most so many of a source's items (null: all); where there are more, the table says that `key` cut them."""
        items = iter(items)
        yield from islice(items, most)
        try:
            more = most is not None and next(items, None) is not None
        except UserError:  # what is behind the cap stops nobody
            more = True
        if more:
            self.capped[source] = key
            self.count(source, f"the first only ({key})", most or 0)

    def count(self, source: str, outcome: str, n: int = 1) -> None:
        """Add `n` to one outcome ("read", "kept" or the reason of a drop)."""
        row = self.counts.setdefault(source, {})
        row[outcome] = row.get(outcome, 0) + n

    def rows(self) -> list[dict[str, str | int]]:
        """Flat rows: source, outcome, conversations."""
        return [
            {"source": source, "outcome": outcome, "conversations": count}
            for source, outcomes in sorted(self.counts.items())
            for outcome, count in sorted(outcomes.items(), key=_outcome_order)
        ]

    def __str__(self) -> str:
        """The table for people, one line a row."""
        lines = [f"{'source':<24} {'outcome':<36} {'conversations':>13}"]
        lines += [f"{row['source']:<24} {row['outcome']:<36} {row['conversations']:>13}" for row in self.rows()]
        for source, key in sorted(self.capped.items()):
            number = self.counts[source][f"the first only ({key})"]
            lines.append(f"{key}: the first {number} records of {source}; more are there")
        return "\n".join(lines)


def _outcome_order(item: tuple[str, int]) -> tuple[int, str]:
    return {"read": 0, "kept": 1}.get(item[0], 2), item[0]


CONVERSATION_FORMATS: tuple[Format, ...] = ("jsonl", "parquet", "arrow")


def read_conversations(
    name: str,
    files: Sequence[SourceFile],
    messages_field: str,
    valid_fraction: float,
    seed: int,
    on_error: Literal["stop", "skip"] = "stop",
    report: ReadReport | None = None,
) -> Iterator[Conversation]:
    """The user's conversations, with `tools` where a record has them, from JSONL, Parquet or Arrow files.

    Under `skip`, what is not right is counted in `report`. UserError with file and row, under `stop`: a record that
    cannot be read, a missing field, messages that no template can render, a call of a tool that is not declared;
    always, when there is no record at all.
    """
    report = ReadReport() if report is None else report
    columns = {"messages": messages_field, "tools": "tools"}
    reading = Reading(on_error, columns=columns, required=(), present=("messages",))
    for file in files:
        piece = whole(file)
        for row in read_piece(piece, reading, report):
            place = row_id(piece, row.index)
            messages, tools = normalize_messages(row.value["messages"]), normalize_tools(row.value.get("tools"))
            try:
                if not isinstance(messages, list) or not messages:
                    problem = f"field {messages_field!r} must be a list of messages"
                    raise UntrainableError("malformed messages", problem, "set messages_field")
                check_conversation(messages, tools)
            except UntrainableError as error:
                if error.reason != NO_ANSWER:  # `curate_conversations` counts those
                    if on_error == "stop":
                        raise UserError(f"{place}: {error.message}", error.hint) from None
                    report.records -= 1
                    report.skip(error.reason, place, error.message.removeprefix(f"{error.reason}: "))
                    continue
            conversation = Conversation(name, messages, "train", tools)
            yield replace(conversation, split=split_of(conversation.key(), valid_fraction, seed))
    if report.records == 0:
        raise UserError(
            f"source {name!r} is empty: no conversation in {len(files)} files, the first of them {files[0].uri}",
            f"not read: {described(report.skipped)}" if report.skipped else None,
        )


def curate_conversations(
    conversations: Iterable[Conversation], protected_prompts: Iterable[str], table: ConversationTable
) -> Iterator[Conversation]:
    """Drop what must not be trained on: exact repeats, control tokens inside a message, no assistant turn, overlap of a
    user turn with an evaluation prompt. For conversations from outside; generated ones are held out by construction."""
    protected = list(protected_prompts)
    exact = {" ".join(words(prompt)) for prompt in protected}  # also those too short for the n-gram rule
    decontaminator = Decontaminator(boilerplate_documents=0)
    decontaminator.protect(protected)
    seen: set[int] = set()
    for conversation in conversations:
        table.count(conversation.source, "read")
        content = conversation.key()
        key = stable_hash(content)
        prompts = [m["content"] for m in conversation.messages if m["role"] == "user"]
        if key in seen:
            table.count(conversation.source, "exact duplicate")
        elif any(token in content for token in CONTROL_TOKENS):
            table.count(conversation.source, "control token in a message")
        elif not any(message["role"] == "assistant" for message in conversation.messages):
            table.count(conversation.source, NO_ANSWER)
        elif any(" ".join(words(prompt)) in exact or decontaminator.observe(prompt) for prompt in prompts):
            table.count(conversation.source, "overlaps evaluation prompt")
        else:
            seen.add(key)
            yield conversation


def control_reasoning(
    conversations: Iterable[Conversation], *, off_share: float, truncated_share: float, seed: int
) -> Iterator[Conversation]:
    """Strip the reasoning of a share of the conversations and cut that of another share at a random word.

    Which ones is decided by the hash of each conversation, so that neither order nor neighbours matter.
    """
    for conversation in conversations:
        draw = stable_hash("reasoning", str(seed), conversation.key()) / 2**64
        if draw >= off_share + truncated_share:
            yield conversation
            continue
        # Within its share the draw is again uniform in [0, 1): the fraction of the words that is kept.
        kept = 0.0 if draw < off_share else (draw - off_share) / truncated_share
        messages = []
        for message in conversation.messages:
            reasoning = message.get("reasoning_content")
            if reasoning:
                trace = reasoning.split(" ")
                cut = " ".join(trace[: int(kept * len(trace))])
                message = {key: value for key, value in message.items() if key != "reasoning_content"}
                if cut:
                    message["reasoning_content"] = cut
            messages.append(message)
        yield replace(conversation, messages=messages)


def training_spans(conversation: Conversation, template: str = "nano3") -> Iterator[Conversation]:
    """The sequences to train on so that every assistant turn is trained exactly as it is produced.

    A template that drops the reasoning of turns before the last user turn (nano3, super3) does not train those turns: a
    conversation in which that happens is therefore also emitted up to each earlier user turn's answer; any other stays
    one sequence. With a template that writes every earlier turn differently from how it was produced (nano2), each
    assistant turn ends a sequence of its own.
    """
    messages = conversation.messages
    form = load_template(template)
    if not form.keeps_turns:
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                yield replace(conversation, messages=messages[: i + 1])
        return
    if form.keeps_reasoning:
        yield conversation
        return
    user_turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    for i, following in pairwise(user_turns):
        if any(message.get("reasoning_content") for message in messages[i + 1 : following]):
            yield replace(conversation, messages=messages[:following])
    yield conversation
