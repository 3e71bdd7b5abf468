"""Preference pairs in tokens: packed into rows, and the log-probabilities that a model gives their answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from nemotron.stack.models import NemotronH
from nemotron.stack.rl.losses import token_logprobs
from nemotron.stack.rl.rollouts import Rollout, first_fit


@dataclass(frozen=True)
class Answer:
    """A prompt with one answer to it. predicts: where the *next* token is one that the model would write."""

    ids: list[int]
    predicts: list[bool]


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt."""

    chosen: Answer
    rejected: Answer

    @property
    def num_tokens(self) -> int:
        """Prompt and answer, twice."""
        return len(self.chosen.ids) + len(self.rejected.ids)


def answer_of(turn: Rollout) -> Answer:
    """A rollout of one turn behind its prompt; what the policy wrote is learned."""
    predicts = [False] * (len(turn.prompt_ids) - 1) + [True] * len(turn.completion_ids) + [False]
    return Answer([*turn.prompt_ids, *turn.completion_ids], predicts)


@dataclass
class PairBatch:
    """Packed rows of whole pairs, in each the chosen answer before the rejected one.

    input_ids_BL, seq_idx_BL: [B, L]. predicts_BL: bool [B, L], True where the next token is one of an answer.
    targets_T: those tokens, in row-major order. lengths_S: how many of them each answer has. pairs: which pairs stand
    there, in that order.
    """

    input_ids_BL: Tensor
    seq_idx_BL: Tensor
    predicts_BL: Tensor
    targets_T: Tensor
    lengths_S: list[int]
    pairs: list[int]


def pack_pairs(pairs: Sequence[Pair], row_len: int, rows_per_batch: int) -> list[PairBatch]:
    """Pack pairs into rows of at most `row_len` tokens, first-fit decreasing, `rows_per_batch` rows a micro-batch.

    Both answers of a pair stand in one row, as documents of their own: so a micro-batch has what the loss of its pairs
    takes. The empty tail of a row is padding (id 0, document -1, never predicted).

    Raises:
        ValueError: a pair is longer than a row.
    """
    longest = max((pair.num_tokens for pair in pairs), default=0)
    if longest > row_len:
        raise ValueError(f"a pair of {longest} tokens does not fit a row of {row_len}")
    rows = first_fit([pair.num_tokens for pair in pairs], row_len)
    return [_pair_batch(rows[start : start + rows_per_batch], pairs) for start in range(0, len(rows), rows_per_batch)]


def _pair_batch(rows: list[list[int]], pairs: Sequence[Pair]) -> PairBatch:
    width = max(sum(pairs[i].num_tokens for i in row) for row in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    seq_idx = torch.zeros(len(rows), width, dtype=torch.int64)
    predicts = torch.zeros(len(rows), width, dtype=torch.bool)
    targets: list[int] = []
    lengths: list[int] = []
    for b, row in enumerate(rows):
        start = 0
        for document, answer in enumerate(a for i in row for a in (pairs[i].chosen, pairs[i].rejected)):
            end = start + len(answer.ids)
            input_ids[b, start:end] = torch.tensor(answer.ids)
            seq_idx[b, start:end] = document
            predicts[b, start:end] = torch.tensor(answer.predicts)
            targets += compress(answer.ids[1:], answer.predicts)
            lengths.append(sum(answer.predicts))
            start = end
        seq_idx[b, start:] = -1
    return PairBatch(
        input_ids, seq_idx, predicts, torch.tensor(targets), lengths, [index for row in rows for index in row]
    )


def answer_logprobs(model: NemotronH, batch: PairBatch, autocast: AbstractContextManager[object]) -> Tensor:
    """Log-probability of each token of the answers, [T], on the device of the model."""
    device = model.lm_head.weight.device
    with autocast:
        logits_TV = model(
            batch.input_ids_BL.to(device), batch.seq_idx_BL.to(device), batch.predicts_BL.to(device), mtp_depths=0
        ).logits
    return token_logprobs(logits_TV, batch.targets_T.to(device))


@torch.no_grad()
def pair_logprobs(model: NemotronH, batch: PairBatch, autocast: AbstractContextManager[object]) -> dict[int, Tensor]:
    """The same without gradient, of each pair of the batch: those of the chosen answer, then of the rejected one."""
    was_training = model.training
    model.eval()
    logp_T = answer_logprobs(model, batch, autocast)
    model.train(was_training)
    of_pairs = [sum(batch.lengths_S[i : i + 2]) for i in range(0, len(batch.lengths_S), 2)]
    return dict(zip(batch.pairs, logp_T.split(of_pairs), strict=True))
