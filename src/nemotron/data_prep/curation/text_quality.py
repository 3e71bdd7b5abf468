"""Normalisation and quality heuristics: what a text looks like before and whether it is worth training on.

Thresholds follow published filters and name them: Gopher (Rae et al. 2021, arXiv 2112.11446, appendix A.1.1) for prose,
StarCoder (Li et al. 2023, arXiv 2305.06161, section 3.1) for code. Generated tasks are exempt: they are what they are.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from nemotron.data_prep.sources.documents import Kind

MIN_WORDS = {"prose": 20, "code": 10}  # Gopher asks for 50 words of a web page; a docstring is rightly shorter
MEAN_WORD_LENGTH = (2.0, 12.0)  # Gopher 3..10; identifiers in technical prose are longer
MIN_LETTERS = {"prose": 0.55, "code": 0.25}  # share of non-space characters; StarCoder: 25 % alphanumeric
MAX_DIGITS = 0.20  # share of non-space characters: tables of numbers and character maps
MAX_REPEATED_LINES = 0.30  # Gopher: share of lines that occurred before
MAX_LINE = 1000  # StarCoder: longest line
MAX_MEAN_LINE = 100  # StarCoder: mean line, code only

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2060\ufeff\ud800-\udfff]")
# Entered at the first blank of a run only: from each of them, a run of n would take n * n / 2 steps.
_TRAILING = re.compile(r"(?<![ \t])[ \t]++$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{4,}")
_WORD = re.compile(r"[^\W\d_]+")


def normalise(text: str) -> str:
    """Canonical Unicode (NFC), Unix line ends, no control, zero-width or lone surrogate characters, no trailing
    blanks, at most two blank lines in a row, no blank lines around the text. Idempotent."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = _CONTROL.sub("", text)
    text = _TRAILING.sub("", text)
    return unicodedata.normalize("NFC", _BLANK_LINES.sub("\n\n\n", text).strip("\n").rstrip())


def defect(text: str, kind: Kind) -> str | None:
    """Why a normalised text is not worth training on, as a short reason for the table of drops, or None."""
    if not text.strip():
        return "empty"
    if kind == "task":
        return None
    found = _WORD.findall(text)
    if len(found) < MIN_WORDS[kind]:
        return "too short"
    if not MEAN_WORD_LENGTH[0] <= sum(map(len, found)) / len(found) <= MEAN_WORD_LENGTH[1]:
        return "word length"
    dense = "".join(text.split())
    if sum(map(str.isalpha, dense)) < MIN_LETTERS[kind] * len(dense):
        return "few letters"
    if sum(map(str.isdigit, dense)) > MAX_DIGITS * len(dense):
        return "many digits"
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if kind == "prose":
        if num_repeated(lines) > MAX_REPEATED_LINES * len(lines):
            return "repeated lines"
    else:
        if max(map(len, lines)) > MAX_LINE:
            return "long line"
        if sum(map(len, lines)) > MAX_MEAN_LINE * len(lines):
            return "long lines"
    return None


def num_repeated(items: Sequence[str]) -> int:
    """How many of some lines or paragraphs stood there before."""
    return len(items) - len(set(items))
