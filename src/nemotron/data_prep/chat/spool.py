"""Conversations in files -> token ids and masks on disk, shard by shard: the first step of `nemotron data pack`.

A record is checked, rendered, masked and tokenised once. Spool of a shard: `NAME.ids` (int32) and `NAME.mask` (uint8,
aligned to labels), one sequence after another; `NAME.sequences.npy`, a row of `SPOOLED` for each. What is in it depends
on the inputs and the settings only.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from nemo_runspec.errors import UserError
from nemo_runspec.words import plural
from nemotron.data_prep.chat.conversations import (
    Conversation,
    ConversationTable,
    ProtectedPrompts,
    control_reasoning,
    last_turn_only,
    training_spans,
)
from nemotron.data_prep.chat.encoding import encode_conversations
from nemotron.data_prep.chat.loss_weights import (
    category_of,
    check_categories,
    counted,
    look_for_weights,
    loss_weight,
)
from nemotron.data_prep.sources.documents import SPLITS, Split, split_of, stable_hash
from nemotron.data_prep.sources.files import Piece, SourceFile
from nemotron.data_prep.sources.planning import inputs_of, shares_of
from nemotron.data_prep.sources.reader import pieces_of, read_piece, reject, where
from nemotron.data_prep.sources.reading import (
    BEYOND_SCALE,
    EMPTY,
    NOT_ERRORS,
    Reading,
    ReadReport,
    check_kept,
    places,
)
from nemotron.data_prep.tokens.tokenizer import tokenizer_from
from nemotron.data_prep.work.batches import batches
from nemotron.data_prep.work.engines import Engine
from nemotron.data_prep.work.progress import Progress
from nemotron.data_prep.work.shards import Plan, Shard, ShardOutput, run_shards
from nemotron.kit.chat import UntrainableError, check_conversation, control_tokens, render
from nemotron.kit.chat_records import normalize_tools, to_messages, unused_keys
from nemotron.kit.chat_template import is_path, load_template
from nemotron.kit.record_fields import CONVERSATION, TEXT

SPOOLED = np.dtype(
    [
        ("length", "<i4"),
        ("order", "<u8"),
        ("split", "u1"),
        ("loss_weight", "<f4"),
        ("conversation", "<i8"),
        ("trained", "<i4"),
    ]
)
"""Of a sequence: its tokens, a seeded hash, its split as an index in `SPLITS`, what its tokens count in the loss, the
number of its conversation in the shard, and how many of its tokens are trained."""

# Outcomes of records and sequences, beside the reasons of ReadReport and of UntrainableError.
READ, KEPT, EARLIER_TURNS = "read", "kept", "earlier turn, on its own"
NOT_USED_IN = "not among used_in"
CONTROL_TOKEN = "control token in a message"
OVERLAPS = "overlaps evaluation prompt"
NOTHING_TRAINED = "nothing to train on"
NO_WEIGHT = "loss weight 0"
NO_TEXT = "no text in it"
TOO_LONG = "longer than seq_length"
CUT = "cut at seq_length, and kept"

# Sequences tokenised together, and fewer long ones: in the tokenizer's own form tokens take much more memory than here.
_BATCH = 256
_BATCH_CHARS = 1 << 20


def chat_reading(columns: Mapping[str, str], on_error: Literal["stop", "skip"]) -> Reading:
    """How records of conversations are read: whole, and with what `columns` names under the names wanted.

    Where `columns` says which fields are the conversation, these have to be there, and no others are it.
    """
    present = tuple(name for name in columns if name in (*CONVERSATION, TEXT))
    return Reading(on_error, columns=columns, required=(), present=present, rest=True)


@dataclass(frozen=True, slots=True)
class ChatSource:
    """A source of conversations and how it is read.

    `used_in`: keep only records whose column `used_in` names one of these; () keeps all. `low_effort`: its answers are
    those to a user who asks for little reasoning (super3). `max_records`: read at most so many, of every file its share
    by size, from the beginning of each piece. `split_column`: of a record, that says which of `SPLITS` it is in,
    whatever the fractions. `effort_column`: that says of a record what `low_effort` says of all. `guarded`: leave out
    what overlaps with the settings' `protected` prompts. `train_on`: every turn of the assistant, or the answer to the
    last question. `loss_weights`: what a record's `category` counts in the loss, beside its own `loss_weight`. Where
    `reading.columns` names `text`, a record is that, trained whole, and no conversation.
    """

    name: str
    reading: Reading
    used_in: tuple[str, ...] = ()
    low_effort: bool = False
    valid_fraction: float = 0.0
    test_fraction: float = 0.0
    max_records: int | None = None
    split_column: str | None = None
    effort_column: str | None = None
    guarded: bool = False
    train_on: Literal["all", "last"] = "all"
    loss_weights: Mapping[str, float] = field(default_factory=dict)


class Span(NamedTuple):
    """A sequence to train on: `split` is its index in `SPLITS`, `order` a seeded hash, `chars` its length, about.

    `number`: of the conversation that it is of, counted in the shard."""

    conversation: Conversation
    number: int
    split: int
    order: int
    chars: int


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """All that decides how conversations become sequences. `tokenizer`: the text of tokenizer.json.

    `too_long`: whether a sequence of more than `seq_len` tokens is left out or loses its end. `protected`: prompts of
    evaluation tasks. `multiple`: a sequence is padded with `pad_id` to so many tokens or a multiple of them, and one:
    its last token is no input.
    """

    tokenizer: str
    template: str
    seq_len: int
    too_long: Literal["drop", "cut"]
    reasoning_off: float
    reasoning_truncated: float
    seed: int
    sources: dict[str, ChatSource]
    protected: tuple[str, ...] = ()
    multiple: int = 1
    pad_id: int = 0

    def to_json(self) -> dict[str, Any]:
        """For the plan: the tokenizer by its digest."""
        tokenizer = hashlib.sha256(self.tokenizer.encode()).hexdigest()
        return {name: getattr(self, name) for name in self.__slots__} | {"tokenizer": tokenizer}


@dataclass(frozen=True, slots=True)
class ChatWork:
    """What a task reads: a piece of a source, of it at most so many records (None: all)."""

    source: str
    piece: Piece
    max_records: int | None


@dataclass(frozen=True, slots=True)
class ChatCounts:
    """What a task returns.

    `outcomes`: records read and dropped for which reason, sequences kept; `errors`: of them the reasons that would have
    stopped the run; `samples`: of what was dropped; `reasoning`: sequences kept that end in an answer with reasoning;
    `unused_keys`: of messages; `categories`: records of each, where they have weights; `longest`: tokens of the longest
    sequence, kept or not; `unread_bytes`: as in `ReadReport`.
    """

    outcomes: dict[str, int]
    reasoning: int
    unused_keys: dict[str, int]
    categories: dict[str, int]
    longest: int
    sequences: int
    tokens: int
    errors: dict[str, int]
    samples: list[dict[str, str]]
    unread_bytes: int


def plan_tokenize(
    settings: ChatSettings, files: Mapping[str, Sequence[SourceFile]], shard_bytes: int
) -> Plan[ChatWork]:
    """A shard a piece of about `shard_bytes` of a file, source by source, files sorted."""
    shards: list[Shard[ChatWork]] = []
    for name, source in settings.sources.items():
        pieces = [piece for file in files[name] for piece in pieces_of(file, shard_bytes)]
        shares = shares_of(source.max_records, [piece.size for piece in pieces])
        for number, (piece, share) in enumerate(zip(pieces, shares, strict=True)):
            if share != 0:
                shards.append(Shard(f"{name}-{number:05d}", ChatWork(name, piece, share)))
    return Plan(settings.to_json(), inputs_of(file for name in settings.sources for file in files[name]), shards)


def tokenize_shard(shard: Shard[ChatWork], settings: ChatSettings, output: ShardOutput) -> ChatCounts:
    """A task: one piece of a source into the spool.

    UserError for the first record that cannot be trained on, unless the source says to skip those.
    """
    source = settings.sources[shard.work.source]
    account = _Account()
    outcomes = account.outcomes
    sequences: list[tuple[int, int, int, float, int, int]] = []
    reasoning = longest = 0
    tokenizer = tokenizer_from(settings.tokenizer)
    most = (settings.seq_len - 1) // settings.multiple * settings.multiple + 1
    with (
        output.path(f"{shard.name}.ids").open("wb") as ids_file,
        output.path(f"{shard.name}.mask").open("wb") as mask_file,
    ):
        spans = _spans(_conversations(shard.work, source, settings.template, account), source, settings, outcomes)
        for batch in batches(spans, lambda span: span.chars, _BATCH_CHARS, _BATCH):
            encoded = encode_conversations([span.conversation for span in batch], tokenizer, settings.template)
            for span, (ids, mask) in zip(batch, encoded, strict=True):
                longest = max(longest, len(ids))
                if len(ids) > most:
                    outcomes[TOO_LONG if settings.too_long == "drop" else CUT] += 1
                    if settings.too_long == "drop":
                        continue
                    ids, mask = ids[:most], mask[:most].copy()
                    mask[-1] = 0  # its label is what was cut off
                if not mask.any():
                    outcomes[NOTHING_TRAINED] += 1
                    continue
                padding = (0, -(len(ids) - 1) % settings.multiple)
                ids, mask = np.pad(ids, padding, constant_values=settings.pad_id), np.pad(mask, padding)
                ids_file.write(ids.astype("<i4", copy=False).tobytes())
                mask_file.write(mask.tobytes())
                weight, trained = span.conversation.loss_weight, int(np.count_nonzero(mask))
                sequences.append((len(ids), span.order, span.split, weight, span.number, trained))
                reasoning += _reasons(span.conversation)
    np.save(output.path(f"{shard.name}.sequences.npy"), np.array(sequences, SPOOLED), allow_pickle=False)
    report = account.report
    outcomes.update(report.skipped)
    outcomes[READ] = report.records + sum(report.skipped.values()) - report.skipped.get(EMPTY, 0)
    outcomes[KEPT] = len(sequences)
    tokens = sum(sequence[0] for sequence in sequences)
    return ChatCounts(
        outcomes=outcomes,
        reasoning=reasoning,
        unused_keys=account.unused_keys,
        categories=account.categories,
        longest=longest,
        sequences=len(sequences),
        tokens=tokens,
        errors=report.errors(),
        samples=report.samples,
        unread_bytes=report.unread_bytes,
    )


def _reasons(conversation: Conversation) -> bool:
    """Whether the last answer comes after reasoning."""
    answers = [message for message in conversation.messages if message["role"] == "assistant"]
    return bool(answers and answers[-1].get("reasoning_content"))


@dataclass
class _Account:
    """What becomes of the records of a piece, as `ChatCounts` has it."""

    report: ReadReport = field(default_factory=ReadReport)
    outcomes: Counter[str] = field(default_factory=Counter)
    unused_keys: Counter[str] = field(default_factory=Counter)
    categories: Counter[str] = field(default_factory=Counter)


@dataclass
class Spool:
    """What all shards made of the records, by source: outcomes, samples of what was dropped, the errors, the keys of
    messages that were not used, the records of each category, the tokens of the longest sequence.
    `unread_bytes`: as in `ReadReport`; `reasoning`: sequences that end in an answer with reasoning."""

    table: ConversationTable = field(default_factory=ConversationTable)
    samples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    errors: dict[str, Counter[str]] = field(default_factory=dict)
    unused_keys: dict[str, Counter[str]] = field(default_factory=dict)
    categories: dict[str, Counter[str]] = field(default_factory=dict)
    longest: Counter[str] = field(default_factory=Counter)
    unread_bytes: Counter[str] = field(default_factory=Counter)
    reasoning: int = 0

    def reasons(self, settings: ChatSettings) -> bool | None:
        """Whether most conversations have reasoning before their last answer: how the model is to be asked.

        None: of the template it cannot be asked.
        """
        if not load_template(settings.template).has_switch("enable_thinking"):
            return None
        texts = {name for name, source in settings.sources.items() if TEXT in source.reading.columns}
        kept = sum(of_source.get(KEPT, 0) for name, of_source in self.table.counts.items() if name not in texts)
        return 2 * self.reasoning > kept

    def notes(self, settings: ChatSettings) -> list[str]:
        """What people have to know beside the table: lines."""
        weights = [
            f"{name}: loss weight by category: {counted(self.categories[name], source.loss_weights)}"
            for name, source in settings.sources.items()
            if source.loss_weights
        ]
        return weights + [
            f"{name}: keys of messages that the chat template does not show: "
            + ", ".join(f"{key!r} ({count:,})" for key, count in sorted(keys.items()))
            for name, keys in self.unused_keys.items()
            if keys
        ]

    def _examples(self, source: str) -> dict[str, str]:
        """Of each reason for which records of a source could not be read, one that shows it."""
        return {
            reason: f"as {sample['where']}: {sample['reason']}"
            for sample in reversed(self.samples[source])
            for reason in self.errors[source]
            if sample["reason"].startswith(f"{reason}: ")
        }

    def check_own(self, source: str, settings: ChatSettings) -> None:
        """Say where most of a source of the user's was dropped; UserError where nothing is in it, or left of it.

        Sequences are counted where a record becomes several, as some of them may be dropped and others kept.
        """
        outcomes = self.table.counts.get(source, {})
        kept, earlier = outcomes.get(KEPT, 0), outcomes.get(EARLIER_TURNS, 0)
        if not outcomes.get(READ):  # a header alone, a table without rows
            raise UserError(f"source {source!r} is empty: no record in {places(self.samples[source])}")
        asked_for = (NOT_USED_IN, NO_WEIGHT) if kept else ()
        no_drop = {READ, KEPT, EARLIER_TURNS, CUT, *NOT_ERRORS, *asked_for}
        check_kept(
            source,
            read=outcomes.get(READ, 0) - outcomes.get(BEYOND_SCALE, 0) + earlier,
            kept=kept,
            dropped={outcome: count for outcome, count in outcomes.items() if outcome not in no_drop},
            unit="sequences" if earlier else "read",
            remedies={
                **self._examples(source),
                TOO_LONG: f"the longest has {self.longest[source]:,} tokens, a row {settings.seq_len:,}: raise "
                "packing.seq_length, or keep their beginnings by packing.too_long=cut",
                CONTROL_TOKEN: f"{', '.join(control_tokens(settings.template))} may not stand in a message, where the "
                f"model would read the beginning or end of a turn (chat template {settings.template})",
                OVERLAPS: "what evaluation asks is not trained on; evaluation_tasks: how many tasks a family it asks",
                NOT_USED_IN: f"used_in of the source is {', '.join(settings.sources[source].used_in)}",
                NO_WEIGHT: "loss_weights of the source and loss_weight of its records multiply to 0",
            },
        )


def tokenize_conversations(plan: Plan[ChatWork], folder: Path, settings: ChatSettings, engine: Engine) -> Spool:
    """Do a frozen plan's shards in `folder`. Shows on stderr how far it is.

    UserError: a category of a source's `loss_weights`, or its column of weights, is in no record; before the work where
    that can be seen.
    """
    for source in settings.sources.values():
        if source.loss_weights or "loss_weight" in source.reading.columns:
            pieces = (shard.work.piece for shard in plan.shards if shard.work.source == source.name)
            look_for_weights(source.name, pieces, source.loss_weights, source.reading.columns)
    names = list(settings.sources)
    errors, unused, categories = ({name: Counter[str]() for name in names} for _ in range(3))
    samples: dict[str, list[dict[str, str]]] = {name: [] for name in names}
    spool = Spool(samples=samples, errors=errors, unused_keys=unused, categories=categories)
    total_bytes = sum(shard.work.piece.size for shard in plan.shards)
    with Progress("tokenize", total_bytes, "sequence") as progress:
        receipts = run_shards(plan, folder, tokenize_shard, settings, engine, ChatCounts)
        for shard, (receipt, was_done) in zip(plan.shards, receipts, strict=True):
            work, counts = shard.work, receipt.counts
            for outcome, count in counts.outcomes.items():
                spool.table.count(work.source, outcome, count)
            spool.samples[work.source] += counts.samples
            spool.errors[work.source].update(counts.errors)
            spool.unread_bytes[work.source] += counts.unread_bytes
            spool.unused_keys[work.source].update(counts.unused_keys)
            spool.categories[work.source].update(counts.categories)
            spool.longest[work.source] = max(spool.longest[work.source], counts.longest)
            spool.reasoning += counts.reasoning
            progress.add(rows=counts.sequences, tokens=counts.tokens, bytes=work.piece.size, was_done=was_done)
    for name, source in settings.sources.items():
        is_part = source.max_records is not None or spool.table.counts.get(name, {}).get(BEYOND_SCALE, 0) > 0
        if not is_part:  # of a part the rare categories may be missing
            column = source.reading.columns.get("category", "category")
            check_categories(name, source.loss_weights, spool.categories[name], column)
    return spool


def _conversations(work: ChatWork, source: ChatSource, template: str, account: _Account) -> Iterator[Conversation]:
    """The conversations of a piece that can be trained on; the others are counted."""
    report, outcomes = account.report, account.outcomes
    for row in islice(read_piece(work.piece, source.reading, report), work.max_records):
        if source.used_in and not any(name in _names(row.value.get("used_in")) for name in source.used_in):
            outcomes[NOT_USED_IN] += 1
            continue
        try:
            conversation = as_conversation(row.value, source, work.piece)
            check_trainable(conversation, template)
        except UntrainableError as error:
            if source.reading.on_error == "stop":
                at = where(work.piece, row.index)
                raise UserError(f"{at}: {error.message}", error.hint or "on_error: skip leaves such out") from None
            detail = error.message.removeprefix(f"{error.reason}: ") + (f" ({error.hint})" if error.hint else "")
            reject(work.piece, row.index, report, error.reason, detail)
            continue
        account.unused_keys.update(unused_keys(conversation.messages, template))
        if source.loss_weights:
            account.categories[category_of(row.value)] += 1
        if not conversation.loss_weight:
            outcomes[NO_WEIGHT] += 1
            continue
        yield conversation


def check_trainable(conversation: Conversation, template: str) -> None:
    """UntrainableError: it breaks the rules of conversations, or a user's template refuses what a family's takes, such
    as two user turns."""
    if conversation.text is not None:
        return
    check_conversation(conversation.messages, conversation.tools)
    if is_path(template):
        try:
            render(conversation.messages, tools=conversation.tools, template=template)
        except UserError as error:
            raise UntrainableError("refused by the chat template", error.message, error.hint) from None


def _names(used_in: object) -> list[object]:
    """A column `used_in` as a list, whether it is one, one name, or none."""
    return used_in if isinstance(used_in, list) else [used_in]


def as_conversation(record: Mapping[str, Any], source: ChatSource, piece: Piece) -> Conversation:
    """A record's messages and tools in the form of the templates; whether they can be trained on is not checked yet.

    UntrainableError: no conversation is found in it, or its weight is none.
    """
    if asked := source.reading.present:
        record = {name: value for name, value in record.items() if name in asked or name not in CONVERSATION}
    if piece.file.format == "csv" and "loss_weight" in record:
        record = {**record, "loss_weight": _number_in(record["loss_weight"])}
    split: Split = record[source.split_column] if source.split_column else "train"
    weight = loss_weight(record, source.loss_weights)
    if TEXT in asked:
        if not isinstance(record.get(TEXT), str) or not record[TEXT].strip():
            raise UntrainableError(NO_TEXT, f"{NO_TEXT}: the field that is to be text holds none")
        return Conversation(source.name, [], split, loss_weight=weight, text=record[TEXT])
    tools = normalize_tools(record.get("tools"))
    low_effort = source.low_effort or bool(source.effort_column and record.get(source.effort_column))
    return Conversation(source.name, to_messages(record), split, tools, low_effort, weight)


def _number_in(cell: str) -> float | str | None:
    """The number that a cell of CSV holds, where all values are text: None if it is empty, the text if it is none."""
    try:
        return float(cell) if cell.strip() else None
    except ValueError:
        return cell


def _spans(
    conversations: Iterable[Conversation], source: ChatSource, settings: ChatSettings, outcomes: Counter[str]
) -> Iterator[Span]:
    """Sequences to train on: reasoning stripped or cut in some conversations, and a sequence of its own for every turn
    that the template would not show as it was produced."""
    if settings.reasoning_off or settings.reasoning_truncated:
        conversations = control_reasoning(
            conversations,
            off_share=settings.reasoning_off,
            truncated_share=settings.reasoning_truncated,
            seed=settings.seed,
        )
    forbidden = control_tokens(settings.template)
    seed = str(settings.seed)
    for number, conversation in enumerate(conversations):
        key = conversation.key(settings.template)
        if any(token in key for token in forbidden):
            outcomes[CONTROL_TOKEN] += 1
            continue
        if source.guarded and _protected(settings.protected).overlap(conversation):
            outcomes[OVERLAPS] += 1
            continue
        if source.split_column is None:
            # Else what is held out would be trained on in another answer to its question, or in a longer record of it.
            opening = conversation.opening_key(settings.template)
            split = split_of(opening, source.valid_fraction, settings.seed, source.test_fraction)
        else:
            split = conversation.split
        if source.train_on == "last" and conversation.text is None:
            conversation = last_turn_only(conversation)
        spans = list(training_spans(conversation, settings.template))
        if not spans:
            outcomes[NOTHING_TRAINED] += 1
        effort = ("low_effort",) if conversation.low_effort else ()
        for i, span in enumerate(spans):
            if i:
                outcomes[EARLIER_TURNS] += 1
            messages = conversation.messages[: len(span.messages)]  # with the weights that they had
            whole = len(messages) == len(conversation.messages)
            span_key = key if whole else replace(conversation, messages=messages).key(settings.template)
            order = stable_hash("pack", seed, span_key, *effort)
            yield Span(span, number, SPLITS.index(split), order, len(span_key))


@lru_cache(maxsize=1)
def _protected(prompts: tuple[str, ...]) -> ProtectedPrompts:
    return ProtectedPrompts(prompts)  # made once a process


def sum_of(outcomes: Mapping[str, int]) -> str:
    """How the sequences kept follow from the records read, for people: one line."""
    no_drop = (READ, KEPT, EARLIER_TURNS, CUT, EMPTY)
    left_out = sum(count for outcome, count in outcomes.items() if outcome not in no_drop)
    read, kept, earlier = (outcomes.get(outcome, 0) for outcome in (READ, KEPT, EARLIER_TURNS))
    kept_of = f"{left_out:,} left out + {earlier:,} up to earlier turns = {kept:,} {plural(kept, 'sequence')} kept"
    return f"{read:,} {plural(read, 'record')} read - {kept_of}"
