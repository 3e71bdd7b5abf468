"""Texts: the split that one belongs to, a hash that is the same everywhere, and the form in which a text is kept."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import Literal, get_args

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2060\ufeff\ud800-\udfff]")
# Vertical tabs (line breaks of slides), form feeds (of pages), separators, NEL: without them words would run together.
_BREAK = re.compile(r"(?<=\S)[\x0b\x0c\x1c-\x1f\x85]+(?=\S)")
# Entered at the first blank of a run only: from each of them, a run of n would take n * n / 2 steps.
_TRAILING = re.compile(r"(?<![ \t])[ \t]++$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{4,}")


def stable_hash(*parts: str) -> int:
    """64-bit hash of strings that is the same in every process and on every machine (Python's own is salted)."""
    data = "\x00".join(parts).encode("utf-8", "surrogatepass")  # ids have names of files, not all of them UTF-8
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def split_of(key: str, valid_fraction: float, seed: int, test_fraction: float = 0.0) -> Split:
    """Deterministic split by the hash of `key`; about these fractions of all keys are held out.

    Equal keys always land in the same split, whatever else is in the data and in whatever order it is read.
    """
    draw = stable_hash("split", str(seed), key)
    if draw < valid_fraction * 2**64:
        return "valid"
    return "test" if draw < (valid_fraction + test_fraction) * 2**64 else "train"


def in_share(key: str, share: float, seed: int) -> bool:
    """Whether a record of this content is among a share in [0, 1] of all: by its hash, so that whatever else is read,
    and by how many workers, decides nothing, and a larger share holds a smaller one of the same seed."""
    return stable_hash("scale", str(seed), key) < share * 2**64


def normalise(text: str) -> str:
    """Canonical Unicode (NFC), Unix line ends (for a vertical tab or a form feed between words, too), no control,
    zero-width or lone surrogate characters, no trailing blanks, at most two blank lines in a row, no blank lines around
    the text. Idempotent."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = _CONTROL.sub("", _BREAK.sub("\n", text))
    text = _TRAILING.sub("", text)
    return unicodedata.normalize("NFC", _BLANK_LINES.sub("\n\n\n", text).strip("\n").rstrip())
