"""Environments of the user's own: how they are loaded, what their tasks and verdicts become, what is waited for."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemotron.stack.environments import Task, Verdict, open_episode, prompt_tools, verify
from nemotron.stack.environments.own import (
    MAX_AT_ONCE,
    as_verdict,
    held_out_tasks,
    load_environment,
    make_task,
    read_tasks,
)
from nemotron.stack.environments.task import split_of
from nemotron.stack.evaluation.scoring import Completion, evaluate_tasks

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}


class Halves:
    """Endless tasks, each of them twice."""

    def tasks(self) -> Iterator[dict[str, Any]]:
        for number in count():
            right = str(number // 2)
            yield {"prompt": f"What is half of {number // 2 * 2}?", "spec": {"right": right}, "answer": right}

    def verify_answer(self, spec: dict[str, Any], answer: str) -> float:
        return answer.strip() == spec["right"]


def task_of(environment: Any, **record: Any) -> Task:
    return make_task("halves", environment, {"prompt": "What is half of 4?", "spec": {"right": "2"}} | record)


def test_an_answer_is_held_against_the_environment_without_its_reasoning() -> None:
    task = task_of(Halves())
    assert verify(task, "perhaps 3</think>2", thinking=True).status == "score"
    assert verify(task, "2</think>3", thinking=True).status == "wrong"
    assert verify(task, "2", thinking=True).status == "wrong"  # the reasoning never ends: there is no answer
    episode = open_episode(task, thinking=True)
    assert episode is not None and episode.respond("perhaps 3</think>2") is None and episode.verdict().score == 1.0


@pytest.mark.parametrize(
    ("value", "status", "score"),
    [
        (True, "score", 1.0), (0.25, "score", 0.25), (1, "score", 1.0), (False, "wrong", 0.0), (0, "wrong", 0.0),
        (math.nan, "error", None), (1.5, "error", None), (-0.1, "error", None), (math.inf, "error", None),
        (None, "error", None), ("yes", "error", None), (Verdict("wrong", 0.0, "why"), "wrong", 0.0),
        (Verdict("score", 5.0), "error", None), (Verdict("score", math.nan), "error", None),
    ],
)  # fmt: skip
def test_only_a_number_from_0_to_1_is_a_verdict(value: object, status: str, score: float | None) -> None:
    verdict = as_verdict(value)
    assert verdict.status == status
    assert math.isnan(verdict.score) if score is None else verdict.score == score


def test_what_an_environment_raises_is_an_error_of_this_answer() -> None:
    class Broken(Halves):
        def verify_answer(self, spec: dict[str, Any], answer: str) -> float:
            raise TimeoutError("no answer\nafter 5 s")

        def open_episode(self, spec: dict[str, Any]) -> Broken:
            return self

        def respond(self, answer: str) -> None:
            return None

        def verdict(self) -> float:
            return 1 / 0

    task = task_of(Broken())
    assert verify(task, "2").reason == "TimeoutError: no answer after 5 s"
    episode = open_episode(task)
    assert episode is not None and episode.respond("2") is None
    assert episode.verdict().status == "error" and "ZeroDivisionError" in episode.verdict().reason


def test_verdicts_of_many_attempts_are_waited_for_together() -> None:
    attempts = 16
    assert attempts <= MAX_AT_ONCE
    meeting = threading.Barrier(attempts)  # which nobody leaves before all are there

    class Slow(Halves):
        def verify_answer(self, spec: dict[str, Any], answer: str) -> float:
            meeting.wait(timeout=20)
            return answer == spec["right"]

    def generate(prompts: Any, *, samples: int = 1, begin: Any = None, **_: Any) -> list[Completion]:
        episodes = [begin(row) for row in range(len(prompts)) for _ in range(samples)]
        for episode in episodes:
            assert episode.respond("so</think>2") is None
        return [Completion("so</think>2", 3, 0.5, True, episode.verdict()) for episode in episodes]

    evaluation = evaluate_tasks(generate, [task_of(Slow())] * attempts, template="nano3", samples=0)
    assert evaluation.mean("greedy").estimate == 1.0


def test_an_episode_shows_results_of_tools_and_then_gives_its_verdict() -> None:
    class Door:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def respond(self, answer: str) -> list[dict[str, Any]] | None:
            self.seen.append(answer)
            return [{"role": "tool", "content": "a key"}] if "look" in answer else None

        def verdict(self) -> float:
            return self.seen == ["look", "done"]

    class Doors(Halves):
        def open_episode(self, spec: dict[str, Any]) -> Door:
            return Door()

    task = task_of(Doors(), tools=[TOOL])
    assert prompt_tools(task) == [TOOL]
    episode = open_episode(task, thinking=True)
    assert episode is not None and episode.tools == [TOOL]
    assert episode.respond("where?</think>look") == [{"role": "tool", "content": "a key"}]
    assert episode.respond("there</think>done") is None
    assert episode.verdict().status == "score"


def test_a_task_is_plain_data_and_says_nothing_of_code() -> None:
    task = task_of(Halves(), spec={"right": "2", "of": (1, 2)})
    record = task.to_dict()
    assert record["spec"] == {"right": "2", "of": [1, 2]} and "environment" not in record and "messages" not in record
    read = Task.from_dict(record)
    assert read == task and read.environment is None
    assert verify(read, "2").status == "error"  # nothing verifies it until a config says what
    assert verify(replace(read, environment=task.environment), "2").score == 1.0


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": " "}, "prompt must be text, not ' '"),
        ({"spec": "2"}, "spec must be a mapping, not str"),
        ({"spec": {"right": {1, 2}}}, "spec is no JSON: Object of type set is not JSON serializable"),
        ({"spec": {"right": math.nan}}, "spec is no JSON: Out of range float values are not JSON compliant"),
        ({"specs": {}}, "unknown key 'specs' of a task"),
        ({"messages": []}, "messages must be a list with at least one message, not []"),
        ({"messages": [{"role": "usr", "content": "?"}]}, "message 0"),
    ],
)
def test_a_record_that_is_no_task_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        task_of(Halves(), **record)
    assert message in refused.value.message


def test_the_own_answer_of_a_task_has_to_be_right() -> None:
    class Wrong(Halves):
        def tasks(self) -> Iterator[dict[str, Any]]:
            yield {"prompt": "What is half of 4?", "spec": {"right": "2"}, "answer": "2"}
            yield {"prompt": "What is half of 6?", "spec": {"right": "3"}, "answer": "2"}

    with pytest.raises(UserError, match="environment halves, task 1: its own answer is not right"):
        list(read_tasks("halves", Wrong()))

    class Silent(Halves):
        def verify_answer(self, spec: dict[str, Any], answer: str) -> None:  # type: ignore[override]
            """Returns nothing, as where `return` has been forgotten."""

    with pytest.raises(UserError, match="task 0: its own answer cannot be verified: verify_answer gave") as refused:
        list(read_tasks("halves", Silent()))
    assert "leave it out" not in (refused.value.hint or "")  # RL would end with every answer an error


def test_what_tasks_raises_is_an_error_of_one_line() -> None:
    class Unset(Halves):
        def tasks(self) -> Iterator[dict[str, Any]]:
            yield from islice(super().tasks(), 2)
            raise KeyError("GYM_RECORDS")

    with pytest.raises(UserError, match=r"environment halves: tasks\(\) fails after 2 tasks: KeyError: 'GYM_RECORDS'"):
        list(read_tasks("halves", Unset()))


def test_evaluation_asks_different_tasks_of_its_own_split() -> None:
    tasks = held_out_tasks("halves", Halves(), 10)
    assert len({task.canonical for task in tasks}) == 10
    assert {split_of(task.canonical) for task in tasks} == {"eval"}

    class Few(Halves):
        def tasks(self) -> Iterator[dict[str, Any]]:
            while True:
                yield {"prompt": "What is half of 4?", "spec": {"right": "2"}}

    assert len(held_out_tasks("halves", Few(), 10)) <= 1  # and it ends


def test_environments_are_loaded_from_a_file_with_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "own_beside.py").write_text("RIGHT = '2'\n")
    (tmp_path / "own_math.py").write_text(
        "import own_beside\nclass Halves:\n    def tasks(self): return []\n"
        "    def verify_answer(self, spec, answer): return answer == own_beside.RIGHT\n"
        "halves = Halves()\nnothing = 3\n"
    )
    for name in ("Halves", "halves"):
        assert load_environment(f"{tmp_path}/own_math.py:{name}").verify_answer({}, "2") is True
    with pytest.raises(UserError, match="has no halve") as refused:
        load_environment(f"{tmp_path}/own_math.py:halve")
    assert refused.value.hint == "did you mean halves?"
    with pytest.raises(UserError, match="has no method tasks"):
        load_environment(f"{tmp_path}/own_math.py:nothing")
    (tmp_path / "own_broken.py").write_text("import no_such_library\n")
    with pytest.raises(UserError, match=r"own_broken.py fails to load: ModuleNotFoundError: No module named"):
        load_environment(f"{tmp_path}/own_broken.py:halves")
