"""Checks of answers that would go on for hours: they end, the answer is wrong, and the next one is checked."""

from __future__ import annotations

import gc
import json
import os
import signal
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nemotron.stack.environments import (
    Solution,
    Task,
    from_gym,
    generate_tasks,
    matching,
    patterns,
    structured_output,
    validation,
    verify,
)
from nemotron.stack.environments.killable import OutOfTimeError, UndecidedError, Worker
from nemotron.stack.environments.multiple_choice import answered
from nemotron.stack.environments.questions import make_task
from nemotron.stack.environments.validation import as_text, may_take_long

DOUBLING = "(a+)+$"  # tries all 2^n ways to divide n letters before it gives up
LETTERS = "a" * 60 + "!"
UNEVALUATED: dict[str, Any] = {"type": "object", "properties": {"a": {}}}
for _ in range(20):
    UNEVALUATED = {"allOf": [UNEVALUATED], "unevaluatedProperties": False}


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_worker", Worker(matching, cpu_seconds=0.2))
    monkeypatch.setattr(structured_output, "_worker", Worker(validation, cpu_seconds=0.5))


def structured(schema: dict[str, Any]) -> Task:
    return Task("structured_output", "", "", {"schema_str": json.dumps(schema)}, Solution("", ""))


def test_a_question_whose_pattern_takes_too_long_is_not_answered() -> None:
    task = make_task("quiz", {"question": "Which?", "answer": [DOUBLING, "^b"]}, "regex")
    assert verify(task, LETTERS, False).status == "wrong"
    assert verify(task, "aaa", False).status == "score"
    assert verify(task, "b" + LETTERS, False).status == "score"  # the other pattern


def test_a_choice_whose_pattern_takes_too_long_is_none() -> None:
    record = {
        "responses_create_params": {"input": "Which? A: three B: four"},
        "options": [{"A": "three"}, {"B": "four"}],
        "expected_answer": "B",
        "template_metadata": {"output_regex": ["(b) it is", DOUBLING]},
    }
    task = from_gym("mcqa", record)
    late = f"\\boxed{{B}} {LETTERS}"  # by its box it would be right
    assert verify(task, late, False).status == "wrong" and answered(task.spec, late) is None
    assert verify(task, "A it is, B it is", False).status == "score"  # whatever the case
    assert verify(task, "\\boxed{B}", False).status == "score"


# A schema, a document that takes too long under it, and one that is right.
HELD_UP: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "pattern": ({"type": "string", "pattern": f"^{DOUBLING}"}, LETTERS, "aa"),
    "patternProperties": ({"type": "object", "patternProperties": {f"^{DOUBLING}": {}}}, {LETTERS: 1}, {"aa": 1}),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, [{"n": n} for n in range(9000)], [{"n": 1}, {"n": 2}]),
    # At every level what is below is checked again, to see what it evaluates: times 2.7.
    "unevaluatedProperties": ({"anyOf": [{"const": "aa"}, UNEVALUATED]}, {"a": 1}, "aa"),
    # Both alternatives are tried at every level: 2^30 checks of the innermost value.
    "$ref": (
        {"anyOf": [{"properties": {key: {"$ref": "#"}, "b": {}}, "type": "object"} for key in "aa"] + [{"const": 1}]},
        json.loads('{"a":' * 30 + "2" + "}" * 30),
        {"a": {"a": 1, "b": 1}, "b": 1},
    ),
}


@pytest.mark.parametrize("keyword", HELD_UP)
def test_a_schema_under_which_a_check_can_take_too_long_is_told_by_its_keyword(keyword: str) -> None:
    assert may_take_long(as_text(HELD_UP[keyword][0]))


@pytest.mark.parametrize(
    "keyword", [pytest.param(name, marks=[pytest.mark.slow] if name != "pattern" else []) for name in HELD_UP]
)
def test_a_document_that_takes_too_long_is_wrong(keyword: str) -> None:
    schema, late, right = HELD_UP[keyword]
    task = structured(schema)
    verdict = verify(task, json.dumps(late), False)
    assert verdict.status == "wrong" and "more than 0.5 s of processor time" in verdict.reason
    assert verify(task, json.dumps(right), False).status == "score"
    assert verify(task, json.dumps("b"), False).status == "wrong"
    assert verify(task, "{", False).reason.startswith("not JSON")


def test_what_no_document_can_hold_up_is_checked_in_this_process() -> None:
    for task in generate_tasks("structured_output", "train", 50):
        assert not may_take_long(as_text(task.spec["schema"]))
        assert verify(task, task.solution.answer).status == "score"
    assert structured_output._worker.process is None


def test_a_process_ends_with_its_limit_and_goes_on_after_an_exception() -> None:
    worker = Worker(matching, cpu_seconds=0.2)
    with pytest.raises(OutOfTimeError):
        worker.call(matching.is_found, DOUBLING, LETTERS)
    assert worker.process is None
    assert worker.call(matching.is_found, "b", "abc")
    with pytest.raises(UndecidedError, match="error in is_found"):
        worker.call(matching.is_found, "(", "abc")
    assert worker.process is not None
    assert worker.process.poll() is None


def test_a_process_that_is_out_of_memory_ends_and_the_next_one_has_all_of_it(tmp_path: Path) -> None:
    kept = tmp_path / "kept.py"
    kept.write_text("ROWS = []\ndef keep(mib):\n    ROWS.append(bytes(mib << 20))\n    return len(ROWS)\n")
    module = ModuleType("kept")
    module.__file__ = str(kept)
    vars(module)["keep"] = keep
    worker = Worker(module, cpu_seconds=5.0)
    assert worker.call(keep, 1100) == 1
    with pytest.raises(UndecidedError, match="ended with 1"):
        worker.call(keep, 1100)
    assert worker.call(keep, 1100) == 1


def keep(mib: int) -> int:
    raise AssertionError(mib)  # its namesake in the file is called, in the process


def test_nothing_stays_of_a_process_that_has_ended() -> None:
    """Else a run in which many answers take too long is out of file descriptors."""
    worker = Worker(matching, cpu_seconds=0.2)
    assert worker.call(matching.is_found, "a", "a") and worker.process is not None
    replies, ended = worker.process.stdout, weakref.ref(worker.process)
    with pytest.raises(OutOfTimeError):
        worker.call(matching.is_found, DOUBLING, LETTERS)
    gc.collect()
    assert replies is not None and replies.closed and ended() is None
    assert worker.call(matching.is_found, "a", "a")
    process = worker.process
    del worker
    gc.collect()
    assert process is not None and process.returncode == -signal.SIGKILL


def test_a_process_that_the_machine_gave_no_time_is_no_verdict() -> None:
    worker = Worker(matching, cpu_seconds=5.0)
    assert worker.call(matching.is_found, "a", "a") and worker.process is not None
    os.kill(worker.process.pid, signal.SIGALRM)  # as the limit of the wall clock does
    worker.process.wait()
    with pytest.raises(UndecidedError, match="no answer within 120 s") as undecided:
        worker.call(matching.is_found, "a", "a")
    assert not isinstance(undecided.value, OutOfTimeError)  # which would make the answer wrong


def test_a_child_of_a_fork_asks_a_process_of_its_own() -> None:
    worker = Worker(matching, cpu_seconds=5.0)
    assert worker.call(matching.last_found, "[ab]", "abc") == "b"
    parent_asks = worker.process
    child = os.fork()
    if child == 0:
        other = worker.call(matching.last_found, "[ab]", "a") == "a" and worker.process is not parent_asks
        os._exit(0 if other else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert worker.call(matching.last_found, "[ab]", "abc") == "b" and worker.process is parent_asks


def test_threads_get_the_answers_to_their_own_questions() -> None:
    worker = Worker(matching, cpu_seconds=5.0)
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda n: worker.call(matching.last_found, r"\d+", f"x {n} y"), range(200))
        assert list(found) == [str(n) for n in range(200)]
