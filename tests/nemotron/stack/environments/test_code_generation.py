"""Code generation: generated functions and their tests, programs of contests, and answers that must not pass."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemotron.kit.schemas.difficulty import CodeGenerationDifficulty
from nemotron.stack.environments import (
    Task,
    Verdict,
    best_constant_answer,
    from_gym,
    generate_tasks,
    sandbox,
    task_space_size,
    verifiable_families,
    verify,
    verify_all,
)
from nemotron.stack.environments.code_generation import draw, verify_answer


def _why_not() -> str:
    try:
        verifiable_families(["code_generation"])
    except UserError as error:
        return error.message
    return ""


WHY_NOT = _why_not()
needs_bubblewrap = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
TASKS = generate_tasks("code_generation", "train", 200, seed=5)


def function_of(task: Task) -> Callable[[Any], Any]:
    """The demonstrated function, in this process: it is the generator's."""
    names: dict[str, Any] = {}
    exec(task.solution.answer, names)
    function: Callable[[Any], Any] = names["f"]
    return function


def test_the_tests_of_a_function_are_what_it_returns() -> None:
    for task in TASKS:
        assert task.spec["fn_name"] == "f" and len(task.spec["inputs"]) == 6
        outputs = [json.dumps(function_of(task)(json.loads(text))) for text in task.spec["inputs"]]
        assert outputs == task.spec["outputs"]


WORDS: dict[str, Callable[[Any, int], Any]] = {
    "plus": lambda x, n: x + n,
    "minus": lambda x, n: x - n,
    "times": lambda x, n: x * n,
    "modulo": lambda x, n: x % n,
}
STARTS: dict[str, Callable[[Any], Any]] = {
    "the sum of x": sum,
    "the largest of x": max,
    "the smallest of x": min,
    "the length of x": len,
    "the first of x": lambda x: x[0],
    "the last of x": lambda x: x[-1],
    "x": lambda x: x,
}


def test_the_prompt_says_which_function() -> None:
    """Read word by word, from left to right, as somebody would who never saw the program."""
    read = 0
    for task in TASKS:
        description = re.sub(r"^.*(: | returns )", "", task.prompt).removesuffix(".")
        match = re.fullmatch(r"(x|the \w+ of x)((?:,? \w+ \d+)*)", description)
        if match is None:
            continue
        read += 1
        for text, output in zip(task.spec["inputs"], task.spec["outputs"], strict=True):
            value = STARTS[match[1]](json.loads(text))
            for verb, number in re.findall(r"(\w+) (\d+)", match[2]):
                value = WORDS[verb](value, int(number))
            assert value == json.loads(output), task.prompt
    assert read > 80


@pytest.mark.parametrize(
    "difficulty",
    [
        {"max_number": 3, "max_steps": 2, "words_per_category": 2},
        {"max_number": 3, "max_steps": 1, "words_per_category": 2},
        {"kinds": ["list_to_number"], "max_number": 3},
    ],
)
def test_the_size_of_the_task_space_is_what_drawing_finds(difficulty: dict[str, Any]) -> None:
    settings, rng = CodeGenerationDifficulty(**difficulty), random.Random(0)
    drawn = {draw(rng, settings).canonical for _ in range(40_000)}
    assert len(drawn) == task_space_size("code_generation", difficulty)


@needs_bubblewrap
def test_demonstrations_pass_side_by_side_in_their_order() -> None:
    tasks = TASKS[:4]
    answers = [task.solution.answer for task in tasks]
    assert [verdict.status for verdict in verify_all(tasks, answers)] == ["score"] * 4
    mixed = [tasks[0], generate_tasks("math", "train", 1)[0], tasks[1]]
    verdicts = verify_all(mixed, ["def f(x): return None", mixed[1].solution.answer, answers[1]])
    assert [verdict.status for verdict in verdicts] == ["wrong", "score", "score"]
    assert best_constant_answer([tasks[0], tasks[0]]).score == 1.0


def test_equal_programs_for_one_task_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def run_program(program: str, inputs: list[str], *_: Any, **__: Any) -> sandbox.ProgramRun:
        runs.append(program)
        return sandbox.ProgramRun(["1"] * len(inputs), "")

    monkeypatch.setattr("nemotron.stack.environments.code_generation.run_program", run_program)
    first, second = TASKS[:2]
    verdicts = verify_all(
        [first, first, first, second], ["so</think>a", "or so</think>a", "</think>b", "</think>a"], True
    )
    assert sorted(runs) == ["a", "a", "b"] and [verdict.status for verdict in verdicts] == ["wrong"] * 4


CONTEST = {"inputs": ["2\n1 2\n", "1\n5\n"], "outputs": ["3 0.50\n", "5 2.5"], "fn_name": None, "prelude": True}


@needs_bubblewrap
@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("n = int(input())\ns = sum(map(int, input().split()))\nprint(s, s / 2 if n == 1 else 0.5)", "score"),
        (("Text.\n```python\nn = int(input())\ns = sum(map(int, input().split()))\n"
         "print(' ', s, '2.500' if n == 1 else '.5', '')\n```\nMore."), "score"),
        ("```\nwrong\n```\n```python\nprint(5, 2.5) if input() == '1' else print(3, 0.5)\n```", "score"),
        ("It is:\r\n```python\r\nprint(5, 2.5) if input() == '1' else print(3, 0.5)\r\n```\r\n", "score"),
        ("```python\nprint(5, 2.5) if input() == '1' else print(3, 0.5)\n```\n```\nwrong\n```", "wrong"),
        ("print(5, 2.5) if input() == '1' else print(3, 0.5, 0)", "wrong"),
        ("print(5, 2.5) if input() == '1' else print('3\\n0.5')", "wrong"),
        ("print('５', 2.5) if input() == '1' else print(3, 0.5)", "wrong"),
        ("print(5, 'nan') if input() == '1' else print(3, 0.5)", "wrong"),
    ],
)  # fmt: skip
def test_what_a_contest_program_prints_is_compared_by_line_and_number(answer: str, status: str) -> None:
    assert verify_answer(CONTEST, answer).status == status


@needs_bubblewrap
@pytest.mark.parametrize(
    "answer", ["raise ValueError", "import sys\nsys.exit(1)", "1 / 0", "def f(:", "input()\ninput()"]
)
def test_a_program_that_raises_where_nothing_is_to_be_printed_is_wrong(answer: str) -> None:
    spec = {"inputs": [""], "outputs": [""], "fn_name": None}
    assert verify_answer(spec, answer).status == "wrong"


@needs_bubblewrap
def test_values_are_compared_with_their_types() -> None:
    def verdict(expression: str, output: str) -> str:
        spec = {"inputs": ["1"], "outputs": [output], "fn_name": "f"}
        return verify_answer(spec, f"def f(x): return {expression}").status

    assert verdict("(1, [2.0, None])", "[1, [2, null]]") == "score"
    assert verdict("{'a': True}", '{"a": true}') == "score"
    for expression, output in [
        ("True", "1"), ("1", "true"), ("'1'", "1"), ("float('nan')", "NaN"), ("[1]", "[1, 1]"), ("{}", "[]"),
        ("None", '""'), ("'𝟭'", '"1"'), ("{'a': 1, 'b': 2}", '{"a": 1}'),
    ]:  # fmt: skip
        assert verdict(expression, output) == "wrong", expression


def test_a_broken_record_or_no_sandbox_is_an_error_and_not_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TASKS[0]
    for change in ({"outputs": []}, {"inputs": [], "outputs": []}, {"outputs": ["{"] * 6}):
        broken = Task(task.family, task.prompt, task.canonical, {**task.spec, **change}, task.solution)
        assert verify(broken, task.solution.answer).status == "error"
    monkeypatch.setenv("PATH", "")
    sandbox._bubblewrap.cache_clear()
    verdict = verify(task, task.solution.answer)
    assert verdict.status == "error" and "bwrap is not installed" in verdict.reason
    sandbox._bubblewrap.cache_clear()


def test_the_weak_tier_verifies_where_it_is_named() -> None:
    task = TASKS[0]
    assert verify(task, task.solution.answer, sandbox="subprocess").status == "score"
    assert verify(task, "def f(x): return None", sandbox="subprocess").status == "wrong"


def record_of(tests: dict[str, Any]) -> dict[str, Any]:
    """A record as it is published for NeMo Gym."""
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "Print twice the number."}]},
        "agent_ref": {"type": "responses_api_agents", "name": "code_gen_simple_agent"},
        "verifier_metadata": {"unit_tests": tests},
    }


@needs_bubblewrap
def test_a_published_record_is_a_task() -> None:
    task = from_gym("code_gen", record_of({"inputs": ["1\n", "5"], "outputs": ["2\n", "10"]}))
    assert (task.prompt, task.family) == ("Print twice the number.", "code_generation")
    answer = "It is:\n```python\nprint(2 * int(input()))\n```"
    assert verify(task, f"```python\nprint(3)\n```</think>{answer}", thinking=True).status == "score"
    assert verify(task, f"{answer}</think>I do not know.", thinking=True).status == "wrong"
    assert verify(task, answer, thinking=True).status == "wrong"  # the reasoning was never closed
    half = "print(2)"
    assert verify(task, half).reason == "test 2 of 2: another output"
    method = from_gym("code_gen", record_of({"inputs": ["1\n2"], "outputs": ["[1, 2]"], "fn_name": "pair"}))
    program = "class Solution:\n    def pair(self, a: int, b: int) -> List[int]:\n        return [a, b]"
    assert verify(method, program).status == "score"


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": [], "outputs": []},
        {"inputs": ["1"], "outputs": []},
        {"inputs": ["1"], "outputs": ["one"], "fn_name": "f"},
        {"inputs": ["1\n"], "outputs": ["1"], "fn_name": "f"},
    ],
)
def test_a_published_record_that_nothing_can_pass_is_refused(tests: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="unit_tests"):
        from_gym("code_gen", record_of(tests))


# --- Answers that must not pass ---------------------------------------------------------------------------------------

TRICKS = (
    "",
    "x" * 100_000,
    "def f(x): return x.__class__",
    "def f(x): raise ValueError",
    "def f(x): return float('nan')",
    "def f(x): return float('inf')",
    "import os\nos._exit(0)",
    "import sys\nsys.exit(0)",
    "print('PASSED')\nprint('ready')\nprint('{\"output\": \"1\"}')",
    "class A:\n    def __eq__(self, other): return True\n    def __repr__(self): return '1'\ndef f(x): return A()",
    "class A(int):\n    def __eq__(self, other): return True\ndef f(x): return A(123456789)",
    "import json\njson.dumps = lambda value: 'true'\ndef f(x): return 1",
    "import builtins\nbuiltins.all = lambda values: True\nbuiltins.zip = lambda *a: []\ndef f(x): return None",
    (
        "import sys\nsys.modules['nemotron'] = None\nfor m in list(sys.modules.values()):\n"
        "    for n in ('verify', 'verify_answer', 'right'):\n        setattr(m, n, lambda *a: 1)\ndef f(x): return None"
    ),
    "import os\nos.kill(os.getppid(), 9)",
    (
        'import os\nfor fd in range(30):\n    try:\n        os.write(fd, b\'{"output": "1"}\\n\' * 9)\n'
        "    except OSError:\n        pass\ndef f(x): return None"
    ),
    "import os\nopen('/tmp/reward.txt', 'w').write('1.0')\ndef f(x): return None",
    "def g(x): return x",
    "f = 1",
    "dеf f(x): return x",  # the e is Cyrillic
)


def adversarial(task: Task, others: list[Task]) -> Iterator[str]:
    """Answers that look right, or try to be taken for it."""
    right = task.solution.answer
    yield from TRICKS
    yield f"<answer>{right}</answer>"
    yield f"{right}\n```python\ndef f(x): return None\n```"
    yield f"```python\n```python\n{right}\n```\n```"
    yield repr(task.spec["outputs"])
    yield f"def f(x): return {task.spec['outputs'][0]!r}"
    yield right.replace("return", "return lambda:")
    yield right.replace("return ", "return [") + "]"
    yield from (other.solution.answer for other in others)
    for number in set(re.findall(r"\d+", right)):
        yield right.replace(number, str(int(number) + 1))
        yield right.replace(number, str(int(number) - 1))


def means_the_same(answer: str, task: Task) -> bool:
    """Whether an answer is another spelling of the right function, on arguments that no test has."""
    names: dict[str, Any] = {}
    rng = random.Random(1)
    try:
        exec(answer, names)
        arguments = [json.loads(text) for text in task.spec["inputs"]]
        more = [
            value + rng.randint(1, 500) if isinstance(value, int) else value + value[::-1]
            for value in arguments for _ in range(5)
        ]  # fmt: skip
        return all(names["f"](value) == function_of(task)(value) for value in more)
    except Exception:
        return False


def count_passes(tasks: list[Task]) -> tuple[int, list[str]]:
    """How many adversarial answers there are, and which pass."""
    others = {task.canonical: task for task in TASKS}
    pairs: list[tuple[Task, str]] = []
    for index, task in enumerate(tasks):
        alike = [other for other in others.values() if other.canonical != task.canonical][index : index + 5]
        for answer in adversarial(task, alike):
            if not (answer.startswith("def f(x): return") and means_the_same(answer, task)):
                pairs.append((task, answer))
    verdicts: list[Verdict] = verify_all([task for task, _ in pairs], [answer for _, answer in pairs])
    passed = [answer for (_, answer), verdict in zip(pairs, verdicts, strict=True) if verdict.status != "wrong"]
    return len(pairs), passed


@needs_bubblewrap
def test_no_trick_passes() -> None:
    assert count_passes([TASKS[0]])[1] == []


@needs_bubblewrap
@pytest.mark.slow
def test_none_of_a_thousand_adversarial_answers_passes() -> None:
    count, passed = count_passes(TASKS[1:33])
    assert count >= 1000 and passed == []
