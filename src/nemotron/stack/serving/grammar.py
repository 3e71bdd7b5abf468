"""What an answer is held to: a grammar, as the tokens that may follow at each step.

`llguidance` (extra `serve`) compiles it against a tokenizer and walks it with the tokens that were chosen.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Grammar:
    """A grammar compiled for a tokenizer, for any number of answers; the tokenizer's file is read once for all."""

    def __init__(self, lark: str, tokenizer_json: Path) -> None:
        """What `lark` describes in llguidance's dialect, where `<name>` without quotes is a special token.

        Raises:
            ValueError: it can't be compiled; the message says why.
        """
        from llguidance import LLMatcher

        tokenizer = _tokenizer(tokenizer_json)
        self._ends = tokenizer.eos_tokens
        self._matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
        if self._matcher.is_error():
            raise ValueError(f"the grammar can't be compiled: {_reason(self._matcher)}")
        # Some are too complex only where they are used: that is seen here, and not by the thread that serves all.
        probe = self._matcher.deep_copy()
        probe.compute_bitmask()
        if probe.is_error():
            raise ValueError(f"the grammar can't be kept to: {_reason(probe)}")

    def begin(self, vocab_size: int, stop_token_ids: Sequence[int]) -> Constraint:
        """For one answer of a model with so many tokens."""
        return Constraint(self._matcher.deep_copy(), vocab_size, stop_token_ids, self._ends)


class Constraint:
    """How far one answer is in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, stop_token_ids: Sequence[int], ends: Sequence[int]) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._stops, self._ends = list(stop_token_ids), list(ends)

    @property
    def is_complete(self) -> bool:
        """Whether nothing but a stop token can follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> Tensor:
        """Which tokens may be next, bool [V]; a stop token where the text is complete.

        Raises:
            ValueError: none may, or the grammar has become too complex.
        """
        mask_V = torch.zeros(self._vocab_size, dtype=torch.bool)
        if not self._matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            known = min(len(bits), self._vocab_size)
            mask_V[:known] = torch.from_numpy(bits[:known]).bool()
            mask_V[self._ends] = False  # the tokenizer's own; the answer ends with what the request says
        may_stop = self._matcher.is_accepting()
        if self._matcher.is_error():
            raise ValueError(f"the answer can't be held to its grammar: {_reason(self._matcher)}")
        mask_V[self._stops] = may_stop
        if not mask_V.any():
            raise ValueError("the tokenizer has no token with which the answer could go on as its grammar wants")
        return mask_V

    def take(self, token: int) -> None:
        """Go on by a token that was allowed."""
        if token not in self._stops:
            self._matcher.consume_token(token)


def _reason(matcher: LLMatcher) -> str:
    """What stopped it, in one line, without the grammar that was made of the request, and the state that it was in."""
    lines = matcher.get_error().partition("<state>")[0].splitlines()
    return " ".join(" ".join(line for line in lines if not re.match(r"\s*(\d+\s*\||\|?\s*\^)", line)).split())


@functools.cache
def _tokenizer(tokenizer_json: Path) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer_json.read_text(encoding="utf-8"))
