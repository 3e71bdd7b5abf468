"""Boosting of multi-token prediction: the block learns to draft what the frozen trunk would write, from its responses.

As published for Nemotron 3 Ultra: nothing but the block is trained, by forward KL to the trunk's own distribution at
temperature T = 2, times T^2, without a cross entropy; on responses that the model itself has drawn at temperature 1;
over N = 7 steps, of which each goes on from hidden states of the steps before it, drawn at random. In decoding, the
neighbours that a draft attends to are of all sorts, too: of settled tokens, for which the block has read the trunk's
states, and of drafts before it, for which it has read its own. That the draw is uniform, and made for each position
and step anew, is not published.

Shapes: B rows, L positions, N steps, T trained positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemotron.stack.compression.distillation import forward_kl_sum
from nemotron.stack.models import NemotronH
from nemotron.stack.models.kernels.linear import linear
from nemotron.stack.models.mtp import shift_left
from nemotron.stack.rl.rollouts import WIDTH_MULTIPLE, first_fit


@dataclass(frozen=True)
class Response:
    """A prompt with what the model wrote behind it, `num_prompt` tokens and the rest."""

    ids: list[int]
    num_prompt: int

    @property
    def num_written(self) -> int:
        """Tokens that the model wrote."""
        return len(self.ids) - self.num_prompt

    @property
    def num_drafted(self) -> int:
        """Tokens that decoding would draft: all that were written but the first, which follows from the prompt."""
        return max(0, self.num_written - 1)


@dataclass(frozen=True)
class ResponseRows:
    """Packed rows of responses.

    input_ids_BL: without the last token of each response. seq_idx_BL: document index; -1, at the end, is padding.
    drafts_BL: bool, the T positions from which decoding would draft: t where token t+1 was written by the model, and
    t+2 as well. teaches_BL: bool, the T positions behind those, from which the trunk predicts the same tokens.
    sources_NBL: where each step goes on from (`MTP.rehearse`).
    """

    input_ids_BL: Tensor
    seq_idx_BL: Tensor
    drafts_BL: Tensor
    teaches_BL: Tensor
    sources_NBL: Tensor

    def to(self, device: torch.device) -> ResponseRows:
        """The same rows on `device`."""
        return ResponseRows(*(tensor.to(device) for tensor in vars(self).values()))


def pack_responses(
    responses: Sequence[Response], row_len: int, rows_per_batch: int, num_steps: int, generator: torch.Generator
) -> list[ResponseRows]:
    """Rows of at most `row_len` positions in micro-batches, each of the positions of `rows_per_batch` whole rows.

    Responses without a token to draft are left out. What is drawn for a position depends on the generator alone, not on
    how responses are packed. ValueError: one is longer than a row and a token.
    """
    steps_N1 = torch.arange(1, num_steps + 1).unsqueeze(1)
    sources = [
        (torch.rand(num_steps, len(response.ids) - 1, generator=generator) * steps_N1).long() for response in responses
    ]
    drafted = [index for index, response in enumerate(responses) if response.num_drafted]
    sizes = [len(responses[index].ids) - 1 for index in drafted]
    if drafted and max(sizes) > row_len:
        raise ValueError(f"a response of {max(sizes) + 1} tokens does not fit a row of {row_len}")
    rows = [[drafted[i] for i in row] for row in first_fit(sizes, row_len)]
    lengths = {id(row): sum(len(responses[index].ids) - 1 for index in row) for row in rows}
    rows.sort(key=lambda row: -lengths[id(row)])
    batches: list[ResponseRows] = []
    while rows:
        width = min(-(-lengths[id(rows[0])] // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, row_len)
        count = max(1, rows_per_batch * row_len // width)
        batches.append(_fill_rows(rows[:count], width, responses, sources))
        rows = rows[count:]
    return batches


def _fill_rows(
    rows: Sequence[Sequence[int]], width: int, responses: Sequence[Response], sources: Sequence[Tensor]
) -> ResponseRows:
    shape = len(rows), width
    filled = ResponseRows(
        torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1), torch.zeros(shape, dtype=torch.bool),
        torch.zeros(shape, dtype=torch.bool), torch.zeros(len(sources[0]), *shape, dtype=torch.int64),
    )  # fmt: skip
    for b, row in enumerate(rows):
        start = 0
        for document, index in enumerate(row):
            response = responses[index]
            end = start + len(response.ids) - 1
            filled.input_ids_BL[b, start:end] = torch.tensor(response.ids[:-1])
            filled.seq_idx_BL[b, start:end] = document
            filled.drafts_BL[b, end - 1 - response.num_drafted : end - 1] = True
            filled.teaches_BL[b, end - response.num_drafted : end] = True
            filled.sources_NBL[:, b, start:end] = sources[index]
            start = end
    return filled


def boosting_loss_sum(model: NemotronH, rows: ResponseRows, temperature: float) -> Tensor:
    """Forward KL from the trunk to each step's drafts in nats, at a temperature and times its square: a scalar, fp32.

    Sum over the T drafted tokens, mean over the N steps. The caller divides by the number of drafted tokens of the
    whole GLOBAL batch: each of them then weighs the same, and micro-batches and ranks add up. Gradients reach the
    block alone.
    """
    assert model.mtp is not None
    head_VD = model.lm_head.weight.detach()
    with torch.no_grad():
        hidden_BLD, _ = model.hidden_states(rows.input_ids_BL, rows.seq_idx_BL)
        next_ids_BL = shift_left(rows.input_ids_BL, 1, rows.seq_idx_BL, fill=0)
        next_embedded_BLD = model.backbone.embeddings(next_ids_BL)
    teacher_TD = hidden_BLD[rows.teaches_BL] / temperature
    total = hidden_BLD.new_zeros((), dtype=torch.float32)
    for out_BLD in model.mtp.rehearse(next_embedded_BLD, hidden_BLD, rows.sources_NBL, rows.seq_idx_BL):
        logits_TV = linear(out_BLD[rows.drafts_BL], head_VD)
        total = total + forward_kl_sum(logits_TV / temperature, teacher_TD, head_VD)
    return total * (temperature**2 / len(rows.sources_NBL))
