"""Mathematics: generated integer arithmetic, and published problems whose answer is LaTeX in a box.

Generated: addition and subtraction of numbers with a few digits, and multiplication by one digit. The careful reasoning
trace works digit by digit from the right with its carries, as on paper; the short one states the result at once, which
a small model gets wrong far more often. `spec` is {"result": integer}, and the answer is compared exactly. Where the
prompt declares a tool, `spec` has `expression` and `tools`, too (calculator.py).

Published (`from_gym`): `spec` is {"expected_answer": LaTeX}, and what stands in the last `\\boxed{}` has to mean the
same, as math-verify finds (math_equality.py).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemotron.kit.schemas.difficulty import MathDifficulty
from nemotron.stack.environments import math_equality
from nemotron.stack.environments.boxed import last_boxed
from nemotron.stack.environments.gym import canonical_of, prompt_of, text_in
from nemotron.stack.environments.task import Solution, Task, Verdict, right, wrong

FAMILY = "math"
CALCULATOR, WEATHER = "calculator", "weather"
_PHRASINGS = ("What is {}?", "Compute {}.", "{}=?")
# At most 18 digits: no answer is longer, and int() refuses strings of thousands of digits with an exception.
_ANSWER = re.compile(r"\$?(?:\\boxed\{\s*(-?[0-9]{1,18})\s*\}|(-?[0-9]{1,18}))\$?\.?")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_TO_COMPUTE = re.compile(r"\\(?:sum|prod|int|lim)(?![a-zA-Z])")
# Of two numbers, in brackets or not, but for the power of ten in `3\times 10^{8}`.
_BLANK = r"\s|~|\\[ ,:;!]|\\q?quad(?![a-zA-Z])"
_ARITHMETIC = re.compile(
    rf"[0-9](?:{_BLANK}|[)}}\]]|\\right(?![a-zA-Z]))*(?:[-+*/]|\\(?:cdot|times|div)(?![a-zA-Z]))"
    rf"(?:{_BLANK}|[({{\[]|\\left(?![a-zA-Z]))*[-+]?(?!10[\s)}}]*\^)[0-9]"
)


@dataclass(frozen=True, slots=True)
class Problem:
    """`left operator right`; a subtraction has left >= right, a multiplication a one-digit right."""

    left: int
    operator: str
    right: int

    @property
    def canonical(self) -> str:
        """One string for a problem and its commuted form."""
        low, high = sorted((self.left, self.right))
        return f"{FAMILY}|{high}{self.operator}{low}"

    @property
    def result(self) -> int:
        if self.operator == "+":
            return self.left + self.right
        return self.left - self.right if self.operator == "-" else self.left * self.right


def draw(rng: random.Random, difficulty: MathDifficulty) -> Problem:
    """Draw one problem."""
    choice = rng.random() * (difficulty.add + difficulty.subtract + difficulty.multiply)
    low, high = 10 ** (difficulty.min_digits - 1), 10**difficulty.max_digits - 1
    if choice < difficulty.add:
        return Problem(rng.randint(low, high), "+", rng.randint(low, high))
    if choice < difficulty.add + difficulty.subtract:
        smaller, larger = sorted((rng.randint(low, high), rng.randint(low, high)))
        return Problem(larger, "-", smaller)
    return Problem(rng.randint(low, 10**difficulty.multiply_digits - 1), "*", rng.randint(2, 9))


def build(problem: Problem, difficulty: MathDifficulty, rng: random.Random) -> Task:
    """Word the problem and draw its demonstration."""
    expression = f"{problem.left}{problem.operator}{problem.right}"
    prompt = rng.choice(_PHRASINGS).format(expression)
    careful = rng.random() < difficulty.careful_share
    reasoning = digit_trace(problem) if careful else f"{expression}={problem.result}"
    solution = Solution(reasoning, str(problem.result), "careful" if careful else "short")
    spec: dict[str, Any] = {"result": problem.result}
    if difficulty.tool_share or difficulty.other_tool_share:
        draw = rng.random() - difficulty.tool_share
        if draw < difficulty.other_tool_share:
            spec |= {"expression": expression, "tools": [CALCULATOR if draw < 0 else WEATHER]}
    return Task(FAMILY, prompt, problem.canonical, spec, solution)


def digit_trace(problem: Problem) -> str:
    """The calculation from the rightmost digit on: `347+238` gives `7+8=15,4+3+1=8,3+2=5`.

    The carry of a step is added in the next one. A subtraction that borrows writes ten more in front and subtracts the
    borrow in the next step: `503-238` gives `13-8=5,10-3-1=6,5-2-1=2`.
    """
    left, right_, carry, steps = problem.left, problem.right, 0, list[str]()
    while left or (right_ and problem.operator != "*") or not steps:
        digit, left = left % 10, left // 10
        other = right_ if problem.operator == "*" else right_ % 10
        if problem.operator == "-":
            value = digit - other - carry
            top = digit + 10 if value < 0 else digit
            steps.append(f"{top}-{other}{'-1' if carry else ''}={value % 10}")
            carry = int(value < 0)
        else:
            value = (digit + other if problem.operator == "+" else digit * other) + carry
            steps.append(f"{digit}{problem.operator}{other}{f'+{carry}' if carry else ''}={value}")
            carry = value // 10
        if problem.operator != "*":
            right_ //= 10
    return ",".join(steps)


def from_gym(record: Mapping[str, Any]) -> Task:
    """A record for the resources server `math_with_judge`: its prompt and `expected_answer`; UserError without them.

    Answers are compared by the library alone, as the published recipe does (`should_use_judge: false`).
    """
    prompt = prompt_of(record)
    expected = without_delimiters(text_in(record, "expected_answer"))
    solution = Solution("", f"\\boxed{{{expected}}}")
    return Task(FAMILY, prompt, canonical_of(FAMILY, prompt), {"expected_answer": expected}, solution)


def verify_answer(spec: dict[str, Any], answer: str) -> Verdict:
    """Right if the answer is the integer, bare or in `\\boxed{}`, with an optional full stop or `$`; of a published
    problem, if the last `\\boxed{}` means what is expected.

    Raises:
        killable.UndecidedError: whether it does could not be found out; `families.verify` makes an error of it.
    """
    given = answered(spec, answer)
    if "expected_answer" in spec:
        return _verify_boxed(str(spec["expected_answer"]), given)
    expected = int(spec["result"])
    if given is None:
        return wrong("not an integer")
    return right() if int(given) == expected else wrong(f"{given} is not {expected}")


def answered(spec: dict[str, Any], answer: str) -> str | None:
    """What is compared of an answer: the integer, or the LaTeX in the box; None where it has none."""
    if "expected_answer" in spec:
        return without_delimiters(last_boxed(answer) or "").removesuffix(".") or None
    match = _ANSWER.fullmatch(answer)
    return None if match is None else str(int(match.group(1) or match.group(2)))


def _verify_boxed(expected: str, given: str | None) -> Verdict:
    if given is None:
        return wrong("no \\boxed{} with an answer at the end")
    # As the problem has it; math-verify would compute it. An equation may do so, and has the result on some side.
    if (operator := _TO_COMPUTE.search(given)) and not _TO_COMPUTE.search(expected):
        return wrong(f"{operator[0]} is left to be computed")
    sides = given.split("=")
    is_stated = any(_INTEGER.fullmatch(side.strip()) for side in sides)
    if _INTEGER.fullmatch(expected) and not is_stated and (operator := _ARITHMETIC.search(sides[-1])):
        return wrong(f"{operator[0]} is left to be computed")
    if _INTEGER.fullmatch(expected) and _INTEGER.fullmatch(given):  # most answers; thousands of times as fast
        is_equal = int(given) == int(expected)
    else:
        is_equal = given == expected or math_equality.equal(expected, given)
    return right() if is_equal else wrong(f"{given[:60]} is not {expected[:60]}")


def without_delimiters(text: str) -> str:
    """LaTeX without `$…$`, `$$…$$` or `\\(…\\)` around all of it."""
    text = text.strip()
    for opening, closing in (("\\(", "\\)"), ("$$", "$$"), ("$", "$")):
        inner = text[len(opening) : -len(closing)]
        whole = len(text) >= len(opening + closing) and text.startswith(opening) and text.endswith(closing)
        if whole and opening not in inner and closing not in inner:
            text = inner.strip()
    return text


def space_size(difficulty: MathDifficulty) -> int:
    """Number of different canonical tasks, exact."""
    low, high = 10 ** (difficulty.min_digits - 1), 10**difficulty.max_digits - 1
    numbers = high - low + 1
    pairs = numbers * (numbers + 1) // 2  # unordered, for + because it commutes, for - because left >= right
    total = pairs * ((difficulty.add > 0) + (difficulty.subtract > 0))
    if difficulty.multiply > 0:
        multiplied = 10**difficulty.multiply_digits - low
        # 3*4 and 4*3 are one task where both factors have one digit, 2..9: 28 unordered pairs are counted twice.
        total += 8 * multiplied - (28 if difficulty.min_digits == 1 else 0)
    return total
