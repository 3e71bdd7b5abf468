"""Published math records: verdicts as recorded, nothing wrong that passes, and what cannot be decided."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemotron.stack.environments import Verdict, from_gym, math_comparison, math_equality, verify
from nemotron.stack.environments.boxed import last_boxed
from nemotron.stack.environments.killable import Worker
from nemotron.stack.environments.math import verify_answer, without_delimiters

from .recorded_cases import cases

# Recorded of the stage that asks the library alone, without the one before it that wants a box.
NO_BOX = {2: 0.0, 3: 0.0, 4: 0.0, 15: 0.0, 40: 0.0, 53: 0.0, 61: 0.0, 65: 0.0}
FLAWS = {
    5: (1.0, "two boxes are read as a set; here the last one is the answer"),
    54: (1.0, "a box in the reasoning counts; here the last one is the answer"),
    60: (0.0, "33=16 passes for 16, for it ends so; here both sides have to be 16"),
    **{number: (score, "the answer stands in no box") for number, score in NO_BOX.items()},
}


def record(expected: str, prompt: str = "What is it? Put it in a box.") -> dict[str, Any]:
    return {"responses_create_params": {"input": [{"role": "user", "content": prompt}]}, "expected_answer": expected}


def verdict(expected: str, answer: str) -> Verdict:
    return verify(from_gym("math_with_judge", record(expected)), answer)


def test_recorded_rewards_but_for_the_flaws() -> None:
    recorded = cases("gym_math_verify")
    assert len(recorded) == 68
    differing = {}
    for number, case in enumerate(recorded):
        scored = verify_answer(
            {"expected_answer": without_delimiters(case["inputs"]["expected_answer"])}, case["inputs"]["text"]
        ).score
        if scored != case["outputs"]["reward"]:
            differing[number] = scored
    assert differing == {number: score for number, (score, _) in FLAWS.items()}


@pytest.mark.parametrize(
    ("text", "recorded"),  # of the server's `_strip_math_delimiters`
    [
        ("\\(x\\)", "x"),
        ("$16$", "16"),
        (" $ 16 $ ", "16"),
        ("$", "$"),
        ("\\( $3$ \\)", "3"),
        ("(16)", "(16)"),
    ],
)
def test_delimiters_are_stripped_as_recorded(text: str, recorded: str) -> None:
    assert without_delimiters(text) == recorded


@pytest.mark.parametrize(
    ("text", "recorded", "ours"),
    [  # it takes one `$` of two, and the first and the last of two formulas
        ("$$16$$", "$16$", "16"),
        ("$a$ and $b$", "a$ and $b", "$a$ and $b$"),
        ("\\(a\\) or \\(b\\)", "a\\) or \\(b", "\\(a\\) or \\(b\\)"),
    ],
)
def test_delimiters_are_stripped_in_pairs_and_around_all_of_it(text: str, recorded: str, ours: str) -> None:
    assert without_delimiters(text) == ours != recorded


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("16", "x+1=16"),
        ("16", "1=2=16"),
        ("x=16", "x=3=16"),
        ("x=16", "y=16"),
        ("14", "14_8"),
        ("10^{-8}", "0.0"),
        ("16", "16\\%"),
        ("16", "17\\boxed{16}"),
        ("16", "16 \\text{ or } 17"),
        ("16", "17 \\neq 16"),
        ("16", "\\text{16}\\text{17}"),
        ("(1, 2)", "[1, 2]"),
        ("\\text{east}", "west"),
        ("16", "１６"),
        ("16", "NaN"),
        ("16", "\\infty"),
        ("16", "7+9"),  # the problem, most often
        ("16", "2 \\cdot 8"),
        ("-7", "3 - 10"),
        ("16", "(7)+{9}"),
        ("16", "7\\,+\\left( 9 \\right)"),
        ("16", "20+(-4)"),
        ("16", "x = 7+9"),
        ("\\frac{1}{2}", "3=\\frac{1}{2},"),
        ("16 \\, \\text{cm}", "3 \\, = \\, 16"),
    ],
)
def test_what_looks_like_the_answer_is_wrong(expected: str, answer: str) -> None:
    assert verdict(expected, f"\\boxed{{{answer}}}").status == "wrong"


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("16", "f(2) = 4 \\cdot 4 = 16"),
        ("16", "\\text{Area} = 16"),
        ("16", "2 + 14 = 16"),
        ("x=16", "16"),
        ("y = 2x + 1", "y=1+2x"),
        ("x^2+y^2=1", "y^2+x^2=1"),
        ("$16$", "16."),
        ("$$16$$", "\\boxed{16}"),
        ("\\(\\frac{1}{2}\\)", "50\\%"),
        ("16\\%", "16\\%"),
        ("1_{16}", "1_{16}"),
        ("\\sum_{k=1}^{10} k", "55"),
        ("16", "\\frac{32}{2}"),
        ("2+3x", "3x+2"),
        ("300", "3 \\times 10^2"),
        ("1600", "1.6\\cdot10^{3}"),
        ("1600", "16 \\times {10}^2"),
        ("16", "\\frac{-32}{-2}"),
        ("16", "x = 4 \\cdot 4 = \\frac{32}{2}"),
        ("1000", "n = 1,000"),
        ("1,2", "x=1, x=2"),
    ],
)
def test_what_means_the_same_is_right(expected: str, answer: str) -> None:
    assert verdict(expected, f"so it is \\boxed{{{answer}}}").status == "score"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{1} \\boxed{ 2 }", "2"),
        ("\\boxed{\\frac{1}{2}}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1\\}}", "\\{1\\}"),
        ("\\boxed{\\boxed{1}}", "1"),
        ("\\boxed{ \\boxed{ \\boxed{\\{1\\}} }}", "\\{1\\}"),
        ("\\boxed{\\boxed{1} + \\frac{2}{3}}", None),
        pytest.param("\\boxed{" * 20_000 + "1" + "}" * 20_000, "1", id="deep"),
        ("\\boxed{}", ""),
        ("\\boxed{1} \\boxed{", None),
        ("\\boxed{1 \\boxed{2}", None),
        ("\\boxed{1 \\boxed{2}}", None),
        ("\\boxed{1\\}", None),
        ("boxed{1} \\boxed {1}", None),
    ],
)
def test_the_last_box(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "inner"),
    [("\\( $3$ \\)", "3"), ("$", "$"), ("(16)", "(16)"), ("$a$ and $b$", "$a$ and $b$"), (" $ 1 $ ", "1")],
)
def test_delimiters_around_all_of_it_are_dropped(text: str, inner: str) -> None:
    assert without_delimiters(text) == inner


@pytest.mark.slow
def test_no_false_pass_on_a_thousand_answers() -> None:
    expected = ["16", "-7", "0.5", "\\frac{6}{11}", "6\\sqrt{2}", "x^2+6x+1", "(16, 33)", "\\text{east}", "2\\pi", "17"]
    near = [
        "2({})",
        "-({})",
        "({})^2+3",
        "{} + 1",
        "1, {}",
        "{} \\text{{ or }} 5",
        "3 \\ne {}",
        "x \\ge {}",
        "5={}",
        "{}i",
    ]
    around = [
        "\\boxed{{{}}} \\boxed{{}}",
        "\\boxed{{{}",
        "<think>\\boxed{{{}}}",
        "\\fbox{{{}}}",
        "Answer: {}",
        "\\boxed {{{}}}",
    ]
    answers = [""] + [other.format(right) for right in expected for other in around]
    cases = [(right, answer) for right in expected for answer in answers]
    cases += [(right, f"\\boxed{{{other}}}") for right in expected for other in expected if other != right]
    cases += [(right, f"\\boxed{{{other.format(right)}}}") for right in expected for other in near]
    cases += [
        (right, f"\\boxed{{{other}}}") for right in expected for other in ("NaN", "\\infty", "?", "½", "\u200b16")
    ]
    cases += [
        (right, f"{other}, so {around[4].format(right)} \\boxed{{{other}}}")
        for right in expected
        for other in "?ABx0289"
    ]
    cases += [(right, f"\\boxed{{{right}}} \\boxed{{{other}}}") for right in expected for other in "?ABx0289"]
    cases += [("16", "1" * length) for length in (10**3, 10**5)] + [("16", "\\boxed{" * 10**4)]
    passed = [case for case in cases if verdict(*case).status == "score"]
    assert len(cases) >= 1000 and passed == []


@pytest.mark.slow
def test_what_takes_too_long_or_ends_the_process_is_an_error_and_the_next_one_is_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(math_comparison, cpu_seconds=1.0)
    monkeypatch.setattr(math_equality, "_worker", worker)
    undecided = verdict("\\frac{3}{2}", "\\boxed{9^{9^{9^{9}}}}")
    assert undecided.status == "error" and undecided.score != undecided.score
    assert verdict("\\frac{3}{2}", "\\boxed{1.5}").status == "score"
    assert worker.process is not None
    os.kill(worker.process.pid, signal.SIGTERM)  # meant for the parent
    assert verdict("\\frac{3}{2}", "\\boxed{1.25}").status == "wrong"
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    killed = verdict("\\frac{3}{2}", "\\boxed{\\frac{6}{4}}")
    assert (killed.status, killed.reason) == ("error", "UndecidedError: the process that was asked ended with -9")
    assert verdict("\\frac{3}{2}", "\\boxed{\\frac{6}{4}}").status == "score"


def test_an_expected_answer_that_cannot_be_read_makes_no_zeros() -> None:
    undecided = verdict("}{", "\\boxed{16}")
    assert (undecided.status, undecided.reason) == ("error", "UndecidedError: the expected answer cannot be read")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expected_answer": 16}, "expected_answer must be text, not 16"),
        ({"expected_answer": " "}, "expected_answer must be text"),
        ({"responses_create_params": {}}, "no prompt in responses_create_params.input"),
        ({"responses_create_params": {"input": [{"role": "user", "content": [{}]}]}}, "has no text"),
        (
            {
                "responses_create_params": {
                    "input": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
                }
            },
            "holds system, user; a task is one user message",
        ),
    ],
)
def test_a_record_without_what_it_needs_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_gym("math_with_judge", record("16") | change)


def test_the_task_of_a_record() -> None:
    task = from_gym("math_with_judge", record(" \\(\\frac{1}{2}\\) ", "Half  of one?"))
    assert (task.family, task.prompt) == ("math", "Half  of one?")
    assert task.spec == {"expected_answer": "\\frac{1}{2}"}
    parts = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "half of ONE?"}]}]}
    same = from_gym("math_with_judge", {"responses_create_params": parts, "expected_answer": "0.5"})
    assert same.canonical == task.canonical
    assert verify(task, task.solution.answer).status == "score"
