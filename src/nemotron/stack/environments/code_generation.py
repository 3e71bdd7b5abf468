"""Code generation: a description of a function in the prompt; the answer is a program that has to pass all its tests.

Generated tasks are functions of one line over numbers, lists and words. Published ones (`from_gym`) are problems of
programming contests. `spec` is LiveCodeBench's format for both: {"inputs": [text], "outputs": [text], "fn_name": name}.
With a name, an input is that function's arguments, a line of JSON each, and an output what it returns, as JSON; with
null, a program reads the input from stdin and prints the output. "prelude": true gives it the names that solutions of
contests take for granted.

The program runs in the sandbox, which knows the inputs alone; outputs are compared here. So whatever a program does to
the process that runs it, it passes with the right outputs and with nothing else.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from string import ascii_lowercase
from typing import Any

from nemo_runspec.errors import UserError
from nemotron.kit.schemas.difficulty import CodeGenerationDifficulty
from nemotron.kit.schemas.sandbox import Sandbox
from nemotron.stack.environments.gym import canonical_of, prompt_of
from nemotron.stack.environments.sandbox import LIMITS, Limits, run_program
from nemotron.stack.environments.task import Solution, Task, Verdict, right, wrong
from nemotron.stack.environments.words import word_list

FAMILY = "code_generation"
_PHRASINGS = ("Write f(x), x a {}: {}.", "Python: f(x) of a {} x returns {}.")
NOUNS = {"number": "number", "list_to_number": "list", "list_to_list": "list", "text": "word"}
# What a list is reduced to: words, Python.
_REDUCERS = (
    ("the sum of x", "sum(x)"),
    ("the largest of x", "max(x)"),
    ("the smallest of x", "min(x)"),
    ("the length of x", "len(x)"),
    ("the first of x", "x[0]"),
    ("the last of x", "x[-1]"),
)
# Operators with a constant. Those of one class do not follow each other: x plus 3, minus 2 is x plus 1.
_OPERATORS = (("plus", "+"), ("minus", "-"), ("times", "*"), ("modulo", "%"))
_CLASSES = {"+": "sum", "-": "sum", "*": "product", "%": "remainder"}
_ORDERS = (("x sorted", "sorted(x)"), ("x in reverse", "x[::-1]"))
_OPENING, _CLOSING = re.compile(r"```[^`]*"), re.compile(r"```\s*")  # a line may end with \r


@dataclass(frozen=True, slots=True)
class Problem:
    """A function of x. `kind` says what x is; `steps` are the expression after each operation, the last one whole."""

    kind: str
    words: str
    steps: tuple[str, ...]

    @property
    def expression(self) -> str:
        """What the function returns."""
        return self.steps[-1]

    @property
    def canonical(self) -> str:
        """One string for all wordings of a function; `x+3` of a number and of a word are two tasks."""
        return f"{FAMILY}|{self.kind}|{self.expression}"


def draw(rng: random.Random, difficulty: CodeGenerationDifficulty) -> Problem:
    """Draw one problem."""
    kind = rng.choice(difficulty.kinds)
    number = rng.randint(2, difficulty.max_number)
    if kind == "number":
        return _arithmetic(rng, difficulty, kind, "x", "x", rng.randint(1, difficulty.max_steps))
    if kind == "list_to_number":
        words, expression = rng.choice(_REDUCERS)
        return _arithmetic(rng, difficulty, kind, words, expression, rng.randint(0, difficulty.max_steps))
    if kind == "list_to_list":
        choices = [
            *_ORDERS,
            (f"each of x plus {number}", f"[i+{number} for i in x]"),
            (f"each of x times {number}", f"[i*{number} for i in x]"),
            (f"all of x above {number}", f"[i for i in x if i>{number}]"),
            (f"all of x below {number}", f"[i for i in x if i<{number}]"),
        ]
    else:
        letter, word = rng.choice(ascii_lowercase), rng.choice(word_list(difficulty.words_per_category))
        choices = [
            ("x in upper case", "x.upper()"),
            ("x in reverse", "x[::-1]"),
            ("the length of x", "len(x)"),
            (f"x {number} times", f"x*{number}"),
            (f"how often {letter} is in x", f'x.count("{letter}")'),
            (f"x, then {word}", f'x+"{word}"'),
            (f"{word}, then x", f'"{word}"+x'),
        ]
    words, expression = rng.choice(choices)
    return Problem(kind, words, (expression,))


def _arithmetic(
    rng: random.Random, difficulty: CodeGenerationDifficulty, kind: str, words: str, expression: str, num_steps: int
) -> Problem:
    """`num_steps` operations with a constant on an expression that is a number."""
    steps, previous = [expression], ""
    for _ in range(num_steps):
        verb, operator = rng.choice([each for each in _OPERATORS if _CLASSES[each[1]] != previous])
        number = rng.randint(2, difficulty.max_number)
        # The only one that binds less tightly than what may follow it is a sum.
        left = f"({steps[-1]})" if previous == "sum" else steps[-1]
        words += f"{',' if previous else ''} {verb} {number}"
        steps.append(f"{left}{operator}{number}")
        previous = _CLASSES[operator]
    return Problem(kind, words, tuple(steps[1:] or steps))


def build(problem: Problem, difficulty: CodeGenerationDifficulty, rng: random.Random) -> Task:
    """Word the problem, and draw the arguments it is tested with and its demonstration."""
    prompt = rng.choice(_PHRASINGS).format(NOUNS[problem.kind], problem.words)
    arguments = draw_arguments(problem, difficulty, rng)
    function = eval(f"lambda x: {problem.expression}")  # an expression of this file's, not a model's
    spec = {
        "inputs": [json.dumps(argument) for argument in arguments],
        "outputs": [json.dumps(function(argument)) for argument in arguments],
        "fn_name": "f",
    }
    careful = rng.random() < difficulty.careful_share
    reasoning = " -> ".join(problem.steps) if careful else "one line"
    solution = Solution(reasoning, f"def f(x): return {problem.expression}", "careful" if careful else "short")
    return Task(FAMILY, prompt, problem.canonical, spec, solution)


def draw_arguments(problem: Problem, difficulty: CodeGenerationDifficulty, rng: random.Random) -> list[Any]:
    """Six arguments, so chosen that every constant of a function matters in some of them."""
    largest = difficulty.max_number
    if problem.kind == "number":  # beyond any modulus, and below zero
        return [rng.randint(-99, -1), *(rng.randint(0, 10 * largest) for _ in range(4)), rng.randint(500, 999)]
    if problem.kind == "text":
        texts = ["".join(rng.choice(ascii_lowercase) for _ in range(rng.randint(3, 9))) for _ in range(6)]
        if letter := re.search(r'count\("(.)"\)', problem.expression):
            texts[:4] = [text[:at] + letter[1] * at + text[at:] for at, text in enumerate(texts[:4], 1)]
        return texts
    lengths = (1, 2, 3, 5, 8, largest + 3)  # the last is longer than any modulus
    lists = [[rng.randint(-9, 2 * largest) for _ in range(length)] for length in lengths]
    if bound := re.search(r"if i[<>](\d+)", problem.expression):  # on both sides of the bound, and on it
        lists[3][:3] = [int(bound[1]) - 1, int(bound[1]), int(bound[1]) + 1]
    return lists


def from_gym(record: Mapping[str, Any]) -> Task:
    """A record for the resources server `code_gen`: its prompt, and `verifier_metadata.unit_tests` as the spec.

    There is no solution in it, so none is demonstrated. UserError: tests that nothing could pass.
    """
    prompt, tests = prompt_of(record), record["verifier_metadata"]["unit_tests"]
    inputs, outputs, fn_name = tests["inputs"], tests["outputs"], tests.get("fn_name")
    if not inputs or len(inputs) != len(outputs):
        raise UserError(f"unit_tests has {len(inputs)} inputs and {len(outputs)} outputs")
    if fn_name is not None:
        try:
            for text in (*outputs, *(line for arguments in inputs for line in arguments.split("\n"))):
                json.loads(text)
        except ValueError as failure:
            raise UserError(f"unit_tests of {fn_name} are not JSON: {failure}") from None
    spec = {"inputs": inputs, "outputs": outputs, "fn_name": fn_name, "prelude": True}
    return Task(FAMILY, prompt, canonical_of(FAMILY, prompt), spec, Solution("", ""))


def verify_answer(spec: dict[str, Any], answer: str, sandbox: Sandbox = "bubblewrap") -> Verdict:
    """Right if the program passes all tests. It is what stands in the last fenced block, or, without one, all there is.

    A program that raises, exits with an error or exceeds a limit is wrong: it is the program that was to be verified.
    Tests are run in order up to the first that fails.

    Raises:
        SandboxError: the sandbox did not start; `families.verify` makes an error of it.
    """
    return verify_program(spec, program_of(answer), sandbox)


def verify_program(
    spec: dict[str, Any], program: str, sandbox: Sandbox = "bubblewrap", limits: Limits = LIMITS
) -> Verdict:
    """`verify_answer` of a program that stands alone."""
    inputs, outputs, fn_name = spec["inputs"], spec["outputs"], spec.get("fn_name")
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    expected = outputs if fn_name is None else [json.loads(output) for output in outputs]
    if not program.strip():
        return wrong("no program")
    run = run_program(program, inputs, fn_name, sandbox=sandbox, prelude=spec.get("prelude", False), limits=limits)
    for number, (output, wanted) in enumerate(zip(run.outputs, expected, strict=False), 1):
        if not (_same_text(output, wanted) if fn_name is None else _same_value(output, wanted)):
            return wrong(f"test {number} of {len(inputs)}: another output")
    if len(run.outputs) < len(inputs):
        return wrong(f"test {len(run.outputs) + 1} of {len(inputs)}: {run.failure}")
    return right()


def program_of(answer: str) -> str:
    """What stands in the last complete fenced block of an answer, or all of it where there is none."""
    program, lines, start = answer, answer.split("\n"), None
    for number, line in enumerate(lines):
        if start is None:
            start = number + 1 if _OPENING.fullmatch(line) else None
        elif _CLOSING.fullmatch(line):
            program, start = "".join(f"{each}\n" for each in lines[start:number]), None
    return program


def _same_value(output: str, wanted: Any) -> bool:
    """Whether JSON that a function returned is the value expected: 1 is 1.0 and not true, and NaN is nothing."""
    try:
        value = json.loads(output)
    except (ValueError, RecursionError):
        return False
    return _equal(value, wanted)


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, bool) or isinstance(value, bool):
        return value is wanted
    if isinstance(wanted, list):
        return isinstance(value, list) and len(value) == len(wanted) and all(map(_equal, value, wanted))
    if isinstance(wanted, dict):
        has_keys = isinstance(value, dict) and value.keys() == wanted.keys()
        return has_keys and all(_equal(value[key], wanted[key]) for key in wanted)
    return bool(value == wanted)


def _same_text(output: str, wanted: str) -> bool:
    """Whether what was printed is what was expected, line by line: but for blanks around it, or as numbers."""
    lines, wanted_lines = (text.strip().split("\n") for text in (output, wanted))
    return len(lines) == len(wanted_lines) and all(map(_same_line, lines, wanted_lines))


def _same_line(line: str, wanted: str) -> bool:
    if line.strip() == wanted.strip():
        return True
    if not line.isascii() or "_" in line:  # which Decimal reads as digits, and between them
        return False
    try:
        return [Decimal(number) for number in line.split()] == [Decimal(number) for number in wanted.split()]
    except InvalidOperation:
        return False


def space_size(difficulty: CodeGenerationDifficulty) -> int:
    """Number of different canonical tasks, exact."""
    constants = difficulty.max_number - 1
    one, two = 4 * constants, 10 * constants**2  # of 16 pairs of operators, 4 + 1 + 1 are of one class
    arithmetic = one if difficulty.max_steps == 1 else one + two
    words = len(word_list(difficulty.words_per_category))
    sizes = {
        "number": arithmetic,
        "list_to_number": len(_REDUCERS) * (1 + arithmetic),
        "list_to_list": len(_ORDERS) + 4 * constants,
        "text": 3 + constants + len(ascii_lowercase) + 2 * words,
    }
    return sum(sizes[kind] for kind in set(difficulty.kinds))
