"""How the tokens of a request are chosen, row by row of a batch in which every request has its own settings.

Each row draws its random numbers from a stream of its own, always as many a step, so that a seed gives the same tokens
whoever else is served. A greedy row is one whose distribution has one token.

Shapes: B rows, k drafts a row, T = k + 1 tokens read at once, V vocabulary.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nemotron.stack.models.decoding.generate import ReasoningBudget, draw
from nemotron.stack.models.decoding.speculative import keep_drafts
from nemotron.stack.serving.grammar import Constraint, Grammar

MOST_LOGPROBS = 20
# Of temperatures above 0: logits divided by a much smaller one overflow in fp32.
LEAST_TEMPERATURE = 1e-5
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are drawn.

    max_new_tokens: of 0 the prompt alone is read, and one token is drawn that has no room and is not to be shown.
    stop_token_ids: the answer ends after one of these. temperature: 0 is greedy. top_p: keep the smallest set of tokens
    whose probability reaches it. seed: the same one gives the same tokens whoever else is served, up to rounding; None:
    the engine draws one. num_logprobs: likeliest tokens that are reported beside each chosen one. prompt_logprobs:
    report the prompt's tokens as well, all of which are then read anew. budget: of the reasoning, for prompts that open
    it. grammar: what the text is held to, from the start, or behind the tokens `grammar_after` (those of `</think>`); a
    stop token is possible where the text is complete.

    Raises:
        ValueError: a value out of its range, which is named.
    """

    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    num_logprobs: int = 0
    prompt_logprobs: bool = False
    budget: ReasoningBudget | None = None
    grammar: Grammar | None = None
    grammar_after: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens {self.max_new_tokens}: 0 or more expected")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature {self.temperature}: 0, or {LEAST_TEMPERATURE} and more expected")
        if not (self.temperature >= 0 and 0 < self.top_p <= 1):
            raise ValueError(f"temperature >= 0 and 0 < top_p <= 1 expected, got {self.temperature} and {self.top_p}")
        if not 0 <= self.num_logprobs <= MOST_LOGPROBS:
            raise ValueError(f"num_logprobs {self.num_logprobs}: 0 to {MOST_LOGPROBS} expected")


@dataclass(frozen=True)
class Token:
    """A token of an answer, or of a prompt.

    logprob: under the model's own distribution (temperature 1, no truncation, no grammar), as `generate` gives it. top:
    the likeliest tokens of that distribution with theirs, likeliest first, as many as were asked for.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Choice:
    """Of one answer: its random numbers, the tokens so far, and what becomes of those that are drawn.

    finish_reason: set once the answer has ended; error: the message, where that is "error".
    """

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        self.sampling, self._vocab_size = sampling, vocab_size
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self._source = random.Random(secrets.randbits(64) if sampling.seed is None else sampling.seed % 2**64)
        self._stops, self._reasons = set(sampling.stop_token_ids), sampling.budget is not None
        self._constraint: Constraint | None = None
        if sampling.grammar is not None and not sampling.grammar_after:
            self._constraint = sampling.grammar.begin(vocab_size, sampling.stop_token_ids)

    def uniforms(self, count: int) -> list[float]:
        """So many numbers in [0, 1)."""
        return [self._source.random() for _ in range(count)]

    def allowed(self) -> Tensor | None:
        """The tokens that may be next, bool [V]; None: all. Where none may, the answer ends with an error."""
        if self._constraint is None:
            if self.sampling.grammar is None:
                return None
            reasoning_V = torch.ones(self._vocab_size, dtype=torch.bool)
            reasoning_V[list(self._stops)] = False  # an answer is to come
            return reasoning_V
        try:
            return self._constraint.allowed()
        except ValueError as error:
            self.finish_reason, self.error = "error", str(error)
            return None

    def take(self, token: int) -> tuple[int, bool]:
        """The token that stands where this one was drawn, and whether one that was drawn behind it may follow.

        A budget may put another in its place, and behind the end of the reasoning a grammar may begin.
        """
        sampling, index, drawn = self.sampling, len(self.tokens), token
        budget = sampling.budget
        if budget is not None and self._reasons and index >= budget.max_tokens:
            put = index - budget.max_tokens
            token, self._reasons = budget.end_ids[put], put + 1 < len(budget.end_ids)
        self.tokens.append(token)
        if budget is not None and index < budget.max_tokens and self._ends_with(budget.tag_ids):
            self._reasons = False
        if self._constraint is not None:
            self._constraint.take(token)
        elif sampling.grammar is not None and self._ends_with(sampling.grammar_after):
            self._constraint = sampling.grammar.begin(self._vocab_size, sampling.stop_token_ids)
        cannot_go_on = not self._stops and self._constraint is not None and self._constraint.is_complete
        if token in self._stops or cannot_go_on:
            self.finish_reason = "stop"
        elif len(self.tokens) >= sampling.max_new_tokens:
            self.finish_reason = "length"
        return token, token == drawn and self._constraint is None and self.finish_reason is None

    def _ends_with(self, tag: tuple[int, ...]) -> bool:
        return tuple(self.tokens[-len(tag) :]) == tag


def draft_draws(
    logits_BV: Tensor, samplings: Sequence[Sampling | None], uniforms: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """A draft a row [B, 1], and the distribution that it was drawn from [B, V]; where all are greedy, any tensor.

    Of the temperature alone: any distribution may draft, and this one takes no sorting.
    """
    if all(sampling is None or sampling.temperature == 0 for sampling in samplings):
        return logits_BV.argmax(-1, keepdim=True), logits_BV
    probs_BV = probabilities(logits_BV.unsqueeze(1), samplings, truncate=False).squeeze(1)
    uniform_B1 = torch.tensor(uniforms, dtype=torch.float64, device=probs_BV.device).unsqueeze(1)
    return draw(probs_BV, uniform_B1), probs_BV


def choose(
    logits_BTV: Tensor,
    drafts_Bk: Tensor,
    draft_probs: Sequence[Tensor],
    samplings: Sequence[Sampling | None],
    uniforms_BT: Sequence[Sequence[float]],
    masks: dict[int, Tensor],
) -> tuple[list[int], list[list[int]]]:
    """How many drafts of each row are kept, and its T tokens, of which those and the one behind them count.

    Args:
        logits_BTV: behind the newest token and each draft. draft_probs: of `draft_draws`, k times [B, V].
        samplings: of each row; None: an idle one, of which nothing is wanted.
        uniforms_BT: numbers in [0, 1).
        masks: of rows that are held to something, the tokens that may be next, bool [V]. No draft of theirs is kept.
    """
    num_drafts = drafts_Bk.shape[1]
    if masks:
        logits_BTV = logits_BTV.clone()
        for row, mask_V in masks.items():
            logits_BTV[row, 0].masked_fill_(~mask_V.to(logits_BTV.device), float("-inf"))
    if all(sampling is None or sampling.temperature == 0 for sampling in samplings):
        tokens_BT = logits_BTV.argmax(-1)
        kept_B = (drafts_Bk == tokens_BT[:, :num_drafts]).long().cumprod(dim=1).sum(dim=1)
        kept_B[list(masks)] = 0
    else:
        p_BTV = probabilities(logits_BTV, samplings)
        uniform_BT = torch.tensor(uniforms_BT, dtype=torch.float64, device=p_BTV.device)
        kept_B, remaining_BV = drafts_Bk.new_zeros(len(drafts_Bk)), p_BTV[:, 0]
        if num_drafts:
            kept_B, remaining_BV = keep_drafts(
                drafts_Bk, p_BTV, torch.stack(list(draft_probs), dim=1), uniform_BT[:, :num_drafts]
            )
            held = list(masks)
            kept_B[held], remaining_BV[held] = 0, p_BTV[held, 0]
        tokens_BT = torch.cat([drafts_Bk, drafts_Bk.new_zeros(len(drafts_Bk), 1)], dim=1)
        tokens_BT.scatter_(1, kept_B.unsqueeze(1), draw(remaining_BV, uniform_BT[:, -1:]))
    return kept_B.tolist(), tokens_BT.tolist()


def probabilities(logits_BTV: Tensor, samplings: Sequence[Sampling | None], truncate: bool = True) -> Tensor:
    """What each row's tokens are drawn from, [B, T, V]: at its temperature, its likeliest up to top_p, or the one."""
    temperatures = [1.0 if s is None or s.temperature == 0 else s.temperature for s in samplings]
    temperature_B11 = torch.tensor(temperatures, dtype=logits_BTV.dtype, device=logits_BTV.device).view(-1, 1, 1)
    p_BTV = torch.softmax(logits_BTV / temperature_B11, dim=-1)
    greedy = [row for row, s in enumerate(samplings) if s is not None and s.temperature == 0]
    if greedy:
        likeliest = p_BTV.new_zeros(len(greedy), *p_BTV.shape[1:])
        p_BTV[greedy] = likeliest.scatter_(-1, logits_BTV[greedy].argmax(-1, keepdim=True), 1)
    cut = [row for row, s in enumerate(samplings) if truncate and s is not None and s.temperature > 0 and s.top_p < 1]
    if cut:
        sorted_CTV, order_CTV = p_BTV[cut].sort(dim=-1, descending=True)
        before_CTV = sorted_CTV.cumsum(-1, dtype=torch.float64) - sorted_CTV
        top_p_C11 = torch.tensor([s.top_p for row in cut if (s := samplings[row]) is not None]).double().view(-1, 1, 1)
        # A token stays unless those before it reach top_p.
        kept_CTV = sorted_CTV.masked_fill(before_CTV >= top_p_C11.to(p_BTV.device), 0)
        kept_CTV /= kept_CTV.sum(-1, keepdim=True)
        p_BTV[cut] = torch.zeros_like(kept_CTV).scatter_(-1, order_CTV, kept_CTV)
    return p_BTV


def describe(
    logits_BTV: Tensor, tokens_BT: Tensor, counts: Sequence[int], nums_top: Sequence[int]
) -> list[list[Token]]:
    """The first `counts` tokens of each row under the softmax of their logits, with the `nums_top` likeliest there."""
    log_sum_BT1 = logits_BTV.logsumexp(-1, keepdim=True)
    logprobs_BT = (logits_BTV.gather(-1, tokens_BT.unsqueeze(-1)) - log_sum_BT1).squeeze(-1)
    top = logits_BTV.topk(min(max(nums_top), logits_BTV.shape[-1]), dim=-1)
    tops = zip(top.indices.tolist(), (top.values - log_sum_BT1).tolist(), strict=True)
    described: list[list[Token]] = []
    for ids, logprobs, (top_ids, top_logprobs), count, num_top in zip(
        tokens_BT.tolist(), logprobs_BT.tolist(), tops, counts, nums_top, strict=True
    ):
        likeliest = (
            tuple(zip(i[:num_top], p[:num_top], strict=True)) for i, p in zip(top_ids, top_logprobs, strict=True)
        )
        described.append([Token(*of_token) for of_token in zip(ids, logprobs, likeliest, strict=True)][:count])
    return described
