"""Arithmetic tasks: traces and answers recomputed independently, and the verifier against math-verify."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from math_verify import parse
from math_verify import verify as math_verify

from nemo_runspec.errors import UserError
from nemotron.stack.environments import generate_tasks, task_space_size, verify
from nemotron.stack.environments.math import Problem, digit_trace


def evaluated(expression: str) -> int:
    """`13-8-1` or `7*4+5` by repeated addition and subtraction of signed terms."""
    total = 0
    for sign, term in re.findall(r"([+-]?)([0-9*]+)", expression):
        product = 1
        for factor in term.split("*"):
            product *= int(factor)
        total += -product if sign == "-" else product
    return total


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from("+-*"))
def test_every_step_of_the_trace_is_true_and_its_last_digits_are_the_result(a: int, b: int, operator: str) -> None:
    left, right = (max(a, b), min(a, b)) if operator == "-" else (a, b % 8 + 2 if operator == "*" else b)
    steps = [step.split("=") for step in digit_trace(Problem(left, operator, right)).split(",")]
    assert all(evaluated(expression) == int(value) for expression, value in steps)
    digits = [int(value) % 10 for _, value in steps[:-1]] + [int(steps[-1][1])]
    assert sum(digit * 10**place for place, digit in enumerate(digits)) == evaluated(f"{left}{operator}{right}")


def test_the_traces_that_the_docstring_promises() -> None:
    assert digit_trace(Problem(347, "+", 238)) == "7+8=15,4+3+1=8,3+2=5"
    assert digit_trace(Problem(503, "-", 238)) == "13-8=5,10-3-1=6,5-2-1=2"


def test_answers_are_those_of_the_prompt() -> None:
    for task in generate_tasks("math", "train", 500, seed=3, difficulty={"multiply": 0.5}):
        expression = re.search(r"[0-9]+[+*-][0-9]+", task.prompt)
        assert expression is not None
        assert task.solution.answer == str(evaluated(expression.group()))


@pytest.mark.parametrize("written", ["{}", "\\boxed{{{}}}", "{}.", "${}$"])
@pytest.mark.parametrize("offset", [0, 1, -1, 10])
def test_verdicts_agree_with_math_verify(written: str, offset: int) -> None:
    for task in generate_tasks("math", "valid", 10, seed=4):
        answer = written.format(int(task.solution.answer) + offset)
        reference = math_verify(
            parse(f"${task.solution.answer}$"), parse(answer if "$" in answer else f"${answer.rstrip('.')}$")
        )
        assert (verify(task, answer).status == "score") is reference is (offset == 0)


@pytest.mark.parametrize("answer", ["", "eighty", "8 5", "85 or 86", "٨٥", "8" * 5000, "85}", "0x55", "85.0"])
def test_anything_else_is_wrong_and_not_an_error(answer: str) -> None:
    task = generate_tasks("math", "train", 1)[0]
    assert verify(task, answer).status == "wrong"


def test_commuted_problems_are_one_task_except_for_subtraction() -> None:
    assert Problem(12, "+", 7).canonical == Problem(7, "+", 12).canonical
    assert Problem(4, "*", 3).canonical == Problem(3, "*", 4).canonical
    assert Problem(12, "-", 7).canonical != Problem(12, "+", 7).canonical


@pytest.mark.parametrize(
    ("difficulty", "size"),
    [
        # 1..9: 45 unordered pairs to add, 45 to subtract; 9 x 8 products less the 28 that commute
        ({"min_digits": 1, "max_digits": 1, "multiply_digits": 1, "multiply": 0.3}, 45 + 45 + 44),
        ({"min_digits": 1, "max_digits": 1, "multiply_digits": 1, "multiply": 0.0}, 90),
        ({"min_digits": 1, "max_digits": 1, "add": 0, "subtract": 0, "multiply": 1.0}, 8 * 99 - 28),
    ],
)
def test_the_size_of_the_task_space_is_what_exhaustive_drawing_finds(difficulty: dict[str, float], size: int) -> None:
    assert task_space_size("math", difficulty) == size
    found = {t.canonical for split in ("train", "valid", "eval") for t in _all(split, difficulty)}
    assert len(found) == size


def _all(split: str, difficulty: dict[str, float]) -> list:
    tasks = []
    for n in range(1, 10**4):
        try:
            tasks = generate_tasks("math", split, n * 50, difficulty=difficulty, distinct=True)
        except UserError as error:
            count = int(re.search(r"only ([0-9]+)", error.message).group(1))  # type: ignore[union-attr]
            return generate_tasks("math", split, count, difficulty=difficulty, distinct=True)
    return tasks
