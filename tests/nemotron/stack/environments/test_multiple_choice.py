"""Multiple choice: the right letter recomputed from the prompt alone."""

from __future__ import annotations

import itertools
import re
from typing import get_args

import pytest

from nemotron.kit.schemas.difficulty import ChoiceKind
from nemotron.stack.environments import generate_tasks, task_space_size, verify
from nemotron.stack.environments.words import CATEGORIES

KIND_OF = {word: category for category, words in CATEGORIES.items() for word in words}


def solve(prompt: str) -> str:
    """The letter of the only option that fits the question."""
    question, *_ = prompt.split(" A) ")
    options = dict(re.findall(r"([A-F])\) (\w+)", prompt))
    asked = question.rstrip("?.").split()[-1]
    if "largest" in question or "smallest" in question:
        choose = max if "largest" in question else min
        return choose(options, key=lambda letter: int(options[letter]))
    if "odd one" in question:
        kinds = [KIND_OF[word] for word in options.values()]
        fitting = [letter for letter, word in options.items() if kinds.count(KIND_OF[word]) == 1]
    elif "starts" in question:
        fitting = [letter for letter, word in options.items() if word.startswith(asked)]
    elif "ends" in question:
        fitting = [letter for letter, word in options.items() if word.endswith(asked)]
    else:
        fitting = [letter for letter, word in options.items() if KIND_OF[word] == asked]
    assert len(fitting) == 1, prompt
    return fitting[0]


def test_words_are_in_one_category_each() -> None:
    words = list(itertools.chain.from_iterable(CATEGORIES.values()))
    assert len(words) == len(set(words)) == 128


@pytest.mark.parametrize("kind", get_args(ChoiceKind))
@pytest.mark.parametrize("num_options", [3, 4, 6])
def test_one_option_is_right_and_it_is_the_demonstrated_one(kind: str, num_options: int) -> None:
    tasks = generate_tasks("multiple_choice", "train", 150, difficulty={"kinds": [kind], "num_options": num_options})
    for task in tasks:
        assert task.solution.answer == solve(task.prompt)
        rights = [letter for letter in "ABCDEF" if verify(task, letter).status == "score"]
        assert rights == [task.solution.answer]
    assert {task.solution.answer for task in tasks} == set("ABCDEF"[:num_options])


def test_the_careful_trace_of_numbers_is_the_extreme_so_far() -> None:
    tasks = generate_tasks("multiple_choice", "train", 50, difficulty={"kinds": ["largest"], "careful_share": 1.0})
    for task in tasks:
        numbers = [int(number) for number in task.spec["options"]]
        largest = itertools.accumulate(numbers, max)
        expected = ", ".join(f"{number} {'ABCD'[numbers.index(number)]}" for number in largest)
        assert task.solution.reasoning == expected
        assert expected.endswith(task.solution.answer)


def test_forms_of_an_answer() -> None:
    task = generate_tasks("multiple_choice", "train", 1)[0]
    letter = task.solution.answer
    text = task.spec["options"]["ABCD".index(letter)]
    other = "A" if letter != "A" else "B"
    for right in (letter, f"({letter})", f"{letter})", f"{letter}.", f"{letter}) {text}"):
        assert verify(task, right).status == "score", right
    for wrong in (other, letter.lower(), f"{letter} {other}", f"{letter}) nothing", "", "E", f"{other}) {text}"):
        assert verify(task, wrong).status == "wrong", wrong


def test_the_order_of_the_options_does_not_make_another_task() -> None:
    difficulty = {"kinds": ["largest"], "min_digits": 1, "max_digits": 1, "num_options": 3}
    tasks = generate_tasks("multiple_choice", "train", 2000, difficulty=difficulty)
    by_canonical: dict[str, set[tuple[str, ...]]] = {}
    for task in tasks:
        by_canonical.setdefault(task.canonical, set()).add(tuple(task.spec["options"]))
    assert all(len({frozenset(order) for order in orders}) == 1 for orders in by_canonical.values())
    assert max(map(len, by_canonical.values())) > 1


@pytest.mark.parametrize("kind", get_args(ChoiceKind))
def test_the_size_of_the_task_space_is_what_enumeration_finds(kind: str) -> None:
    difficulty = {"kinds": [kind], "num_options": 3, "words_per_category": 2, "min_digits": 1, "max_digits": 1}
    words = [word for words in CATEGORIES.values() for word in words[:2]]
    if kind in ("largest", "smallest"):
        expected = len(list(itertools.combinations(range(1, 10), 3)))
    elif kind == "odd_one_out":
        expected = sum(
            sorted(map([KIND_OF[w] for w in triple].count, [KIND_OF[w] for w in triple])) == [1, 2, 2]
            for triple in itertools.combinations(words, 3)
        )
    else:
        prop = {"starts_with": lambda w: w[0], "ends_with": lambda w: w[-1], "category": KIND_OF.__getitem__}[kind]
        expected = 0
        for triple in itertools.combinations(words, 3):
            found = [prop(word) for word in triple]
            expected += sum(found.count(value) == 1 for value in found)
    assert task_space_size("multiple_choice", difficulty) == expected
