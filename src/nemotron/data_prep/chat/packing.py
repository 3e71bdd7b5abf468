"""Conversations -> token ids with a loss mask -> rows of at most `seq_len` tokens in Parquet.

Columns, one row per packed sequence: `input_ids` (int32), `loss_mask` (uint8) and `seq_start_id` (int32: where each
conversation begins in the row). The mask is aligned to *labels* within each conversation: position i is 1 when the
label at i, which is token i + 1, is trained; the last position of every conversation is 0, so that none is trained to
predict the beginning of the next (`mask[1:] + [0]` per conversation, as in the packed format of the full-size
pipeline).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nemotron.data_prep.chat.bin_packing import Algorithm, pack_lengths
from nemotron.data_prep.chat.conversations import Conversation
from nemotron.data_prep.sources.documents import Split, stable_hash
from nemotron.data_prep.tokens.tokenizer import tokenizer_from
from nemotron.data_prep.work.engines import Engine, SerialEngine
from nemotron.kit.chat import render_with_mask

PACKED_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("seq_start_id", pa.list_(pa.int32())),
    ]
)

_BATCH = 512  # conversations a task


@dataclass(frozen=True, slots=True)
class TokenizedConversation:
    """`input_ids` int32 [T]; `loss_mask` uint8 [T], aligned to labels; `order` is a seeded hash of the content."""

    source: str
    split: Split
    input_ids: np.ndarray
    loss_mask: np.ndarray
    order: int


@dataclass(frozen=True, slots=True)
class PackStatistics:
    """What a packed file holds. `fill` is tokens / (rows x seq_len); `trained_tokens` counts mask ones.

    No packing of the same conversations, whole, has fewer rows than `fewest_rows`.
    """

    algorithm: Algorithm
    rows: int
    fewest_rows: int
    conversations: int
    tokens: int
    trained_tokens: int
    fill: float

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{self.conversations} conversations in {self.rows} rows (at least {self.fewest_rows} needed), "
            f"{self.tokens} tokens ({self.trained_tokens} trained), rows {self.fill:.1%} full"
        )


def tokenize_conversations(
    conversations: Iterable[Conversation],
    tokenizer: Tokenizer,
    *,
    template: str = "nano3",
    seed: int = 0,
    engine: Engine | None = None,
) -> Iterator[TokenizedConversation]:
    """Ids and label-aligned mask of each conversation, segment by segment (see `chat.render_with_mask`).

    Because a prompt is tokenised on its own, its tokens in training are exactly those at inference. `engine` does it
    (default: this process).
    """
    iterator = iter(conversations)
    batches = iter(lambda: list(islice(iterator, _BATCH)), [])
    shared = tokenizer.to_str(), template, seed
    return chain.from_iterable((engine or SerialEngine()).map_ordered(_tokenize, batches, shared))


def _tokenize(batch: list[Conversation], shared: tuple[str, str, int]) -> list[TokenizedConversation]:
    """A task: template, mask and ids of some conversations."""
    tokenizer_json, template, seed = shared
    return [
        TokenizedConversation(
            conversation.source,
            conversation.split,
            ids,
            mask,
            stable_hash("pack", str(seed), conversation.key()),
        )
        for conversation, (ids, mask) in zip(
            batch, encode_conversations(batch, tokenizer_from(tokenizer_json), template), strict=True
        )
    ]


def encode_conversations(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, template: str
) -> list[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
    """(ids int32 [T], label-aligned mask uint8 [T]) of each conversation: rendered once, tokenised by segments."""
    rendered = [
        render_with_mask(c.messages, tools=c.tools, low_effort=c.low_effort, template=template) for c in conversations
    ]
    # Without the offsets, which nobody needs, and so in half of the time.
    texts = [text for segments in rendered for text, _ in segments]
    encodings = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    encoded = []
    for segments in rendered:
        ids: list[int] = []
        ends: list[int] = []
        for _ in segments:
            ids += next(encodings).ids
            ends.append(len(ids))
        mask = np.zeros(len(ids), np.uint8)
        begin = 0
        for (_, trained), end in zip(segments, ends, strict=True):
            # Aligned to labels: the token at i is the label of i - 1.
            if trained:
                mask[max(begin - 1, 0) : end - 1] = 1
            begin = end
        encoded.append((np.array(ids, dtype=np.int32), mask))
    return encoded


def pack(
    conversations: Iterable[TokenizedConversation],
    seq_len: int,
    path: Path,
    *,
    algorithm: Algorithm = "best_fit",
    seed: int = 0,
) -> PackStatistics:
    """Pack conversations (none longer than `seq_len`) into rows and write them as Parquet.

    They are packed in the order of their `order` keys, so the file depends on the conversations, not on the order of
    their arrival; `seed` is for `first_fit_shuffle` alone. The decreasing algorithms leave rows of long conversations
    first, which a loader that shuffles rows does not mind. ValueError without conversations, for an empty one, and for
    `concatenate`, which would cut them.
    """
    if algorithm == "concatenate":
        raise ValueError("concatenate cuts sequences, and half a conversation is nothing to train on")
    items = sorted(conversations, key=lambda c: (c.order, c.input_ids.tobytes()))
    bins = pack_lengths([len(item.input_ids) for item in items], seq_len, algorithm, seed=seed)
    columns: dict[str, list[np.ndarray]] = {"input_ids": [], "loss_mask": [], "seq_start_id": []}
    for members in (numbers.tolist() for numbers in bins):
        lengths = [len(items[i].input_ids) for i in members]
        columns["input_ids"].append(np.concatenate([items[i].input_ids for i in members]))
        columns["loss_mask"].append(np.concatenate([items[i].loss_mask for i in members]))
        columns["seq_start_id"].append(np.cumsum([0, *lengths[:-1]], dtype=np.int32))
    arrays = [pa.array(columns[field.name], type=field.type) for field in PACKED_SCHEMA]
    table = pa.Table.from_arrays(arrays, schema=PACKED_SCHEMA)
    pq.write_table(table, path, row_group_size=1024, compression="zstd")
    report = bins.report()
    return PackStatistics(
        algorithm=algorithm,
        rows=report.bins,
        fewest_rows=report.lower_bound,
        conversations=report.items,
        tokens=report.tokens,
        trained_tokens=int(sum(int(item.loss_mask.sum()) for item in items)),
        fill=report.efficiency,
    )
