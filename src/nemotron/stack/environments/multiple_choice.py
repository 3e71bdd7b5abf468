"""Multiple choice: lettered options, one of them right, verified by the letter.

Kinds: the largest or smallest number, the word that starts or ends with a letter, the word of a category, the odd one
out. The careful reasoning trace goes through the options one by one; the short one names the choice at once.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from math import comb
from typing import Any

from nemotron.kit.schemas.difficulty import MultipleChoiceDifficulty
from nemotron.stack.environments.task import Solution, Task, Verdict, right, wrong
from nemotron.stack.environments.words import CATEGORY_OF, word_list, words_by_category

FAMILY = "multiple_choice"
LETTERS = "ABCDEF"
_PHRASINGS: dict[str, tuple[str, ...]] = {
    "largest": ("Which is the largest?", "Choose the largest number."),
    "smallest": ("Which is the smallest?", "Choose the smallest number."),
    "starts_with": ("Which starts with {}?", "Choose the word that starts with {}."),
    "ends_with": ("Which ends with {}?", "Choose the word that ends with {}."),
    "category": ("Which is a kind of {}?", "Choose the {}."),
    "odd_one_out": ("Which is the odd one out?", "Choose the odd one out."),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A question of one kind; `query`: the letter or category asked for; `options[0]` is the right one, unshuffled."""

    kind: str
    query: str
    options: tuple[str, ...]

    @property
    def canonical(self) -> str:
        """One string for all orders of the options."""
        return f"{FAMILY}|{self.kind}|{self.query}|{','.join(sorted(self.options))}"


def draw(rng: random.Random, difficulty: MultipleChoiceDifficulty) -> Problem:
    """Draw one problem."""
    kind, count = rng.choice(difficulty.kinds), difficulty.num_options
    if kind in ("largest", "smallest"):
        numbers = rng.sample(range(10 ** (difficulty.min_digits - 1), 10**difficulty.max_digits), count)
        numbers.sort(reverse=kind == "largest")
        return Problem(kind, "", tuple(map(str, numbers)))
    words = word_list(difficulty.words_per_category)
    if kind == "odd_one_out":
        odd = rng.choice(words)
        others = [
            category for category in words_by_category(difficulty.words_per_category) if category != CATEGORY_OF[odd]
        ]
        same = words_by_category(difficulty.words_per_category)[rng.choice(others)]
        return Problem(kind, "", (odd, *rng.sample(same, count - 1)))
    while True:  # until the first word is the only one with its property
        options = tuple(rng.sample(words, count))
        query = _property(kind, options[0])
        if all(_property(kind, other) != query for other in options[1:]):
            return Problem(kind, query, options)


def build(problem: Problem, difficulty: MultipleChoiceDifficulty, rng: random.Random) -> Task:
    """Shuffle and word the problem and draw its demonstration."""
    options = list(problem.options)
    rng.shuffle(options)
    letter = LETTERS[options.index(problem.options[0])]
    question = rng.choice(_PHRASINGS[problem.kind]).format(problem.query)
    prompt = question + "".join(f" {name}) {option}" for name, option in zip(LETTERS, options, strict=False))
    careful = rng.random() < difficulty.careful_share
    reasoning = _careful(problem.kind, options, problem.options[0]) if careful else f"{problem.options[0]} {letter}"
    spec = {"letter": letter, "options": options}
    solution = Solution(reasoning, letter, "careful" if careful else "short")
    return Task(FAMILY, prompt, problem.canonical, spec, solution)


def _property(kind: str, word: str) -> str:
    """What the question asks about a word: its first letter, its last letter, or its category."""
    if kind == "starts_with":
        return word[0]
    return word[-1] if kind == "ends_with" else CATEGORY_OF[word]


def _careful(kind: str, options: list[str], right_option: str) -> str:
    """A trace that ends with the letter of the answer, so that answering is copying.

    Numbers: the best so far and its letter, option by option: `14 A, 52 B, 52 B, 87 D`. Words: the property asked
    about, option by option, then the one that fits: `animal A, vehicle B, tool C, body D: vehicle B`.
    """
    if kind in ("largest", "smallest"):
        better = max if kind == "largest" else min
        so_far = [better(options[: end + 1], key=int) for end in range(len(options))]
        return ", ".join(f"{option} {LETTERS[options.index(option)]}" for option in so_far)
    asked = "category" if kind == "odd_one_out" else kind
    steps = [f"{_property(asked, option)} {name}" for name, option in zip(LETTERS, options, strict=False)]
    return f"{', '.join(steps)}: {steps[options.index(right_option)]}"


def verify_answer(spec: dict[str, Any], answer: str) -> Verdict:
    """Right if the answer is the letter (`B`, `(B)`, `B)`, `B.`), optionally followed by the text of that option."""
    letter, options = str(spec["letter"]), list(spec["options"])
    text = options[LETTERS.index(letter)]
    match = re.fullmatch(r"\(?([A-Z])[).:]?(?:\s+(\S+))?", answer)
    if match is None:
        return wrong("not an option letter")
    if match.group(1) != letter:
        return wrong(f"{match.group(1)} is not {letter}")
    return right() if match.group(2) in (None, text) else wrong(f"option {letter} is {text}")


def space_size(difficulty: MultipleChoiceDifficulty) -> int:
    """Number of different canonical tasks, exact: choices of the options, times what can be asked about them."""
    count, total = difficulty.num_options, 0
    words = word_list(difficulty.words_per_category)
    for kind in set(difficulty.kinds):
        if kind in ("largest", "smallest"):
            total += comb(10**difficulty.max_digits - 10 ** (difficulty.min_digits - 1), count)
        elif kind == "odd_one_out":
            size = difficulty.words_per_category
            total += len(words) // size * comb(size, count - 1) * (len(words) - size)
        else:
            properties = [_property(kind, word) for word in words]
            for value in set(properties):
                share = properties.count(value)
                total += share * comb(len(words) - share, count - 1)
    return total
