"""Instructions: right and wrong answers by hand, and the size of the task space by enumeration."""

from __future__ import annotations

from math import comb, perm
from typing import Any, get_args

import pytest

from nemotron.kit.schemas.difficulty import InstructionKind
from nemotron.stack.environments import Solution, Task, best_constant_answer, generate_tasks, task_space_size, verify


def task(kind: str, count: int, named: str = "", given: str = "", separator: str = "any") -> Task:
    spec = {"kind": kind, "count": count, "named": named.split(), "given": given.split(), "separator": separator}
    return Task("instruction_following", "", "", spec, Solution("", ""))


REPEAT = task("repeat", 2, named="cat hat")
REPEAT_COMMAS = task("repeat", 2, named="cat hat", separator="commas")
REPEAT_DASHES = task("repeat", 2, named="cat hat", separator="dashes")
PICK = task("pick", 2, given="cat hat arm leg")
PICK_NOT = task("pick_not", 2, named="cat", given="cat hat arm leg")
REORDER = task("reorder", 3, named="hat", given="cat hat arm")
FIRST_LAST = task("first_last", 3, named="cat hat")
UPPER = task("upper", 2, given="cat hat")


@pytest.mark.parametrize(
    ("instruction", "answer"),
    [
        (REPEAT, "cat cat hat"),
        (REPEAT, "cat, cat, hat"),
        (REPEAT, "cat-cat-hat"),
        (REPEAT, "cat, cat and hat."),
        (REPEAT_COMMAS, "cat,cat, hat"),
        (REPEAT_DASHES, "cat - cat-hat"),
        (PICK, "arm, cat"),
        (PICK, "leg and hat"),
        (PICK, "hat\nleg"),
        (PICK_NOT, "leg hat"),
        (REORDER, "hat cat arm"),
        (REORDER, "hat, arm, cat"),
        (FIRST_LAST, "cat dog hat"),
        (FIRST_LAST, "cat, anything, hat"),
        (UPPER, "CAT HAT"),
        (UPPER, "HAT, CAT"),
    ],
)
def test_right(instruction: Task, answer: str) -> None:
    assert verify(instruction, answer).status == "score"


@pytest.mark.parametrize(
    ("instruction", "answer"),
    [
        (REPEAT, "cat hat"),
        (REPEAT, "cat cat cat hat"),
        (REPEAT, "cat cat Hat"),
        (REPEAT, ""),
        (REPEAT, "cat cat hat!"),
        (REPEAT_COMMAS, "cat cat hat"),
        (REPEAT_COMMAS, "cat, cat hat"),
        (REPEAT_DASHES, "cat, cat, hat"),
        (PICK, "arm"),
        (PICK, "arm arm"),
        (PICK, "arm, cat, leg"),
        (PICK, "arm, dog"),
        (PICK_NOT, "cat hat"),
        (REORDER, "cat hat arm"),
        (REORDER, "hat cat cat"),
        (FIRST_LAST, "cat cat hat"),
        (FIRST_LAST, "cat CAT hat"),
        (FIRST_LAST, "hat dog cat"),
        (FIRST_LAST, "cat 7 hat"),
        (UPPER, "cat hat"),
        (UPPER, "CAT"),
        (UPPER, "CAT CAT HAT"),
    ],
)
def test_wrong(instruction: Task, answer: str) -> None:
    assert verify(instruction, answer).status == "wrong"


@pytest.mark.parametrize("kind", get_args(InstructionKind))
def test_demonstrations_are_right_and_vary(kind: str) -> None:
    tasks = generate_tasks("instruction_following", "train", 300, difficulty={"kinds": [kind]})
    assert all(verify(each, each.solution.answer).status == "score" for each in tasks)
    assert {each.solution.style for each in tasks} == {"careful", "short"}
    for each in tasks:  # every word with a role, and every word given, stands in the prompt
        assert all(word in each.prompt for word in [*each.spec["named"], *each.spec["given"]])


def test_answers_to_one_instruction_differ_in_order_and_separators() -> None:
    difficulty = {"kinds": ["reorder"], "words_per_category": 2, "num_reorder": 3}
    tasks = generate_tasks("instruction_following", "train", 4000, difficulty=difficulty)
    answers: dict[str, set[str]] = {}
    for each in tasks:
        answers.setdefault(each.canonical, set()).add(each.solution.answer)
    assert max(map(len, answers.values())) == 4  # two orders of the other words, two separators


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("repeat", perm(16, 2) * 2 * 3),  # 2 or 3 times; any separator, commas or dashes
        ("first_last", perm(16, 2) * 2),  # 3 or 4 words
        ("upper", comb(16, 2)),
        ("reorder", comb(16, 3) * 3),
        ("pick", comb(16, 4) * 2),  # 2 or 3 of 4
        ("pick_not", comb(16, 4) * 2 * 4),
    ],
)
def test_the_size_of_the_task_space(kind: str, size: int) -> None:
    difficulty = {"kinds": [kind], "words_per_category": 2}
    assert task_space_size("instruction_following", difficulty) == size
    if size < 2000:
        drawn = generate_tasks("instruction_following", "train", 8 * size, difficulty=difficulty)
        assert 0.8 * size < len({each.canonical for each in drawn}) < 0.9 * size  # 85 % belong to this split


def words_in(keyword: dict[str, Any]) -> list[str]:
    """The words that a constraint on words is about."""
    words: list[str] = keyword.get("keywords") or keyword.get("forbidden_words") or [keyword["keyword"]]
    return words


def test_problems_under_published_constraints_have_right_demonstrations_and_their_words_in_the_prompt() -> None:
    tasks = generate_tasks("instruction_following", "train", 600, difficulty={"constraint_share": 1.0, "max_times": 9})
    constraints = [tuple(each.spec["instruction_id_list"]) for each in tasks]
    assert len(set(constraints)) == 6 and all(name[-2] == "length_constraints:number_words" for name in constraints)
    relations = {each.spec["kwargs"][-2]["relation"] for each in tasks}
    assert relations == {"at least", "less than"} and {each.solution.style for each in tasks} == {"careful", "short"}
    for each in tasks:
        assert verify(each, each.solution.answer).status == "score"
        *keywords, length, _ = each.spec["kwargs"]
        words = [word for keyword in keywords for word in words_in(keyword)]
        assert all(word in each.prompt for word in (*words, str(length["num_words"]), length["relation"].capitalize()))
    assert best_constant_answer(tasks, "bubblewrap").score < 0.1


def test_an_answer_that_breaks_one_of_the_constraints_is_wrong() -> None:
    tasks = generate_tasks("instruction_following", "train", 200, difficulty={"constraint_share": 1.0})
    for each in tasks:
        *keywords, length, _ = each.spec["kwargs"]
        *_, form = each.spec["instruction_id_list"]
        items, quote = each.solution.answer.strip('"').split(), '"' if form == "startend:quotation" else ""
        # Words of no list in place of those asked for; too few or too many words; and the forbidden word.
        broken = [["zz" if item in words_in(keywords[0]) else item for item in items]]
        broken.append(items[: length["num_words"] - 1] if length["relation"] == "at least" else items + ["zz"] * 20)
        broken += [[*items[:-1], *words_in(keyword)] for keyword in keywords if "forbidden_words" in keyword]
        for words in broken:
            assert verify(each, f"{quote}{' '.join(words)}{quote}").status == "wrong"
        assert verify(each, f"{each.solution.answer},").status == "wrong"  # a comma; or no quotation marks


def test_the_share_of_constraints_mixes_them_in_and_zero_draws_nothing_else() -> None:
    def problems(share: float) -> list[Task]:
        return generate_tasks("instruction_following", "train", 400, difficulty={"constraint_share": share})

    mixed = sum("instruction_id_list" in each.spec for each in problems(0.25))
    assert 70 < mixed < 130
    assert problems(0.0) == generate_tasks("instruction_following", "train", 400)


def test_the_size_of_the_task_space_with_constraints() -> None:
    difficulty = {"constraint_share": 1.0, "words_per_category": 2, "max_count": 3}
    size = (comb(16, 2) + perm(16, 2) + 16 * 2) * 2 * 2  # two relations, two forms
    assert task_space_size("instruction_following", difficulty) == size
    drawn = generate_tasks("instruction_following", "train", 8 * size, difficulty=difficulty)
    assert 0.8 * size < len({each.canonical for each in drawn}) < 0.9 * size
    both = task_space_size("instruction_following", difficulty | {"constraint_share": 0.5, "kinds": ["upper"]})
    assert both == size + comb(16, 2)
