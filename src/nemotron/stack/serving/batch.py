"""Rows that are decoded together, join and leave between steps, and each have their own length and settings.

Every row is in the same state between steps: n tokens are read, one more is known, and, with drafts, the multi-token
prediction block has read that one, too. A prompt is read up to its last token but one (`read`), apart from the others
and a chunk at a time; the row then joins with its last token, and the step that all rows share gives the first token of
its answer. At the end of an answer the row's state is that of a prompt which ends there.

The arrays have a slot for each row, and some more: one whose row left idles, its results unused, until another joins.
Slots are 1, 2, 4, 8, 16 and then multiples of 16, for which oneDNN has its kernels (`ONEDNN_ROWS`); there are as many
as the rows need, and room for keys as the longest row needs it, doubled when it is full. All rows have room for as many
keys: one attention call a block serves them all, where paging needs kernels that PyTorch lacks on a CPU.

Shapes: B slots, k drafts a row, T = k + 1 tokens read at once, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.cache import Cache
from nemotron.stack.models.decoding.chunks import read_chunks
from nemotron.stack.models.decoding.speculative import Drafter, Trunk
from nemotron.stack.models.decoding.steps import ONEDNN_ROWS, compute_dtype
from nemotron.stack.models.layers import at_least_fp32
from nemotron.stack.serving.prompt_cache import RowState
from nemotron.stack.serving.sampling import Choice, Token, choose, describe, draft_draws

LEAST_CAPACITY = 64


@dataclass(eq=False)
class Row:
    """A request's prompt, and its answer so far in `choice`.

    prompt_logprobs: of the prompt's tokens from the second on, as far as it is read, where they are asked for.
    """

    prompt: list[int]
    choice: Choice
    prompt_logprobs: list[Token] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """All, of which the last is not read yet."""
        return self.prompt + self.choice.tokens


class Batch:
    """The rows being decoded. All is called in inference mode.

    slots: the row in each, None where it idles. drafts_proposed, drafts_accepted: so far.
    """

    @torch.inference_mode()
    def __init__(self, model: NemotronH, num_drafts: int) -> None:
        """`model` in eval mode; `num_drafts` > 0 needs its multi-token prediction block."""
        self.model, self.num_drafts = model, num_drafts
        self.slots: list[Row | None] = [None]
        self.drafts_proposed = self.drafts_accepted = 0
        weight = model.lm_head.weight
        self._dtype, self._device = compute_dtype(weight), weight.device
        nothing_BL = torch.ones(1, 0, dtype=torch.bool, device=self._device)
        self._trunk, self._drafter = Trunk(model, nothing_BL, LEAST_CAPACITY, num_drafts), None
        self._stacks = [self._trunk.stack]
        if num_drafts:
            self._drafter = Drafter(model, nothing_BL, LEAST_CAPACITY, num_drafts)
            self._drafter.hidden_BD = torch.zeros(1, model.config.hidden_size, dtype=self._dtype, device=self._device)
            self._stacks.append(self._drafter.stack)
        for stack in self._stacks:
            stack.prepare()

    @property
    def rows(self) -> list[Row]:
        """Those that are decoded."""
        return [row for row in self.slots if row is not None]

    def new_state(self, capacity: int) -> RowState:
        """That of a row which has read nothing, with room for so many tokens."""

        def empty(pattern: str) -> Cache:
            config = replace(self.model.config, hybrid_override_pattern=pattern)
            return Cache.allocate(config, 1, capacity, self._dtype, self._device)

        config = self.model.config
        drafter = empty(config.mtp_hybrid_override_pattern) if self._drafter is not None else None
        return RowState(empty(config.hybrid_override_pattern), drafter)

    def read(self, rows: Sequence[Row], states: Sequence[RowState], counts: Sequence[int]) -> None:
        """The next `counts` tokens of each row's prompt, behind what its state has read, but never the last one."""
        model, most = self.model, max(counts)

        def next_tokens(behind: int) -> Tensor:
            ids_BT = torch.zeros(len(rows), most, dtype=torch.int64)
            for index, (row, state, count) in enumerate(zip(rows, states, counts, strict=True)):
                start = state.trunk.length + behind
                ids_BT[index, :count] = torch.tensor(row.prompt[start : start + count])
            return ids_BT.to(self._device)

        ids_BT, next_BT = next_tokens(0), next_tokens(1)
        x_BTD = read_chunks(model.blocks(), model.backbone.embeddings(ids_BT), [s.trunk for s in states], counts)
        if self._drafter is not None and model.mtp is not None:
            merged_BTD = model.mtp.merge(model.backbone.embeddings(next_BT), model.backbone.norm_f(x_BTD))
            drafters = [state.drafter for state in states if state.drafter is not None]
            drafted_BTD = read_chunks(model.mtp.blocks(), merged_BTD, drafters, counts)
            for index, (state, count) in enumerate(zip(states, counts, strict=True)):
                state.hidden_D = model.mtp.finish(drafted_BTD[index, count - 1])
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if row.choice.sampling.prompt_logprobs:
                logits_1TV = at_least_fp32(model.lm_head(model.backbone.norm_f(x_BTD[index : index + 1, :count])))
                next_1T, num_top = next_BT[index : index + 1, :count], row.choice.sampling.num_logprobs
                row.prompt_logprobs += describe(logits_1TV, next_1T, [count], [num_top])[0]

    def join(self, row: Row, state: RowState) -> None:
        """A row whose prompt is read up to its last token but one; the state is copied."""
        if None not in self.slots:
            self._resize(len(self.rows) + 1)
        slot = self.slots.index(None)
        self._reserve(state.trunk.length)
        self._trunk.stack.put(slot, state.trunk)
        if self._drafter is not None and state.drafter is not None:
            self._drafter.stack.put(slot, state.drafter)
            # Behind a prompt of one token nothing was read: the first draft is as good as any.
            self._drafter.hidden_BD[slot] = 0 if state.hidden_D is None else state.hidden_D
        self.slots[slot] = row

    def leave(self, row: Row) -> None:
        """The row is not decoded any more."""
        slot = self.slots.index(row)
        self.slots[slot] = None
        for stack in self._stacks:
            stack.lengths[slot] = 0
        if not self.rows:  # else the next step sees to it, when others may have joined
            self._resize(0)

    def reset(self) -> None:
        """Drop all rows, whatever a step that failed has left of their states."""
        self.slots = [None]
        if self._drafter is not None:
            self._drafter.hidden_BD = torch.zeros_like(self._drafter.hidden_BD[:1])
        nothing = self.new_state(0)
        for stack, cache in zip(self._stacks, (nothing.trunk, nothing.drafter), strict=False):
            stack.num_pending = 0
            stack.keep_rows([0])
            stack.resize(LEAST_CAPACITY)
            if cache is not None:
                stack.put(0, cache)

    def state(self, row: Row) -> RowState:
        """A copy of what the row has read: all of its tokens but the last."""
        slot = self.slots.index(row)
        if self._drafter is None:
            return RowState(self._trunk.stack.row(slot))
        drafter = self._drafter
        return RowState(self._trunk.stack.row(slot), drafter.stack.row(slot), drafter.hidden_BD[slot].clone())

    def step(self) -> list[tuple[Row, list[Token]]]:
        """One to k + 1 more tokens of each row. Rows whose `choice` has a finish reason then are to leave."""
        self._resize(len(self.rows))
        num_drafts, slots = self.num_drafts, self.slots
        samplings = [None if row is None else row.choice.sampling for row in slots]
        num_draws = 2 * num_drafts + 1  # to draft, to keep drafts, and for the token behind them
        uniforms_BU = [[0.0] * num_draws if row is None else row.choice.uniforms(num_draws) for row in slots]
        self._reserve(max(self._trunk.stack.lengths) + num_drafts + 1)
        newest = [0 if row is None else (row.choice.tokens or row.prompt)[-1] for row in slots]
        newest_B1 = torch.tensor(newest, device=self._device).unsqueeze(1)

        drafts_Bk, draft_probs = newest_B1[:, :0], list[Tensor]()
        if self._drafter is not None:
            streams = iter(range(num_drafts))

            def draw(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
                depth = next(streams)
                return draft_draws(logits_BV, samplings, [uniforms[depth] for uniforms in uniforms_BU])

            drafts_Bk, draft_probs = self._drafter.draft(draw)
        hidden_BTD, logits_BTV = self._trunk.extend(torch.cat([newest_B1, drafts_Bk], dim=1))
        masks = {
            slot: mask_V
            for slot, row in enumerate(slots)
            if row is not None and (mask_V := row.choice.allowed()) is not None
        }
        uniforms_BT = [uniforms[num_drafts:] for uniforms in uniforms_BU]
        kept, chosen = choose(logits_BTV, drafts_Bk, draft_probs, samplings, uniforms_BT, masks)

        counts = [0] * len(slots)
        for slot, row in enumerate(slots):
            if row is None or row.choice.finish_reason is not None:
                continue
            follows = True
            while follows and counts[slot] <= kept[slot]:
                chosen[slot][counts[slot]], follows = row.choice.take(chosen[slot][counts[slot]])
                counts[slot] += 1
            self.drafts_proposed += num_drafts
            self.drafts_accepted += counts[slot] - 1
        tokens_BT = torch.tensor(chosen, device=self._device)
        self._trunk.stack.accept(counts)
        if self._drafter is not None and any(counts):
            self._drafter.settle(tokens_BT, hidden_BTD, counts)
        nums_top = [0 if sampling is None else sampling.num_logprobs for sampling in samplings]
        described = describe(logits_BTV, tokens_BT, counts, nums_top)
        return [(row, tokens) for row, tokens in zip(slots, described, strict=True) if row is not None]

    def _reserve(self, capacity: int) -> None:
        """Room for so many tokens a row."""
        for stack in self._stacks:
            if stack.capacity < capacity:
                stack.resize(max(2 * stack.capacity, capacity))

    def _resize(self, num_rows: int) -> None:
        """As many slots as so many rows need; without a row, the keys' memory is given back as well."""
        if num_rows == 0:
            for stack in self._stacks:
                stack.resize(LEAST_CAPACITY)
        if num_rows <= ONEDNN_ROWS:
            num_slots = 1 << max(0, num_rows - 1).bit_length()
        else:
            num_slots = num_rows + -num_rows % ONEDNN_ROWS
        if num_slots == len(self.slots):
            return
        kept = [slot for slot, row in enumerate(self.slots) if row is not None]
        sources = kept + [0] * (num_slots - len(kept))  # what stands in an idle slot does not matter
        self._trunk.stack.keep_rows(sources)
        if self._drafter is not None:
            self._drafter.keep_rows(sources)
        for stack in self._stacks:
            stack.lengths[len(kept) :] = [0] * (num_slots - len(kept))
        self.slots = [self.slots[slot] for slot in kept] + [None] * (num_slots - len(kept))
