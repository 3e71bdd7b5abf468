"""Conversations -> token ids with a loss mask; the columns of packed rows.

One row per packed sequence: `input_ids` (int32), `loss_mask` (uint8) and `seq_start_id` (int32: where each conversation
begins in the row). The mask is aligned to *labels* within each conversation: position i is 1 when the label at i, which
is token i + 1, is trained; the last position of every conversation is 0, so that none is trained to predict the
beginning of the next (`mask[1:] + [0]` per conversation, as in the packed format of the full-size pipeline). Where
conversations have loss weights, `loss_mask` is float32: the weight in place of 1.

Where it is asked for, a fourth column `conversation_tokens` (int32, as long as `seq_start_id`) has for each sequence
how many tokens of its conversation are trained, in this sequence and in others: a loss whose mean is one over
conversations divides a token by it, wherever packing has put the sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nemotron.data_prep.chat.conversations import Conversation
from nemotron.kit.chat import render_with_mask

PACKED_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("seq_start_id", pa.list_(pa.int32())),
    ]
)
WEIGHTED_SCHEMA = PACKED_SCHEMA.set(1, pa.field("loss_mask", pa.list_(pa.float32())))
CONVERSATION_TOKENS = pa.field("conversation_tokens", pa.list_(pa.int32()))


def encode_conversations(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, template: str
) -> list[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
    """(ids int32 [T], label-aligned mask uint8 [T]) of each conversation: rendered once, tokenised by segments.

    Because a prompt is tokenised on its own, its tokens in training are exactly those at inference.
    """
    rendered = [
        render_with_mask(c.messages, tools=c.tools, low_effort=c.low_effort, template=template)
        if c.text is None
        else [(c.text, True)]
        for c in conversations
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
