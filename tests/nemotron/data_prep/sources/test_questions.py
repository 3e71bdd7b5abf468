"""Evaluation questions read from files: what is left out is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemotron.data_prep.sources.questions import read_questions
from nemotron.kit.schemas.questions import QuestionsConfig
from nemotron.stack.environments import Task
from nemotron.stack.environments.questions import make_task


def row_of(source: QuestionsConfig, row: dict[str, Any]) -> dict[str, Any]:
    return row


def as_task(source: QuestionsConfig, row: dict[str, Any]) -> Task:
    return make_task(source.name, row, source.match)


def test_a_question_whose_answer_is_no_choice_is_left_out_under_skip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "quiz.jsonl"
    file.write_text(
        '{"question": "Red?", "answer": "blood", "choices": ["blood", "snow"]}\n'
        '{"question": "White?", "answer": "milk", "choices": ["blood", "snow"]}\n'
    )
    quiz = {"name": "quiz", "paths": [str(file)], "match": "choice"}
    with pytest.raises(UserError, match=r"quiz.jsonl:2: answer 'milk' is none of the 2 choices"):
        read_questions([QuestionsConfig.model_validate(quiz)], as_task)
    [task] = read_questions([QuestionsConfig.model_validate({**quiz, "on_error": "skip"})], as_task)
    assert task.spec["answers"] == ["A"]
    stderr = capsys.readouterr().err
    assert "1 record read; not read: 1 not a valid question" in stderr and "answer 'milk' is none" in stderr


def test_questions_that_are_left_out_are_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "quiz.jsonl"
    source = QuestionsConfig.model_validate({"name": "quiz", "paths": [str(file)], "on_error": "skip"})
    file.write_text('{"question": "1 + 1?", "answer": 2}\n{"question": "2 + 2?"}\n{"question"\n')
    [row] = read_questions([source], row_of)
    assert row == {"question": "1 + 1?", "answer": 2}
    stderr = capsys.readouterr().err
    assert "questions 'quiz': 1 record read; not read: 1 field is missing, 1 malformed JSON" in stderr
    assert "quiz.jsonl:2: field is missing: field 'answer'" in stderr
    assert "warning: source 'quiz': 2 of 3 read are dropped" in stderr
    file.write_text('{"question"\n')
    with pytest.raises(UserError, match="source 'quiz': nothing is left of 1 read: 1 malformed JSON"):
        read_questions([source], row_of)


def test_a_question_comes_with_its_choices_and_its_match(tmp_path: Path) -> None:
    file = tmp_path / "quiz.jsonl"
    file.write_text(
        '{"question": "Red?", "answer": "A", "choices": ["blood", "snow"], "kind": "choice", "id": 1}\n'
        '{"question": "A year?", "answer": "19", "kind": "regex"}\n'
    )
    source = QuestionsConfig.model_validate({"name": "quiz", "paths": [str(file)], "columns": {"match": "kind"}})
    assert read_questions([source], row_of) == [
        {"question": "Red?", "answer": "A", "choices": ["blood", "snow"], "match": "choice"},
        {"question": "A year?", "answer": "19", "match": "regex"},
    ]
