"""What a model makes of long text: answers to what stands in it, and its loss by position in a window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.stack.evaluation.language_model import bits_per_byte_by_position, score_answers
from nemotron.stack.evaluation.retrieval import Documents
from nemotron.stack.models import NemotronH
from nemotron.stack.training.loaders import Batch

if TYPE_CHECKING:
    from nemotron.kit.schemas.pretraining import RetrievalConfig

WINDOWS = 32  # of held-out text that are scored by position


def score_long_text(
    model: NemotronH,
    tokenizer: Tokenizer,
    documents: Sequence[NDArray[np.integer[Any]]],
    byte_lengths_V: NDArray[np.int64],
    settings: RetrievalConfig,
    *,
    seq_len: int,
    batch_size: int,
    poll: Callable[[], None],
) -> dict[str, Any]:
    """`retrieval_F_N` for F facts in documents of N tokens; `text`: bits per byte of parts of a window of `seq_len`.

    Args:
        documents: ids of held-out text, what stands between the facts, and what windows are cut of.
        byte_lengths_V: bytes of text that each token stands for.
        batch_size: sequences of `seq_len` tokens at once; longer ones are fewer.
        poll: called between lengths; raises to stop.
    """
    device, scores = model.lm_head.weight.device, dict[str, Any]()
    model.eval()
    for facts, length in product(settings.facts, settings.lengths):
        poll()
        asked = Documents(length, facts, settings.words, 0)  # its last token stands behind all answers: any will do
        made = asked.make(tokenizer, np.concatenate(documents), settings.num_documents, settings.seed)
        scores[f"retrieval_{facts}_{length}"] = score_answers(
            model, batches_of(made, max(1, batch_size * seq_len // length), device)
        )
    if windows := [document[: seq_len + 1] for document in documents if len(document) > seq_len][:WINDOWS]:
        ends = sorted({length for length in settings.lengths if length < seq_len} | {seq_len})
        scores["text"] = bits_per_byte_by_position(model, np.stack(windows), byte_lengths_V, ends)
    return scores


def check_retrieval(
    tokenizer: Tokenizer, documents: Sequence[NDArray[np.integer[Any]]], settings: RetrievalConfig
) -> None:
    """UserError if `score_long_text` could not make what it asks about: before a training, not behind it."""
    haystack = np.concatenate(documents)
    for facts, length in product(settings.facts, settings.lengths):
        try:
            next(Documents(length, facts, settings.words, 0).make(tokenizer, haystack, 1, settings.seed))
        except UserError as error:
            raise error.at(f"evaluation.retrieval, {facts} facts in {length} tokens") from None


def batches_of(
    documents: Iterable[tuple[NDArray[np.int32], NDArray[np.uint8]]], batch_size: int, device: torch.device
) -> Iterator[Batch]:
    """Documents as `score_answers` takes them: what a model says to be the most likely token at each answer.

    The answers to the questions before stand in the text, of other keys: they tell nothing about this one.
    """
    rows = iter(documents)
    while taken := list(islice(rows, batch_size)):
        ids_BL = torch.from_numpy(np.stack([ids for ids, _ in taken]).astype(np.int64))
        mask_BL = torch.from_numpy(np.stack([mask for _, mask in taken]).astype(np.int64))
        # The label of the last position would wrap around; it is never asked for.
        yield Batch(ids_BL, ids_BL.roll(-1, 1), mask_BL).to(device)
