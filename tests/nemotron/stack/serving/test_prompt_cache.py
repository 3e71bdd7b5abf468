"""The prompt cache against a search through everything that it holds."""

from __future__ import annotations

import sys

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotron.stack.models.attention import AttentionCache
from nemotron.stack.models.decoding.cache import Cache
from nemotron.stack.models.mamba2 import MambaCache
from nemotron.stack.serving.prompt_cache import PromptCache, RowState

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=7)


def state_of(length: int, num_bytes: int = 8) -> RowState:
    ssm = torch.zeros(1, num_bytes, dtype=torch.uint8)
    return RowState(Cache([None, MambaCache([], ssm)], length=length))


@given(st.lists(TOKENS, max_size=25), st.lists(TOKENS, max_size=8))
@settings(max_examples=150, deadline=None)
def test_the_longest_kept_prefix_is_found(kept: list[list[int]], asked: list[list[int]]) -> None:
    """Room for some states of 8 bytes and their keys; the model is a list, the one that was used last at its end."""
    cache, model = PromptCache(700), list[list[int]]()
    for index, tokens in enumerate(kept):
        cache.keep(tokens, state_of(len(tokens) - 1))
        model = [*(key for key in model if key != tokens), tokens]
        while sum(8 + 36 * len(key) for key in model) > 700:
            model.pop(0)
        for prompt in asked[index % 8 :]:
            prefixes = [key for key in model if prompt[: len(key)] == key]
            longest = max(prefixes, key=len, default=None)
            found = cache.longest(prompt)
            assert (None if found is None else found.trunk.length + 1) == (None if longest is None else len(longest))
            if longest is not None:
                model.remove(longest)
                model.append(longest)
            shared = [max(n for n in range(len(prompt) + 1) if key[:n] == prompt[:n]) for key in model]
            assert cache.num_shared(prompt) == max(shared, default=0)
        assert len(cache) == len(model) and cache.num_bytes == sum(8 + 36 * len(key) for key in model)
    cache.clear()
    assert len(cache) == cache.num_bytes == cache.num_shared([1]) == 0 and cache.longest([1]) is None


def test_bytes_are_those_of_all_states() -> None:
    attention = AttentionCache(torch.zeros(1, 2, 5, 3), torch.zeros(1, 2, 5, 3))  # 2 x 120
    mamba = MambaCache([torch.zeros(1, 7), torch.zeros(1, 7)], torch.zeros(1, 2, 3, 4, dtype=torch.float64))  # 56 + 192
    state = RowState(Cache([attention, None, mamba], length=5), Cache([attention], length=5))
    assert state.num_bytes == 240 + 56 + 192 + 240
    assert RowState(state.trunk, state.drafter, torch.zeros(1, 5)).num_bytes == state.num_bytes + 20
    key = tuple(range(1000, 1006))  # Python's own view of it, less the tuple's head
    assert sys.getsizeof(key) - sys.getsizeof(()) + sum(map(sys.getsizeof, key)) == 6 * 36
    cache = PromptCache(728 + 6 * 36 - 1)
    cache.keep([1] * 6, state)
    assert len(cache) == 0
    cache = PromptCache(728 + 6 * 36)
    cache.keep([1] * 6, state)
    assert cache.longest([1] * 9) is state
