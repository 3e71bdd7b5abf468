"""Structured output: which JSON validates, the facts of the prompt, and the size of the task space."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from nemotron.stack.environments import generate_tasks, task_space_size, verify

TASKS = generate_tasks("structured_output", "train", 300, seed=5)


def object_from_prompt(prompt: str) -> dict[str, object]:
    """The answer, read from the types and the facts that the prompt shows."""
    types = dict(re.findall(r"(\w+) \(([\w|]+)\)", prompt))
    facts = dict(fact.split() for fact in prompt.rstrip(".").split(": ")[-1].split(", "))
    assert types.keys() == facts.keys()
    read = {"integer": int, "boolean": {"yes": True, "no": False}.__getitem__}
    for key, kind in types.items():
        if "|" in kind:
            assert facts[key] in kind.split("|")
    return {key: read.get(types[key], str)(facts[key]) for key in types}


def test_the_prompt_says_all_that_the_schema_wants() -> None:
    for task in TASKS:
        assert json.loads(task.solution.answer) == object_from_prompt(task.prompt)
        assert verify(task, task.solution.answer).status == "score"


def test_any_key_order_and_spacing_is_right() -> None:
    task = next(task for task in TASKS if len(task.spec["schema"]["required"]) == 3)
    value = json.loads(task.solution.answer)
    for order in itertools.permutations(value):
        for indent in (None, 2):
            assert verify(task, json.dumps({key: value[key] for key in order}, indent=indent)).status == "score"


def test_each_way_to_be_wrong() -> None:
    for task in TASKS[:100]:
        value = json.loads(task.solution.answer)
        key, kept = next(iter(value.items()))
        rest = {k: v for k, v in value.items() if k != key}
        broken = [
            rest,
            {**value, "extra": 1},
            {**value, key: f"{kept}x"},
            {**value, key: None},
            {**value, key: [kept]},
            [value],
            json.dumps(value),  # a string that holds the object
        ]
        if isinstance(kept, bool):
            broken += [{**value, key: int(kept)}, {**value, key: str(kept).lower()}]
        elif isinstance(kept, int):
            broken += [{**value, key: str(kept)}, {**value, key: kept + 1}]
        elif kept.isdigit():
            broken += [{**value, key: int(kept)}]
        for each in broken:
            assert verify(task, json.dumps(each)).status == "wrong", each


@pytest.mark.parametrize(
    "text", ["", "{", "{'a': 1}", "[" * 100_000, "NaN", "9" * 5000, "{} {}", "```json\n{}\n```", "\ud800"]
)
def test_what_is_not_json_is_wrong_and_not_an_error(text: str) -> None:
    assert verify(TASKS[0], text).status == "wrong"


def test_a_key_twice_is_wrong() -> None:
    task = TASKS[0]
    key, value = next(iter(json.loads(task.solution.answer).items()))
    assert verify(task, task.solution.answer[:-1] + f', "{key}": {json.dumps(value)}}}').status == "wrong"


def test_a_broken_schema_is_an_error_and_not_a_zero() -> None:
    task = generate_tasks("structured_output", "train", 1)[0]
    task.spec["schema"] = {"type": "no such type"}
    verdict = verify(task, "{}")
    assert verdict.status == "error" and verdict.score != verdict.score and "SchemaError" in verdict.reason


def test_the_size_of_the_task_space_is_what_enumeration_finds() -> None:
    difficulty = {"min_keys": 1, "max_keys": 2, "max_number": 3, "flags": False, "words_per_category": 2}
    values = [2] * 6 + [3 * 2] * 4 + [2] * 4  # words, numbers as integer or string, choices
    expected = sum(values) + sum(a * b for a, b in itertools.combinations(values, 2))
    assert task_space_size("structured_output", difficulty) == expected
    found = {task.canonical for task in generate_tasks("structured_output", "train", 20_000, difficulty=difficulty)}
    assert 0.8 * expected < len(found) < 0.9 * expected  # 85 % belong to this split
