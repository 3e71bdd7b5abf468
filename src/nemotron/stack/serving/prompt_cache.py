"""States of prefixes that were read before: a new prompt goes on from the longest one that it begins with.

What attention blocks hold of a prefix could be cut anywhere. What `M` blocks hold is a sum over all of it, of the size
of thousands of keys at published dimensions: it has to be kept for each point that a prompt may go on from. Points are

- the end of each prompt: the same question again, or the next turn where the template shows the answer differently;
- the end of each answer: the next turn of a conversation. Not behind a stop string: when it is found the row has read
  on, and the sum can't be taken back to it;
- a branch, where a prompt leaves what an earlier one said: the end of a system prompt that several questions share. It
  is found when the second of them is read, and serves from the third on (as in Marconi, Pan et al. 2024).

What is used longest ago goes first. A kept state has read the first n tokens of its key, which has n + 1: a row always
holds one token that it has not read yet, and the drafter has read that one, too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from nemotron.stack.models.attention import AttentionCache
from nemotron.stack.models.decoding.cache import Cache
from nemotron.stack.models.mamba2 import MambaCache

# Bytes of a token in a key: a pointer, and CPython's int, which no prompt holds any more once it is answered.
KEY_BYTES = 8 + 28


@dataclass
class RowState:
    """What one row has read: n tokens, `trunk.length`.

    drafter: the cache of the multi-token prediction block, which has read a token more; hidden_D: what it made of that
    one, from which the next draft comes. None without drafts, and before anything was read.
    """

    trunk: Cache
    drafter: Cache | None = None
    hidden_D: Tensor | None = None

    def resized(self, capacity: int) -> RowState:
        """A copy with room for so many tokens."""
        return RowState(
            self.trunk.resized(capacity),
            None if self.drafter is None else self.drafter.resized(capacity),
            self.hidden_D,
        )

    @property
    def num_bytes(self) -> int:
        """Memory of all states."""
        total = 0 if self.hidden_D is None else self.hidden_D.nbytes
        for cache in (self.trunk, self.drafter):
            for layer in cache.layers if cache is not None else ():
                if isinstance(layer, AttentionCache):
                    total += layer.k.nbytes + layer.v.nbytes
                elif isinstance(layer, MambaCache):
                    total += layer.ssm.nbytes + sum(inputs.nbytes for inputs in layer.conv)
        return total


class PromptCache:
    """Row states by the tokens that they have read and the one behind them.

    `num_bytes`: of all states and of their keys, at most `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._kept: OrderedDict[tuple[int, ...], RowState] = OrderedDict()  # used longest ago first
        self._sorted: list[tuple[int, ...]] = []  # the keys: those that share most with a prompt stand beside it

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, tokens: Sequence[int]) -> RowState | None:
        """The state with the longest key that `tokens` begin with. It must not be changed."""
        prefix = tuple(tokens)
        while place := bisect_right(self._sorted, prefix):
            key = self._sorted[place - 1]  # the last that does not come after the prefix
            shared = _num_shared(key, prefix)
            if shared == len(key):
                self._kept.move_to_end(key)
                return self._kept[key]
            prefix = prefix[:shared]  # no longer key can be a prefix of the tokens: it would stand between the two
        return None

    def num_shared(self, tokens: Sequence[int]) -> int:
        """How many of its first tokens a prompt shares with what was kept, at most."""
        key = tuple(tokens)
        place = bisect_left(self._sorted, key)
        return max((_num_shared(other, key) for other in self._sorted[max(0, place - 1) : place + 1]), default=0)

    def keep(self, tokens: Sequence[int], state: RowState) -> None:
        """Keep a state that has read all of `tokens` but the last. It must not be changed any more."""
        key = tuple(tokens)
        num_bytes = _size(key, state)
        if num_bytes > self.max_bytes:
            return
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        self._kept[key] = state
        insort(self._sorted, key)
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            oldest, dropped = self._kept.popitem(last=False)
            del self._sorted[bisect_left(self._sorted, oldest)]
            self.num_bytes -= _size(oldest, dropped)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._sorted.clear()
        self.num_bytes = 0


def _size(key: tuple[int, ...], state: RowState) -> int:
    return state.num_bytes + KEY_BYTES * len(key)


def _num_shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
