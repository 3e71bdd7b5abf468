"""Conversations for SFT: reading the user's own, reasoning control, and one training sequence per span of user turns.

Reasoning control follows the Nemotron 3 Nano report, section 3.1: traces are stripped from 10 % of the samples, so that
the model also answers with reasoning off, and 3 % are cut to a random budget with the original answer kept, so that it
can be made to stop thinking.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any, TypeVar

from nemo_runspec.errors import UserError
from nemotron.data_prep.curation.decontamination import hits, protect, words
from nemotron.data_prep.sources.documents import Split, stable_hash
from nemotron.kit.chat_records import unused_keys
from nemotron.kit.chat_template import is_path, load_template
from nemotron.kit.tables import aligned

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as `nemotron.kit.chat` defines them, the name of their source, and their split.

    `tools`: what is declared to the model. `low_effort`: the answers are those to a user who asks for little reasoning.
    `loss_weight`: how much each of its trained tokens counts in the loss. `text`: a stretch of plain text in the place
    of messages: no template, every token trained, and nothing behind it that would say that it ends there.
    """

    source: str
    messages: list[dict[str, Any]]
    split: Split
    tools: list[dict[str, Any]] | None = None
    low_effort: bool = False
    loss_weight: float = 1.0
    text: str | None = None

    def key(self, template: str = "nano3") -> str:
        """Canonical JSON of what `template` shows of the messages (every family shows the same), which of them are not
        trained, and tools if there are any: conversations that are equal but for the rest (the id of a message, its
        date) have equal keys."""
        if self.text is not None:
            return self.text
        unused = unused_keys(self.messages, template)
        messages = [{name: message[name] for name in message if name not in unused} for message in self.messages]
        for message in () if is_path(template) else messages:
            if calls := message.get("tool_calls"):  # their ids are not shown
                message["tool_calls"] = [{k: call[k] for k in call if k not in ("id", "type")} for call in calls]
        content = [messages, self.tools] if self.tools else messages
        return json.dumps(content, sort_keys=True, ensure_ascii=False)

    def opening_key(self, template: str = "nano3") -> str:
        """`key` of the messages up to the first of the user: equal for other answers to it, and for a conversation that
        was recorded again when it was longer."""
        roles = [message["role"] for message in self.messages]
        opening = roles.index("user") + 1 if "user" in roles else len(roles)
        return replace(self, messages=self.messages[:opening]).key(template)


@dataclass
class ConversationTable:
    """How many conversations were read, kept, and dropped for which reason, by source.

    `unit`: what the table for people calls them; the rows keep one name.
    """

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    capped: dict[str, str] = field(default_factory=dict)  # source -> the key that left out the rest of it
    unit: str = "conversations"

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
        head = ("source", "outcome", "conversations")
        rows = [[str(row[name]) for name in head] for row in self.rows()]
        lines = aligned([("source", "outcome", self.unit), *rows], "<<>")
        for source, key in sorted(self.capped.items()):
            number = self.counts[source][f"the first only ({key})"]
            lines.append(f"{key}: the first {number} records of {source}; more are there")
        return "\n".join(lines)


def _outcome_order(item: tuple[str, int]) -> tuple[int, str]:
    return {"read": 0, "kept": 1}.get(item[0], 2), item[0]


class ProtectedPrompts:
    """The prompts of evaluation tasks, which nothing may be trained on."""

    def __init__(self, prompts: Iterable[str]) -> None:
        prompts = list(prompts)
        self._exact = {" ".join(words(prompt)) for prompt in prompts}  # also those too short for the n-gram rule
        self._protected = protect(prompts)

    def overlap(self, conversation: Conversation) -> bool:
        """Whether a user turn, or the text, equals one of them, but for punctuation and layout, or has an n-gram in
        common."""
        prompts = [message["content"] for message in conversation.messages if message["role"] == "user"]
        prompts += [conversation.text] if conversation.text is not None else []
        return any(" ".join(words(text)) in self._exact or len(hits(text, self._protected)) for text in prompts)


def control_reasoning(
    conversations: Iterable[Conversation], *, off_share: float, truncated_share: float, seed: int
) -> Iterator[Conversation]:
    """Strip the reasoning of a share of the conversations and cut that of another share at a random word, or character.

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
                # Japanese and Chinese have no blanks: they are cut at a character.
                between = " " if reasoning.isascii() or reasoning.count(" ") * 20 > len(reasoning) else ""
                trace = reasoning.split(" ") if between else list(reasoning)
                cut = between.join(trace[: int(kept * len(trace))])
                message = {key: value for key, value in message.items() if key != "reasoning_content"}
                if cut:
                    message["reasoning_content"] = cut
            messages.append(message)
        yield replace(conversation, messages=messages)


def last_turn_only(conversation: Conversation) -> Conversation:
    """The conversation with the answer to its last question alone trained, the steps with tools before it included."""
    messages = conversation.messages
    answer = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    question = max((i for i in range(answer) if messages[i]["role"] == "user"), default=-1)
    return replace(conversation, messages=_without_weight(messages, max(question, 0)))


def training_spans(conversation: Conversation, template: str) -> Iterator[Conversation]:
    """The sequences to train on so that every assistant turn is trained exactly as it is produced.

    A template that drops the reasoning of turns before the last user turn (all but nano2) does not train those turns: a
    conversation in which that happens is therefore also emitted up to each earlier user turn's answer, and what one
    sequence trains has weight 0 in the next; any other stays one sequence. With a template that writes every earlier
    turn differently from how it was produced (nano2), each assistant turn ends a sequence of its own. A turn of weight
    0 needs no sequence.
    """
    messages = conversation.messages
    if conversation.text is not None:
        yield conversation
        return
    form = load_template(template)
    if not form.keeps_turns:
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and message.get("weight") != 0:
                yield replace(conversation, messages=messages[: i + 1])
        return
    if form.keeps_reasoning:
        yield conversation
        return
    user_turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    trained = 0  # messages of the sequences so far
    for i, following in pairwise(user_turns):
        turn = messages[i + 1 : following]
        if any(message.get("reasoning_content") and message.get("weight") != 0 for message in turn):
            yield replace(conversation, messages=_without_weight(messages[:following], trained))
            trained = following
    yield replace(conversation, messages=_without_weight(messages, trained)) if trained else conversation


def _without_weight(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The messages, the responses among the first `count` of them with weight 0."""
    return [
        {**message, "weight": 0} if i < count and message["role"] == "assistant" else message
        for i, message in enumerate(messages)
    ]
