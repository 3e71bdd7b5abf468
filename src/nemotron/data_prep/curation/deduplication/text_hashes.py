"""64-bit hashes of many words or windows of text at once, in numpy.

All of them are polynomials modulo 2**64 over values that were mixed before, and are mixed again at the end (the
finaliser of SplitMix64, Steele et al. 2014, doi 10.1145/2660193.2660195). Texts made for it can collide; two that
were not do so with a probability of about 2**-64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

BASES = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
"""Odd numbers, so that multiplication is a bijection on 64 bits. The second one is for a second, independent hash."""


def mix(values: U64) -> U64:
    """A bijection on 64 bits that spreads every bit of the input over all of the output."""
    mixed = values >> np.uint64(30)
    mixed ^= values
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def mix_points(points: NDArray[np.uint32], seed: int = 0) -> U64:
    """The mixed values of characters; another seed gives others. From a table: texts are of few characters."""
    return _mixed_points(seed)[points]


@cache
def _mixed_points(seed: int) -> U64:
    return mix(np.arange(0x110000, dtype=np.uint64) + np.uint64(seed << 32 | 1))


def code_points(texts: Sequence[str]) -> tuple[NDArray[np.uint32], I64]:
    """All characters of some texts one after another, and where each text begins; the last entry is the total."""
    flat = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype="<u4")
    bounds = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum([len(text) for text in texts], out=bounds[1:])
    return flat, bounds


def window_hashes(values: U64, size: int, base: int = BASES[0]) -> U64:
    """Hash of every window of `size` consecutive values, which are mixed ones.

    Returns len(values) - size + 1 hashes, none if there are fewer values than that.
    """
    return mix(window_polynomials(values, size, base))


def window_polynomials(values: U64, size: int, base: int = BASES[0]) -> U64:
    """As `window_hashes`, not mixed: only the highest bits depend on all values. By doubling, which takes some
    2 log2(size) vector operations."""
    count = len(values) - size + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    hashes, length = values, 1
    for bit in bin(size)[3:]:
        hashes = hashes[:-length] * np.uint64(pow(base, length, 2**64)) + hashes[length:]
        length *= 2
        if bit == "1":
            hashes = hashes[:-1] * np.uint64(base) + values[length:]
            length += 1
    return hashes[:count]


def span_hashes(values: U64, starts: I64, ends: I64, base: int = BASES[0]) -> U64:
    """Hash of every values[start:end], each equal for equal content, wherever it stands. `values` are mixed ones."""
    inverse = pow(base, -1, 2**64)
    prefix = np.zeros(len(values) + 1, dtype=np.uint64)
    np.cumsum(values * _powers(base, len(values)), out=prefix[1:])
    sums = (prefix[ends] - prefix[starts]) * _powers(inverse, len(values) + 1)[starts]
    return mix(sums + (ends - starts).astype(np.uint64) * np.uint64(BASES[1]))


def _powers(base: int, count: int) -> U64:
    """base**0, base**1, …, modulo 2**64; kept from call to call."""
    powers = _known_powers(base, 1 << max(10, (count - 1).bit_length()))
    return powers[:count]


@cache
def _known_powers(base: int, count: int) -> U64:
    powers = np.full(count, base, dtype=np.uint64)
    powers[0] = 1
    np.cumprod(powers, out=powers)
    return powers


# --- Characters by class ----------------------------------------------------------------------------------------------

SPACE, PART, SINGLE = 0, 1, 2

# Scripts that are written without spaces: a character there is a unit of its own, as a word is elsewhere.
NO_SPACES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x2E80, 0x2FDF),  # CJK radicals
    (0x3001, 0x31FF),  # CJK punctuation, kana, bopomofo (with Hangul compatibility letters)
    (0x3400, 0x4DBF),  # CJK ideographs, extension A
    (0x4E00, 0x9FFF),  # CJK ideographs
    (0xF900, 0xFAFF),  # CJK compatibility ideographs
    (0xFF00, 0xFFEF),  # full-width forms
    (0x1B000, 0x1B16F),  # kana supplements
    (0x20000, 0x3FFFF),  # CJK ideographs, further extensions
)


@cache
def _token_classes() -> NDArray[np.uint8]:
    classes = np.full(0x110000, PART, dtype=np.uint8)
    for first, last in NO_SPACES:
        classes[first : last + 1] = SINGLE
    classes[[c for c in range(0x3001) if chr(c).isspace()]] = SPACE
    return classes


@cache
def _word_classes() -> NDArray[np.uint8]:
    """As the pattern `\\w`: letters, digits and the underscore are parts of words, all else stands between words."""
    parts = np.fromiter((chr(c).isalnum() or c == 0x5F for c in range(0x110000)), dtype=np.bool_, count=0x110000)
    return np.where(parts, PART, SPACE).astype(np.uint8)


def find_tokens(points: NDArray[np.uint32], bounds: I64) -> tuple[I64, I64]:
    """Where every token of some texts begins and ends, in characters.

    A token is a run of characters that are no whitespace; in scripts without spaces, every character is one.
    `bounds`: where the texts begin and the last one ends, as from `code_points`; no token crosses them.
    """
    return _runs(_token_classes()[points], bounds)


def find_words(points: NDArray[np.uint32], bounds: I64) -> tuple[I64, I64]:
    """Where every word of some texts begins and ends, in characters: the matches of `\\w+`."""
    return _runs(_word_classes()[points], bounds)


def _runs(classes: NDArray[np.uint8], bounds: I64) -> tuple[I64, I64]:
    if not len(classes):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    new = np.empty(len(classes) + 1, dtype=np.bool_)  # whether a run begins here, or would
    new[0] = new[-1] = True
    new[1:-1] = (classes[1:] != classes[:-1]) | (classes[1:] == SINGLE)
    new[bounds] = True
    places = np.flatnonzero(new)
    visible = classes[places[:-1]] != SPACE
    return places[:-1][visible], places[1:][visible]
