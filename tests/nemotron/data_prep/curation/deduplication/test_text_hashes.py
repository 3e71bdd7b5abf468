"""Hashes and tokens in numpy against plain Python: integers modulo 2**64, str.split, re."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemotron.data_prep.curation.deduplication.text_hashes import (
    BASES,
    code_points,
    find_tokens,
    find_words,
    mix,
    span_hashes,
    window_hashes,
)

TEXT = st.text(
    st.sampled_from("ab\u00e9 \n\t\u3000\u2028_-.9\u4e2d\u65e5\u3042\u0e01\U0001f600\ud800\u0301"), max_size=40
)


def splitmix_finaliser(value: int) -> int:
    """From the reference code in C by Vigna (splitmix64.c), without its counter."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)


def test_mix_is_the_published_finaliser() -> None:
    # The first outputs of splitmix64 seeded with 0: the finaliser of 1, 2, 3 times the golden gamma.
    gammas = (np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    assert [hex(v) for v in mix(gammas).tolist()] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40), st.integers(1, 45))
def test_window_hashes_are_polynomials(values: list[int], size: int) -> None:
    expected = []
    for begin in range(len(values) - size + 1):
        total = 0
        for value in values[begin : begin + size]:
            total = (total * BASES[0] + value) % 2**64
        expected.append(splitmix_finaliser(total))
    assert window_hashes(np.array(values, dtype=np.uint64), size).tolist() == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.data())
def test_span_hashes_are_equal_where_content_is(values: list[int], data: st.DataObject) -> None:
    mixed = mix(np.array(values, dtype=np.uint64))
    pairs = data.draw(st.lists(st.tuples(st.integers(0, len(values)), st.integers(0, len(values))), min_size=1))
    starts, ends = np.array([sorted(pair) for pair in pairs]).T
    contents = [tuple(values[a:b]) for a, b in zip(starts, ends, strict=True)]
    hashes = span_hashes(mixed, starts, ends).tolist()
    # As many different hashes as contents, and the same for the same.
    assert len(set(zip(contents, hashes, strict=True))) == len(set(contents)) == len(set(hashes))


def slow_tokens(text: str) -> list[str]:
    """Split at whitespace, then around every character of a script without spaces."""
    return [
        token
        for run in text.split()
        for token in re.findall(
            "[\u4e00-\u9fff\u3041-\u30ff\u0e00-\u0e7f]|[^\u4e00-\u9fff\u3041-\u30ff\u0e00-\u0e7f]+", run
        )
    ]


@given(st.lists(TEXT, max_size=6))
def test_tokens_and_words(texts: list[str]) -> None:
    points, bounds = code_points(texts)
    together = "".join(texts)
    for find, slow in ((find_tokens, slow_tokens), (find_words, re.compile(r"\w+").findall)):
        starts, ends = find(points, bounds)
        found = [together[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        assert found == [token for text in texts for token in slow(text)]


def test_words_are_those_of_the_regular_expression_for_every_character() -> None:
    every = [chr(c) for c in range(0x110000)]
    points, bounds = code_points(["".join(every)])
    starts, ends = find_words(points, bounds)
    marked = np.zeros(len(every) + 1, dtype=int)
    np.add.at(marked, starts, 1)
    np.add.at(marked, ends, -1)
    word = re.compile(r"\w")
    assert np.flatnonzero(np.cumsum(marked[:-1])).tolist() == [c for c in range(0x110000) if word.match(every[c])]


@pytest.mark.parametrize("size", [24, 50])
def test_no_collisions_among_many(size: int) -> None:
    """A million windows of a text over two letters: the worst that natural text comes near to."""
    letters = np.random.default_rng(0).integers(0, 2, 2**19).astype(np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(letters, size) @ (1 << np.arange(size, dtype=np.uint64))
    hashes = window_hashes(mix(letters + np.uint64(1)), size)
    assert len(np.unique(hashes)) == len(np.unique(windows))
