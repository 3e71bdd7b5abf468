"""Repository repair: find a bug in a small repository, repair it and run its tests, with tools, over several turns.

A repository is a module of functions of one line, as `code_generation` draws them, and a file that tests one of them,
which has a bug. A request says what the function should be; what stands there has to be looked up. The tools are `view`
or, where the request names no file, `grep`; `edit`, which replaces a text that occurs once in a file; and `run`, the
tests. What a call gives is shown to the model, refusals included.

The attempt is worth what the function returns at its end: right where it passes tests that no file of the repository
shows. Files are texts out here. Their programs run in the sandbox, which knows the inputs of the hidden tests alone,
as in `code_generation`; nothing of what a run prints decides anything.

`spec`: `path` of the module and `test_path`, `files`, {path: text}; `tools`, the names of those in the prompt; the
hidden tests, `inputs`, `outputs` and `fn_name`, as in `code_generation`.
"""

from __future__ import annotations

import json
import random
import re
import threading
from dataclasses import dataclass
from functools import lru_cache
from string import ascii_lowercase
from typing import Any

from nemotron.kit.chat import parse_tool_calls
from nemotron.kit.schemas.difficulty import RepairDifficulty
from nemotron.kit.schemas.sandbox import Sandbox
from nemotron.stack.environments import code_generation
from nemotron.stack.environments.sandbox import Limits, program_slots, run_program
from nemotron.stack.environments.task import Call, Solution, Task, Verdict, answer_of, in_split_of, turns
from nemotron.stack.environments.words import word_list
from nemotron.stack.environments.workplace_assistant import BETWEEN_TURNS, FINAL_ANSWER, call_text

FAMILY = "repository_repair"
PASSED, EDITED, _REFUSED = "passed", "edited", "Error: "
LIMITS = Limits(wall_seconds=4.0, cpu_seconds=1, output_bytes=1 << 16)
MAX_FILE_CHARS, MAX_SHOWN_CHARS = 2000, 400
_MODULES = ("ops", "calc", "tools", "util")
_FUNCTIONS = "fghk"
# Expressions that are mistaken for each other.
_MISTAKEN = (
    ("sum(x)", "len(x)"), ("max(x)", "min(x)"), ("x[0]", "x[-1]"), ("sorted(x)", "x[::-1]"), ("x.upper()", "x.lower()")
)  # fmt: skip
_OPERATOR = re.compile(r"(?<=[]x)i\d])[-+*%](?=\d)")
_CONSTANT = re.compile(r"\d\d+|[2-9]")
_TOOLS = {"view": ("path",), "grep": ("pattern",), "edit": ("path", "old_str", "new_str"), "run": ()}
# Before any file: the files, in the only folder of the sandbox that a program can write to.
_REPOSITORY = """import sys
for _path, _text in {files!r}.items():
    with open(_path, "w", encoding="utf-8") as _file:
        _file.write(_text)
sys.path.insert(0, ".")
"""
_RUN_TESTS = """import traceback
try:
    import {module}
    print({passed!r})
except BaseException as failure:
    line = traceback.extract_tb(failure.__traceback__)[-1].line
    print("failed: " + (line or "" if isinstance(failure, AssertionError) else type(failure).__name__))
"""


@dataclass(frozen=True, slots=True)
class Problem:
    """A function that is to be repaired. Which bug it has is drawn with the wording: all bugs of it are one task."""

    function: code_generation.Problem

    @property
    def canonical(self) -> str:
        """One string for all bugs of a function and all repositories that it may stand in, in the split of the function
        as a task of `code_generation`."""
        return in_split_of(self.function.canonical, f"{FAMILY}|{self.function.kind}|{self.function.expression}")


def draw(rng: random.Random, difficulty: RepairDifficulty) -> Problem:
    """Draw one problem."""
    return Problem(code_generation.draw(rng, difficulty))


def build(problem: Problem, difficulty: RepairDifficulty, rng: random.Random) -> Task:
    """Draw the bug, the repository and the tests; word the request; demonstrate: look, edit, run, say so."""
    function, right = problem.function, problem.function.expression
    bug, arguments, failing = _draw_bug(function, difficulty, rng)
    name, *others = rng.sample(_FUNCTIONS, 1 + difficulty.num_others)
    lines = [f"def {name}(x): return {bug}"]
    lines += [f"def {other}(x): return {code_generation.draw(rng, difficulty).expression}" for other in others]
    rng.shuffle(lines)
    module = rng.choice(_MODULES)
    path, test_path = f"{module}.py", f"test_{module}.py"
    outputs = [_value(right, argument) for argument in arguments]
    shown = min(failing, key=lambda i: len(repr(arguments[i])))
    files = {
        path: "\n".join(lines) + "\n",
        test_path: f"from {module} import {name}\nassert {name}({arguments[shown]!r}) == {outputs[shown]!r}\n",
    }
    noun = code_generation.NOUNS[function.kind]
    is_searched = rng.random() < difficulty.search_share
    prompt = f"Fix {name} of a {noun} x{'' if is_searched else f' in {path}'}: {function.words}."
    look = (
        {"name": "grep", "arguments": {"pattern": f"def {name}"}}
        if is_searched
        else {"name": "view", "arguments": {"path": path}}
    )
    texts = {"old_str": f"def {name}(x): return {bug}", "new_str": f"def {name}(x): return {right}"}
    calls = [look, {"name": "edit", "arguments": {"path": path, **texts}}, {"name": "run", "arguments": {}}]
    careful = rng.random() < difficulty.careful_share
    thoughts = (f"where is {name}?", f"{bug} -> {right}" if careful else "one edit", "does it pass?", "it passes")
    spec = {
        "path": path, "test_path": test_path, "files": files, "tools": [call["name"] for call in calls],
        "inputs": [json.dumps(argument) for argument in arguments],
        "outputs": [json.dumps(output) for output in outputs], "fn_name": name,
    }  # fmt: skip
    solution = Solution(BETWEEN_TURNS.join(thoughts), "".join(map(call_text, calls)), "careful" if careful else "short")
    return Task(FAMILY, prompt, problem.canonical, spec, solution)


def _draw_bug(
    function: code_generation.Problem, difficulty: RepairDifficulty, rng: random.Random
) -> tuple[str, list[Any], list[int]]:
    """An expression with one mistake, six arguments, and those of them, by number, for which it is another function."""
    bugs = bugs_of(function, difficulty, rng)
    for _ in range(1000):
        bug, arguments = rng.choice(bugs), code_generation.draw_arguments(function, difficulty, rng)
        right = [_value(function.expression, argument) for argument in arguments]
        failing = [i for i, argument in enumerate(arguments) if _value(bug, argument) != right[i]]
        if failing:
            return bug, arguments, failing
    raise ValueError(f"no bug of {function.expression} is one")  # found by a test of all small functions


def bugs_of(function: code_generation.Problem, difficulty: RepairDifficulty, rng: random.Random) -> list[str]:
    """One bug of each kind that a function can have: another constant, operator, comparison or call; a step missing;
    parts in another order. Not all of them change what it returns."""
    right, bugs = function.expression, list[str]()

    def replaced(part: re.Match[str], by: list[str]) -> list[str]:
        others = [text for text in by if text != part[0]]
        return [f"{right[: part.start()]}{rng.choice(others)}{right[part.end() :]}"] if others else []

    if constants := list(_CONSTANT.finditer(right)):
        bugs += replaced(rng.choice(constants), [str(number) for number in range(2, difficulty.max_number + 1)])
    if operators := list(_OPERATOR.finditer(right)) if function.kind != "text" else []:
        bugs += replaced(rng.choice(operators), list("+-*%"))
    if comparison := re.search(r"[<>](?=\d)", right):
        bugs += replaced(comparison, ["<", ">"])
    for pair in _MISTAKEN:
        for one, other in (pair, pair[::-1]):
            if one in right:
                bugs.append(right.replace(one, other))
    if step := re.fullmatch(r"(.+)[-+*%]\d+", right):
        bugs.append(step[1])
    if letter := re.search(r'count\("(.)"\)', right):
        bugs.append(right.replace(f'"{letter[1]}"', f'"{rng.choice(ascii_lowercase.replace(letter[1], ""))}"'))
    if parts := re.fullmatch(r'(x|"\w+")\+(x|"\w+")', right):
        bugs.append(f"{parts[2]}+{parts[1]}")
        word = rng.choice([each for each in word_list(difficulty.words_per_category) if f'"{each}"' not in right])
        bugs.append(re.sub(r'"\w+"', f'"{word}"', right))
    return bugs


def _value(expression: str, argument: Any) -> Any:
    """What an expression of this file's is for x; an exception, by its name, where it raises."""
    try:
        return eval(expression, {"x": argument})
    except Exception as failure:
        return type(failure)


def space_size(difficulty: RepairDifficulty) -> int:
    """Number of different canonical tasks, exact: one a function."""
    return code_generation.space_size(difficulty)


def tools(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Definitions of the tools in the prompt."""
    return [
        {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in _TOOLS[name]}},
        }
        for name in spec["tools"]
    ]


class Repository:
    """The files of a task, as the calls so far have left them."""

    def __init__(self, spec: dict[str, Any], sandbox: Sandbox) -> None:
        self.spec, self.sandbox = spec, sandbox
        self.files: dict[str, str] = dict(spec["files"])

    def call(self, call: Call) -> str:
        """The result of a call as text; what cannot be done, or is not offered, is an error that says why."""
        name, arguments = call["name"], call["arguments"]
        if name not in self.spec["tools"]:
            return f"{_REFUSED}no tool is called {name}."
        if set(arguments) != set(_TOOLS[name]):
            return f"{_REFUSED}{name} takes {' and '.join(_TOOLS[name]) or 'nothing'}."
        if not all(isinstance(value, str) for value in arguments.values()):  # which a list of calls can hold
            return f"{_REFUSED}{' and '.join(_TOOLS[name])} must be text."
        if "path" in arguments and arguments["path"] not in self.files:
            return f"{_REFUSED}no such file; there are {' and '.join(self.files)}."
        match name:
            case "view":
                return self.files[arguments["path"]].strip("\n")[:MAX_SHOWN_CHARS]
            case "grep":
                return self._lines_with(arguments["pattern"])
            case "edit":
                return self._edit(**arguments)
        return self._run_tests()

    def _lines_with(self, pattern: str) -> str:
        found = [
            f"{path}: {line}"
            for path, text in self.files.items()
            for line in text.splitlines()
            if pattern and pattern in line
        ]
        return "\n".join(found)[:MAX_SHOWN_CHARS] or "nothing found"

    def _edit(self, path: str, old_str: str, new_str: str) -> str:
        count = self.files[path].count(old_str) if old_str else 0
        if count != 1:
            return f"{_REFUSED}old_str is there {count} times."
        text = self.files[path].replace(old_str, new_str)
        if len(text) > MAX_FILE_CHARS:
            return f"{_REFUSED}more than {MAX_FILE_CHARS} characters."
        self.files[path] = text
        return EDITED

    def _run_tests(self) -> str:
        module = self.spec["test_path"].removesuffix(".py")
        program = self._program() + _RUN_TESTS.format(module=module, passed=PASSED)
        return _once(_shown_of_run, program, self.sandbox)

    def verdict(self) -> Verdict:
        """Right if the function passes the hidden tests as it is now."""
        module, name = self.spec["path"].removesuffix(".py"), self.spec["fn_name"]
        program = f"{self._program()}from {module} import {name}\n"
        return _once(_verdict_of, program, tuple(self.spec["inputs"]), tuple(self.spec["outputs"]), name, self.sandbox)

    def _program(self) -> str:
        return _REPOSITORY.format(files=self.files)


# --- Runs: many attempts at a task leave it in the same state, which is run once --------------------------------------

_KEPT = 4096
# Programs have a limit of time, which as many as there are processors keep.
_slots = threading.BoundedSemaphore(program_slots())


def _once(run: Any, *key: Any) -> Any:
    with _lock_of(run, *key):
        return run(*key)


@lru_cache(_KEPT)
def _lock_of(*_: Any) -> threading.Lock:
    return threading.Lock()


@lru_cache(_KEPT)
def _shown_of_run(program: str, sandbox: Sandbox) -> str:
    """The last line that the tests print, or why there is none."""
    with _slots:
        run = run_program(program, [""], sandbox=sandbox, limits=LIMITS)
    if not run.outputs:
        return f"failed: {run.failure}"
    lines = run.outputs[0].strip().splitlines() or ["failed: no result"]
    return lines[-1][:MAX_SHOWN_CHARS]


@lru_cache(_KEPT)
def _verdict_of(
    program: str, inputs: tuple[str, ...], outputs: tuple[str, ...], fn_name: str, sandbox: Sandbox
) -> Verdict:
    spec = {"inputs": list(inputs), "outputs": list(outputs), "fn_name": fn_name}
    with _slots:
        return code_generation.verify_program(spec, program, sandbox, LIMITS)


# --- Attempts ---------------------------------------------------------------------------------------------------------


def verify_answer(spec: dict[str, Any], answer: str, sandbox: Sandbox = "bubblewrap") -> Verdict:
    """The verdict after all calls in one text, as if the model had made them without seeing a result."""
    repository = Repository(spec, sandbox)
    for call in parse_tool_calls(answer, tools(spec))[1]:
        if call["name"] != "run":
            repository.call(call)
    return repository.verdict()


def demonstration(task: Task, thinking: bool) -> list[dict[str, Any]]:
    """What follows the request where it is carried out. The tests pass: no program is run to say so."""
    repository = Repository(task.spec, "bubblewrap")
    _, calls = parse_tool_calls(task.solution.answer, tools(task.spec))
    thoughts = task.solution.reasoning.split(BETWEEN_TURNS) if thinking else None
    return turns(calls, lambda call: PASSED if call["name"] == "run" else repository.call(call), FINAL_ANSWER, thoughts)


class RepairEpisode:
    """An `Episode`: a response with calls is answered by their results, one without ends it.

    So does one that is stuck, which would go on to the end of its turns (OpenHands ends such loops as well): the
    results are those of the response before, and so are its calls, or all of them are refused.
    """

    has_turns = True

    def __init__(self, task: Task, thinking: bool | None, sandbox: Sandbox) -> None:
        self.thinking = thinking
        self.tools = tools(task.spec)
        self.repository = Repository(task.spec, sandbox)
        self.calls: list[Call] = []
        self.results: list[str] = []

    def respond(self, response: str) -> list[dict[str, Any]] | None:
        """The results of the calls in a response, in order; None where it has none or is stuck."""
        _, calls = parse_tool_calls(answer_of(response, self.thinking), self.tools)
        results = [self.repository.call(call) for call in calls]
        is_refused = all(result.startswith(_REFUSED) for result in results)
        is_stuck = results == self.results and (calls == self.calls or is_refused)
        self.calls, self.results = calls, results
        if not calls or is_stuck:
            self.repository.verdict()  # here, beside those of other attempts; it is kept
            return None
        return [{"role": "tool", "content": result} for result in results]

    def verdict(self) -> Verdict:
        """Of the repository as it stands now."""
        return self.repository.verdict()
