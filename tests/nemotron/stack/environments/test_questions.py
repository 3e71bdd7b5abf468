"""The user's own questions: which responses match which answers, and what a base model is asked."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemotron.stack.environments import plain_answer, plain_prompt, verify
from nemotron.stack.environments.questions import Match, make_task
from nemotron.stack.environments.task import Task

PLANETS = ("the Earth", "Mars", "Venus 2")


def task_of(answer: Any, match: Match | None, choices: Any = PLANETS, stated: str | None = None) -> Task:
    record = {"question": "Which one?", "answer": answer, "choices": choices, "match": stated}
    return make_task("quiz", record, match)


@pytest.mark.parametrize(
    ("match", "answer", "right", "wrong"),
    [
        ("exact", "New  York", ["new york", " New York.", "NEW\nYORK"], ["in New York", "New Yorker", ""]),
        ("exact", 42, ["42", "42."], ["42.0", "442"]),
        ("exact", 42.0, ["42"], ["42.0"]),  # of a Parquet column in which an answer is missing
        ("exact", 0.5, ["0.5"], ["0", "1"]),
        ("exact", ["colour", "color"], ["Color", "colour"], ["colours"]),
        ("contains", "42", ["It is 42, I think.", "42"], ["It is 420", "It is 142", "4 2"]),
        (
            "contains",
            7,
            ["It is 7.", "7, I think", "so 7. Or", "(7)", "$7", "=7", "...7", "7-fold"],
            ["7.5", "-7", "0.7", ".7", "so .7", "7,000", "1,007", "1/7", "7/8", "\u22127", "3-7", "7-8"],
        ),
        ("contains", "-7", ["It is -7."], ["3-7", "-7.5", "7"]),
        ("contains", "C++", ["I like c++ most"], ["I like C"]),
        ("regex", r"^\s*-?\d+\s*$", [" 17 ", "-3"], ["17 apples"]),
        ("choice", "B", ["B", "(B)", "B) Mars", "B, since", "mars", "Mars."], ["A", "Bad", "the Earth", "A) Mars", ""]),
        ("choice", "venus 2", ["C", "Venus 2"], ["B", "Venus"]),
        ("choice", "A", ["A", "A.", "(A) because", "A\nBecause"], ["A cat, of course", "I think it is A"]),
    ],
)
def test_a_response_is_held_against_the_answer(match: Match, answer: Any, right: list[str], wrong: list[str]) -> None:
    task = task_of(answer, match, PLANETS if match == "choice" else ())
    assert task.family == "questions/quiz"
    assert verify(task, f"so it is\n</think>\n{right[0]}", thinking=True).status == "score"
    for response, status in [(text, "score") for text in right] + [(text, "wrong") for text in wrong]:
        assert verify(task, response, thinking=False).status == status, response
    assert verify(task, right[0], thinking=True).status == "wrong"  # it never ended its reasoning


def test_choices_are_offered_and_a_base_model_is_asked_in_plain_text() -> None:
    task = task_of("Mars", "choice")
    assert plain_prompt(task) == "Question: Which one?\nA) the Earth\nB) Mars\nC) Venus 2\nAnswer:"
    assert plain_answer(" B) Mars\nQuestion: and then?", task.family) == "B) Mars"


@pytest.mark.parametrize(
    ("choices", "answer"),
    [
        ({"text": ["the Earth", "Mars", "Venus 2"], "label": ["A", "B", "C"]}, "B"),
        ({"text": ["the Earth", "Mars", "Venus 2"], "label": ["1", "2", "3"]}, "2"),  # as some questions of ARC
        ({"text": ["the Earth", "Mars", "Venus 2"]}, "Mars"),
        ('["the Earth", "Mars", "Venus 2"]', "mars"),  # as a CSV holds it
        ('{"text": ["the Earth", "Mars", "Venus 2"], "label": [1, 2, 3]}', 2),
        ({"text": ["the Earth", "Mars", "Venus 2"], "label": [1.0, 2.0, 3.0]}, 2),
    ],
)
def test_choices_are_read_as_arc_writes_them_and_from_json_text(choices: Any, answer: Any) -> None:
    assert task_of(answer, "choice", choices) == task_of("B", "choice")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ("Mars, Venus", "must be a list of texts, not 'Mars, Venus'"),
        ("['Mars', 'Venus']", "must be a list of texts"),
        ({"A": "Mars", "B": "Venus"}, "must be a list of texts, not {'A': 'Mars'"),
        ({"text": ["Mars", "Venus"], "label": ["A"]}, "must be a list of texts"),
        ([{"text": "Mars"}, {"text": "Venus"}], "must be a list of texts"),
        (None, "must be a list of texts, not None"),
        ([], "must be a list of texts"),
        ([str(number) for number in range(27)], "27 choices; there are letters for 26"),
    ],
)
def test_choices_that_are_no_list_are_refused(choices: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        task_of("A", "choice", choices)


@pytest.mark.parametrize(
    ("match", "answer", "message"),
    [
        ("exact", None, "without an answer"),
        ("exact", [" "], "without an answer"),
        ("exact", float("nan"), "answer must be text or a number, not nan"),
        ("exact", {"text": ["Paris"]}, "answer must be text or a number, not {'text': "),
        ("exact", [["Paris"]], "answer must be text or a number"),
        ("regex", "(", "is not a regular expression"),
        ("choice", "Pluto", "'Pluto' is none of the 3 choices"),
        ("choice", "D", "'D' is none of the 3 choices"),
    ],
)
def test_a_question_that_nothing_could_answer_is_refused(match: Match, answer: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        task_of(answer, match)


@pytest.mark.parametrize(
    ("question", "message"),
    [(" ", "the question is empty"), ([{"role": "user", "content": "?"}], "question must be text or a number, not")],
)
def test_what_is_no_question_is_refused(question: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_task("quiz", {"question": question, "answer": "B"}, None)


@pytest.mark.parametrize(
    ("stated", "match", "choices", "means"),
    [
        ("contains", None, None, "contains"),
        ("regex", "exact", PLANETS, "regex"),
        ("", "contains", None, "contains"),  # an empty cell of a CSV
        (None, "exact", PLANETS, "exact"),
        (None, None, PLANETS, "choice"),
        (None, None, "", "exact"),
    ],
)
def test_a_record_says_how_its_answer_is_compared(
    stated: str | None, match: Match | None, choices: Any, means: str
) -> None:
    assert task_of("B", match, choices, stated).spec["match"] == means


def test_a_field_match_that_says_something_else_is_refused() -> None:
    with pytest.raises(UserError, match="`match` is 'Germany - France', not one of exact, contains, regex, choice"):
        task_of("B", "exact", None, "Germany - France")


def test_options_that_differ_by_case_are_told_apart() -> None:
    task = task_of("A", "choice", ["5 MW", "5 mW"])
    assert [verify(task, text, False).status for text in ("5 MW", "A 5 MW", "5 mW", "5 mw")] == [
        "score", "score", "wrong", "wrong",
    ]  # fmt: skip
    assert task_of("5 MW", "choice", ["5 MW", "5 mW"]) == task
    for answer, choices in (("5 mw", ["5 MW", "5 mW"]), ("red", ["red", "red", "blue"])):
        with pytest.raises(UserError, match="that of several of the"):
            task_of(answer, "choice", choices)


def test_an_option_that_begins_with_a_letter_is_not_that_letter() -> None:
    task = task_of("C", "choice", ["a dog", "a hen", "a cat"])
    assert [verify(task, text, False).status for text in ("A cat", "c a cat", "A dog", "A hen.")] == [
        "score", "score", "wrong", "wrong",
    ]  # fmt: skip
