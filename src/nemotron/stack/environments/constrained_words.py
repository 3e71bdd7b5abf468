"""Words to write under constraints with the identifiers of IFEval: on one or two words, on their number, on their form.

The `spec` is that of a published record (`constraints.py` checks it): `instruction_id_list` and `kwargs`. The
demonstration has the words that are asked for, and others as far as their number asks for them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import comb
from typing import Any

from nemotron.kit.schemas.difficulty import InstructionFollowingDifficulty
from nemotron.stack.environments.task import Solution
from nemotron.stack.environments.words import word_list

EXISTENCE, FORBIDDEN, FREQUENCY = "keywords:existence", "keywords:forbidden_words", "keywords:frequency"
NUMBER_WORDS = "length_constraints:number_words"
RELATIONS = ("at least", "less than")
FORMS = {"punctuation:no_comma": "No commas.", "startend:quotation": "In double quotation marks."}


@dataclass(frozen=True, slots=True)
class Problem:
    """keyword: the constraint on `words`, the last of them where the first one has to occur beside a forbidden one.

    times: how often a word has to occur, where that is the constraint; else 0. The number of words is `relation`
    `num_words`. form: the constraint on the text.
    """

    keyword: str
    words: tuple[str, ...]
    times: int
    relation: str
    num_words: int
    form: str

    @property
    def canonical(self) -> str:
        """One string for both orders of two words to write."""
        words = ",".join(self.words if self.keyword == FORBIDDEN else sorted(self.words))
        return f"constraints|{self.keyword}|{words}|{self.times}|{self.relation} {self.num_words}|{self.form}"


def draw(rng: random.Random, difficulty: InstructionFollowingDifficulty) -> Problem:
    """Draw one problem, which has an answer: `less than` leaves room for what the first constraint asks for."""
    keyword = rng.choice((EXISTENCE, FORBIDDEN, FREQUENCY))
    words = rng.sample(word_list(difficulty.words_per_category), 1 if keyword == FREQUENCY else 2)
    times = rng.randint(difficulty.min_times, difficulty.max_times) if keyword == FREQUENCY else 0
    relation, number = rng.choice(RELATIONS), rng.randint(3, difficulty.max_count)
    if relation == "less than":
        number += difficulty.max_times
    return Problem(keyword, tuple(words), times, relation, number, rng.choice(list(FORMS)))


def build(
    problem: Problem, difficulty: InstructionFollowingDifficulty, rng: random.Random
) -> tuple[str, dict[str, Any], Solution]:
    """Prompt, spec and a demonstration."""
    first, *rest = problem.words
    constraints: list[tuple[str, dict[str, Any]]]
    if problem.keyword == EXISTENCE:
        items = rng.sample(problem.words, 2)
        asked, constraints = f"Include {items[0]} and {items[1]}.", [(EXISTENCE, {"keywords": sorted(items)})]
    elif problem.keyword == FORBIDDEN:
        asked, items = f"Include {first}. Do not write {rest[0]}.", [first]
        constraints = [(EXISTENCE, {"keywords": items}), (FORBIDDEN, {"forbidden_words": rest})]
    else:
        asked, items = f"Write {first} at least {problem.times} times.", [first] * problem.times
        constraints = [(FREQUENCY, {"keyword": first, "frequency": problem.times, "relation": "at least"})]
    constraints.append((NUMBER_WORDS, {"num_words": problem.num_words, "relation": problem.relation}))
    constraints.append((problem.form, {}))
    # As many as asked for, or two where fewer are; `less than` is above what the first constraint takes.
    missing = (problem.num_words if problem.relation == "at least" else 2) - len(items)
    others = [word for word in word_list(difficulty.words_per_category) if word not in problem.words]
    items = [*items, *rng.sample(others, max(missing, 0))]
    careful = rng.random() < difficulty.careful_share
    reasoning = " ".join(f"{n} {item}" for n, item in enumerate(items, 1)) if careful else f"{len(items)} words"
    answer = " ".join(items)
    spec = {
        "instruction_id_list": [name for name, _ in constraints],
        "kwargs": [arguments for _, arguments in constraints],
    }
    prompt = f"Write words. {asked} {problem.relation.capitalize()} {problem.num_words} words. {FORMS[problem.form]}"
    in_form = answer if problem.form == "punctuation:no_comma" else f'"{answer}"'
    return prompt, spec, Solution(reasoning, in_form, "careful" if careful else "short")


def space_size(difficulty: InstructionFollowingDifficulty) -> int:
    """Number of different canonical tasks, exact."""
    words = len(word_list(difficulty.words_per_category))
    keywords = comb(words, 2) + words * (words - 1) + words * (difficulty.max_times - difficulty.min_times + 1)
    return keywords * len(RELATIONS) * (difficulty.max_count - 2) * len(FORMS)
