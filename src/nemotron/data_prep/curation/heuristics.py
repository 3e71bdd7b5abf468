"""Heuristic filters for web pages: counts and ratios of words, lines and characters, and what repeats.

The set is the one that NeMo Curator applies to English pages, with the values of the papers that it follows:

    Gopher   Rae et al. 2021, arXiv 2112.11446, appendix A.1.1 (quality) and table A1 (repetition)
    C4       Raffel et al. 2020, arXiv 1910.10683, section 2.2
    FineWeb  Penedo et al. 2024, arXiv 2406.17557, section 3.6
    StarCoder  Li et al. 2023, arXiv 2305.06161, section 3.1 (source code)
    Curator  NeMo Curator's own, after Gopher and C4 (its heuristic filters for English)

Each filter is a function of a `Page` that returns a number; a page passes if the number is within its limits. C4 also
takes single lines out of pages; here a page stays or goes whole. Words are what stands between white space, as in
Curator (C4 and FineWeb use a tokenizer).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from nemotron.data_prep.curation.step import Document, Drop, Keep
from nemotron.kit.schemas.curation import HeuristicSettings
from nemotron.kit.schemas.limits import LimitConfig

STOP_WORDS = frozenset(["the", "be", "to", "of", "and", "that", "have", "with"])  # Gopher
BULLETS = ("•", "‣", "⁃", "∙", "○", "●", "◦", "▪", "■", "* ", "- ")
ELLIPSES = ("...", "…", "[...]", "[…]", "read more")
END_MARKS = (".", "?", "!", '"', "'", "”", "’")
PHRASES = (  # C4's, and two more of their kind
    "terms of use",
    "terms of service",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
    "all rights reserved",
)
SHORT_LINE = 30  # characters; FineWeb

_PARAGRAPHS = re.compile(r"\n{2,}")
_URL = re.compile(r"https?://\S+")


class Page:
    """A text and its parts, each cut once however many filters look at it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._grams: dict[int, Grams | None] = {}

    @cached_property
    def words(self) -> list[str]:
        """What stands between white space."""
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        """Lines that are not blank, without the blanks around them."""
        return [line for line in map(str.strip, self.text.split("\n")) if line]

    @cached_property
    def paragraphs(self) -> list[str]:
        """What stands between blank lines."""
        return [part for part in map(str.strip, _PARAGRAPHS.split(self.text)) if part]

    @cached_property
    def word_ids(self) -> np.ndarray:
        """int64: the same number for the same word, in any letter case."""
        numbers: dict[str, int] = {}
        return np.array([numbers.setdefault(word.lower(), len(numbers)) for word in self.words], dtype=np.int64)

    @cached_property
    def word_lengths(self) -> np.ndarray:
        """int64: characters of each word."""
        return np.array([len(word) for word in self.words], dtype=np.int64)

    def grams(self, n: int) -> Grams | None:
        """The runs of n words, exactly told apart; None if no run of n words stands there twice."""
        if n not in self._grams:
            self._grams[n] = self._find_grams(n)
        return self._grams[n]

    def _find_grams(self, n: int) -> Grams | None:
        if n == 1:
            keys = self.word_ids
        else:
            shorter = self.grams(n - 1)
            if shorter is None or len(self.word_ids) < n:
                return None
            # A run is its first n - 1 words and its last word; both are numbered from 0, so the product stays small.
            keys = shorter.ids[:-1] * len(self.words) + self.word_ids[n - 1 :]
        _, first, ids = np.unique(keys, return_index=True, return_inverse=True)
        return Grams(ids.astype(np.int64), first) if len(first) < len(keys) else None


@dataclass(frozen=True, slots=True)
class Grams:
    """Runs of n words. `ids` [i]: a number for the run that begins at word i; `first` [id]: where it begins first."""

    ids: np.ndarray
    first: np.ndarray


# --- Gopher: quality ------------------------------------------------------------------------------------------------


def word_count(page: Page) -> float:
    """Words."""
    return len(page.words)


def mean_word_length(page: Page) -> float:
    """Characters a word; 0 without words."""
    return float(page.word_lengths.mean()) if page.words else 0.0


def symbol_to_word_ratio(page: Page) -> float:
    """The number of hash signs or of ellipses, whichever is larger, divided by that of words."""
    ellipses = page.text.count("...") + page.text.count("…")
    return max(page.text.count("#"), ellipses) / max(1, len(page.words))


def bullet_lines(page: Page) -> float:
    """Share of lines that begin with a bullet."""
    return _share(line.startswith(BULLETS) for line in page.lines)


def ellipsis_lines(page: Page) -> float:
    """Share of lines that end with an ellipsis."""
    return _share(line.lower().endswith(ELLIPSES) for line in page.lines)


def alphabetic_words(page: Page) -> float:
    """Share of words with at least one letter."""
    return _share(any(map(str.isalpha, word)) for word in page.words)


def stop_words(page: Page) -> float:
    """How many words are one of eight frequent English ones, in lower case: a text in capitals has none."""
    return sum(word in STOP_WORDS for word in page.words)


# --- Gopher: repetition ---------------------------------------------------------------------------------------------


def duplicate_lines(page: Page) -> float:
    """Share of lines that stood there before."""
    return _num_repeated(page.lines) / max(1, len(page.lines))


def duplicate_paragraphs(page: Page) -> float:
    """Share of paragraphs that stood there before."""
    return _num_repeated(page.paragraphs) / max(1, len(page.paragraphs))


def duplicate_line_chars(page: Page) -> float:
    """Share of characters in lines that stood there before (also FineWeb's, with a lower limit)."""
    return _repeated_chars(page.lines)


def duplicate_paragraph_chars(page: Page) -> float:
    """Share of characters in paragraphs that stood there before."""
    return _repeated_chars(page.paragraphs)


def top_ngram_chars(page: Page, n: int) -> float:
    """Share of the words' characters in the most frequent run of n words, if there are two of it; else 0.

    Runs that overlap count their characters once. Of equally frequent ones that of most characters counts.
    """
    grams = page.grams(n)
    if grams is None:
        return 0.0
    counts = np.bincount(grams.ids)
    # Characters of a run: of all runs of the highest count, that of the most characters.
    lengths = np.convolve(page.word_lengths, np.ones(n, dtype=np.int64), mode="valid")
    candidates = counts[grams.ids] == counts.max()
    best = grams.ids[candidates][np.argmax(lengths[candidates])]
    return _covered(page.word_lengths, grams.ids == best, n)


def duplicate_ngram_chars(page: Page, n: int) -> float:
    """Share of the words' characters in runs of n words that stood there before; each character counts once."""
    grams = page.grams(n)
    if grams is None:
        return 0.0
    again = np.ones(len(grams.ids), dtype=bool)
    again[grams.first] = False
    return _covered(page.word_lengths, again, n)


# --- C4 -------------------------------------------------------------------------------------------------------------


def lines_without_end_mark(page: Page) -> float:
    """Share of lines that do not end like a sentence."""
    return _share(not line.endswith(END_MARKS) for line in page.lines)


def longest_word(page: Page) -> float:
    """Characters of the longest word: minified scripts have no white space."""
    return float(page.word_lengths.max()) if page.words else 0.0


def placeholder_text(page: Page) -> float:
    """1 where the page says "lorem ipsum", else 0."""
    return float("lorem ipsum" in page.text.lower())


def boilerplate_paragraphs(page: Page) -> float:
    """Share of paragraphs about cookies, terms and privacy."""
    return _share(any(phrase in part.lower() for phrase in PHRASES) for part in page.paragraphs)


# --- FineWeb --------------------------------------------------------------------------------------------------------


def lines_with_end_mark(page: Page) -> float:
    """Share of lines that end like a sentence; FineWeb found a much lower limit than C4's rule to be enough."""
    return 1.0 - lines_without_end_mark(page)


def short_lines(page: Page) -> float:
    """Share of lines shorter than 30 characters."""
    return _share(len(line) < SHORT_LINE for line in page.lines)


# --- NeMo Curator ---------------------------------------------------------------------------------------------------


def non_alphanumeric(page: Page) -> float:
    """Share of characters that are no letter, digit, line end or one of ?!,. (blanks count as non-alphanumeric)."""
    plain = count_characters(page.text, str.isalnum, ALNUM) + sum(map(page.text.count, "\n?!,."))
    return 1.0 - plain / max(1, len(page.text))


def digits(page: Page) -> float:
    """Share of characters that are digits."""
    return count_characters(page.text, str.isdigit, DIGITS) / max(1, len(page.text))


def url_chars(page: Page) -> float:
    """Share of characters in web addresses."""
    return sum(map(len, _URL.findall(page.text))) / max(1, len(page.text))


def white_space(page: Page) -> float:
    """Share of characters that are white space."""
    return count_characters(page.text, str.isspace, SPACE) / max(1, len(page.text))


def parentheses(page: Page) -> float:
    """Share of characters that are brackets of any kind."""
    return sum(map(page.text.count, "()[]{}⟨⟩")) / max(1, len(page.text))


# --- StarCoder: source code -----------------------------------------------------------------------------------------


def longest_line(page: Page) -> float:
    """Characters of the longest line."""
    return max(map(len, page.lines), default=0)


def mean_line_length(page: Page) -> float:
    """Characters a line."""
    return sum(map(len, page.lines)) / max(1, len(page.lines))


# --- All of them ----------------------------------------------------------------------------------------------------


Measure = Callable[[Page], float]


MEASURES: dict[str, Measure] = {
    # In the order in which a page meets them: cheap ones first.
    "word_count": word_count,
    "mean_word_length": mean_word_length,
    "longest_word": longest_word,
    "stop_words": stop_words,
    "symbol_to_word_ratio": symbol_to_word_ratio,
    "placeholder_text": placeholder_text,
    "boilerplate_paragraphs": boilerplate_paragraphs,
    "bullet_lines": bullet_lines,
    "ellipsis_lines": ellipsis_lines,
    "lines_without_end_mark": lines_without_end_mark,
    "lines_with_end_mark": lines_with_end_mark,
    "short_lines": short_lines,
    "longest_line": longest_line,
    "mean_line_length": mean_line_length,
    "alphabetic_words": alphabetic_words,
    "non_alphanumeric": non_alphanumeric,
    "digits": digits,
    "url_chars": url_chars,
    "white_space": white_space,
    "parentheses": parentheses,
    "duplicate_lines": duplicate_lines,
    "duplicate_paragraphs": duplicate_paragraphs,
    "duplicate_line_chars": duplicate_line_chars,
    "duplicate_paragraph_chars": duplicate_paragraph_chars,
    **{f"top_{n}gram_chars": partial(top_ngram_chars, n=n) for n in (2, 3, 4)},
    **{f"duplicate_{n}gram_chars": partial(duplicate_ngram_chars, n=n) for n in range(5, 11)},
}
"""Every filter by the name that configs give it."""


def first_failure(text: str, limits: Mapping[str, LimitConfig | None]) -> tuple[str, float] | None:
    """The first filter that a text does not pass, with the text's value; None if it passes all.

    Args:
        limits: filter (a key of `MEASURES`) -> between what values a page passes; filters that are absent or None are
            not applied.
    """
    page = Page(text)
    for name, measure in MEASURES.items():
        limit = limits.get(name)
        if limit is not None and not limit.allow(value := measure(page)):
            return name, value
    return None


def _num_repeated(items: Sequence[str]) -> int:
    """How many of some lines or paragraphs stood there before."""
    return len(items) - len(set(items))


def _share(flags: Iterable[bool]) -> float:
    """Share of true ones; 0 where there is none at all."""
    known = list(flags)
    return sum(known) / len(known) if known else 0.0


_ASCII = [chr(code) for code in range(128)]
ALNUM, DIGITS, SPACE, UPPER, ALPHA = (
    "".join(filter(test, _ASCII)).encode() for test in (str.isalnum, str.isdigit, str.isspace, str.isupper, str.isalpha)
)


def count_characters(text: str, test: Callable[[str], bool], members: bytes) -> int:
    """Characters that pass a test. `members`: those of ASCII that do; a text of ASCII alone is counted much faster."""
    if not text.isascii():
        return sum(map(test, text))
    encoded = text.encode()
    return len(encoded) - len(encoded.translate(None, members))


def _repeated_chars(items: Sequence[str]) -> float:
    total = sum(map(len, items))
    return sum(len(item) * (count - 1) for item, count in Counter(items).items()) / max(1, total)


def _covered(word_lengths: np.ndarray, begins: np.ndarray, n: int) -> float:
    """Share of the words' characters in runs of n words. `begins`: bool, whether a run begins at each word."""
    steps = np.zeros(len(word_lengths) + 1, dtype=np.int64)
    starts = np.flatnonzero(begins)
    np.add.at(steps, starts, 1)
    np.add.at(steps, starts + n, -1)
    covered = np.cumsum(steps)[:-1] > 0
    return float(word_lengths[covered].sum() / word_lengths.sum())


# --- The step -------------------------------------------------------------------------------------------------------


def judge_by_kind(document: Document, settings: Mapping[str, HeuristicSettings]) -> Keep | Drop:
    """As `judge`, with the settings for the document's `kind`; a kind without any passes (generated tasks)."""
    of_kind = settings.get(document["kind"])
    return Keep(document) if of_kind is None else judge(document, of_kind)


def judge(document: Document, settings: HeuristicSettings) -> Keep | Drop:
    """A document that passes all filters stays; the reason of a drop is the name of the first filter that it fails."""
    if document.get("quality") in settings.exempt:
        return Keep(document, (f"exempt, quality {document['quality']}",))
    failure = first_failure(document["text"], settings.limits)
    return Keep(document) if failure is None else Drop(failure[0], f"{failure[1]:.4g}")
