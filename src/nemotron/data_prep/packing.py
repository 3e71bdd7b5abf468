"""Conversations -> token ids with a loss mask -> rows of at most `seq_len` tokens in Parquet.

Columns, one row per packed sequence: `input_ids` (int32), `loss_mask` (uint8) and `seq_start_id` (int32: where each
conversation begins in the row). The mask is aligned to *labels* within each conversation: position i is 1 when the
label at i, which is token i + 1, is trained; the last position of every conversation is 0, so that none is trained to
predict the beginning of the next (`mask[1:] + [0]` per conversation, as in the packed format of the full-size
pipeline).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from nemotron.data_prep.conversations import Conversation
from nemotron.data_prep.documents import Split, stable_hash
from nemotron.kit.chat import render_with_mask

_BATCH = 512  # conversations given to the tokenizer at once


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
    """What a packed file holds. `fill` is tokens / (rows x seq_len); `trained_tokens` counts mask ones."""

    rows: int
    conversations: int
    tokens: int
    trained_tokens: int
    fill: float

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{self.conversations} conversations in {self.rows} rows, {self.tokens} tokens "
            f"({self.trained_tokens} trained), rows {self.fill:.1%} full"
        )


def tokenize_conversations(
    conversations: Iterable[Conversation], tokenizer: Tokenizer, *, template: str = "nano3", seed: int = 0
) -> Iterator[TokenizedConversation]:
    """Ids and label-aligned mask of each conversation, segment by segment (see `chat.render_with_mask`).

    Because a prompt is tokenised on its own, its tokens in training are exactly those at inference.
    """
    iterator = iter(conversations)
    while batch := list(islice(iterator, _BATCH)):
        rendered = [render_with_mask(conversation.messages, template=template) for conversation in batch]
        texts = [text for segments in rendered for text, _ in segments]
        encodings = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
        for conversation, segments in zip(batch, rendered, strict=True):
            ids: list[int] = []
            trained: list[int] = []
            for _, is_trained in segments:
                piece = next(encodings).ids
                ids += piece
                trained += [int(is_trained)] * len(piece)
            yield TokenizedConversation(
                conversation.source,
                conversation.split,
                np.array(ids, dtype=np.int32),
                np.array([*trained[1:], 0], dtype=np.uint8),
                stable_hash("pack", str(seed), conversation.key()),
            )


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put items into as few bins as best fit needs: each goes, in order, into the fullest bin that still holds it.

    Returns the item indices of each bin. ValueError for an item longer than `capacity`. With items in random order this
    wastes little more than first-fit-decreasing would, and does not sort conversations by length.
    """
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # (free space, bin), sorted
    for item, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(f"item {item} has length {length}, more than the capacity {capacity}")
        position = bisect.bisect_left(open_bins, (length, -1))
        if position < len(open_bins):
            free, chosen = open_bins.pop(position)
        else:
            free, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        if free > length:
            bisect.insort(open_bins, (free - length, chosen))
    return bins


def pack(conversations: Iterable[TokenizedConversation], seq_len: int, path: Path) -> PackStatistics:
    """Pack conversations (none longer than `seq_len`) into rows and write them as Parquet.

    The order is that of the `order` keys, so the file depends on the conversations, not on the order of their arrival.
    """
    items = sorted(conversations, key=lambda c: (c.order, c.input_ids.tobytes()))
    bins = best_fit([len(item.input_ids) for item in items], seq_len)
    columns: dict[str, list[np.ndarray]] = {"input_ids": [], "loss_mask": [], "seq_start_id": []}
    for members in bins:
        lengths = [len(items[i].input_ids) for i in members]
        columns["input_ids"].append(np.concatenate([items[i].input_ids for i in members]))
        columns["loss_mask"].append(np.concatenate([items[i].loss_mask for i in members]))
        columns["seq_start_id"].append(np.cumsum([0, *lengths[:-1]], dtype=np.int32))
    schema = pa.schema(
        [
            ("input_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.uint8())),
            ("seq_start_id", pa.list_(pa.int32())),
        ]
    )
    arrays = [pa.array(columns[field.name], type=field.type) for field in schema]
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), path, row_group_size=1024, compression="zstd")
    tokens = sum(len(item.input_ids) for item in items)
    return PackStatistics(
        rows=len(bins),
        conversations=len(items),
        tokens=tokens,
        trained_tokens=int(sum(int(item.loss_mask.sum()) for item in items)),
        fill=tokens / (len(bins) * seq_len) if bins else 0.0,
    )
