"""An environment of the user's own: an object that gives tasks and verifies answers, in a file that a config names.

    class Halves:
        def tasks(self):
            for number in range(0, 1000, 2):
                yield {"prompt": f"What is half of {number}?", "spec": {"right": str(number // 2)}}

        def verify_answer(self, spec, answer):
            return answer.strip() == spec["right"]

Tasks are read once, by `nano3 data prep rl`; what goes on to RL is their prompt and their `spec`, as JSON. Nothing in
the data says which code verifies it: only a config does, so that nobody's data runs anybody's code.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_runspec.errors import UserError, did_you_mean
from nemo_runspec.user_files import expanded
from nemotron.kit.chat import check_messages
from nemotron.kit.schemas.environments import split_reference
from nemotron.stack.environments.task import (
    Environment,
    Solution,
    Split,
    Task,
    Verdict,
    answer_of,
    error,
    partly,
    right,
    split_of,
    wrong,
)

# Answers that are verified at once: whoever verifies them may be a server that asks a model.
MAX_AT_ONCE = 64
# Tasks without a new one, one after the other, after which an endless environment is taken to have no more.
MAX_FRUITLESS = 20_000
_FIELDS = ("prompt", "messages", "tools", "spec", "answer")


def load_environments(references: Mapping[str, str]) -> dict[str, Environment]:
    """The environments that a config names; UserError where there is none under the name."""
    return {name: load_environment(reference) for name, reference in references.items()}


def load_environment(reference: str) -> Environment:
    """The object `FILE.py:NAME` or `PACKAGE.MODULE:NAME`; of a class, an instance. Its code is run.

    Modules beside the file can be imported by it, after those that are installed.
    """
    place, name = split_reference(reference)
    # By its whole path: what is loaded once is kept.
    module = _module(os.path.abspath(expanded(place)) if place.endswith(".py") else place)  # noqa: PTH100
    if not hasattr(module, name):
        public = [key for key, value in vars(module).items() if hasattr(value, "verify_answer")]
        raise UserError(f"{place} has no {name}", did_you_mean(name, public))
    value = getattr(module, name)
    try:
        environment: Environment = value() if isinstance(value, type) else value
    except Exception as failure:
        raise UserError(f"{reference}: {_told(failure)}") from failure
    for method in ("tasks", "verify_answer"):
        if not callable(getattr(environment, method, None)):
            raise UserError(f"{reference} has no method {method}", "an environment has tasks and verify_answer")
    return environment


@cache
def _module(place: str) -> ModuleType:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place)
        spec = importlib.util.spec_from_file_location(f"_environment_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look annotations up there
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        spec.loader.exec_module(module)
        return module
    except Exception as failure:
        raise UserError(f"{place} fails to load: {_told(failure)}") from failure


def read_tasks(name: str, environment: Environment) -> Iterator[Task]:
    """The tasks of environment `name`, in its order.

    UserError: `tasks` raises; with the number of the task: it is none, or the answer that comes with it does not pass
    its own check.
    """
    for number, record in enumerate(_records(name, environment)):
        try:
            task = make_task(name, environment, record)
        except UserError as failure:
            raise UserError(f"environment {name}, task {number}: {failure.message}", failure.hint) from failure
        if answer := task.solution.answer:
            verdict = verify_answer(environment, task.spec, answer)
            if verdict.status == "error":  # without its `answer` the task would fail in RL
                raise UserError(
                    f"environment {name}, task {number}: its own answer cannot be verified: {verdict.reason}",
                    f"`answer` is {answer[:80]!r}",
                )
            if verdict.score != 1.0:
                reason = verdict.reason or f"its score is {verdict.score:g}"
                raise UserError(
                    f"environment {name}, task {number}: its own answer is not right: {reason}",
                    f"`answer` is {answer[:80]!r}; leave it out where it is not known",
                )
        yield task


def _records(name: str, environment: Environment) -> Iterator[Mapping[str, Any]]:
    """What `tasks` of environment `name` gives; what it raises, be it a variable that is not set, is a UserError."""
    given = 0
    try:
        for record in environment.tasks():
            yield record
            given += 1
    except Exception as failure:
        at = f"environment {name}: tasks() fails after {given:,} tasks: {_told(failure)}"
        raise UserError(at, "--debug shows where") from failure


def distinct_tasks(name: str, environment: Environment, split: Split) -> Iterator[Task]:
    """The different tasks of environment `name` in a split; of endless ones those before a long run without a new
    one."""
    seen: set[str] = set()
    fruitless = 0
    for task in read_tasks(name, environment):
        if fruitless == MAX_FRUITLESS:
            return
        fruitless += 1
        if split_of(task.canonical) == split and task.canonical not in seen:
            seen.add(task.canonical)
            fruitless = 0
            yield task


def held_out_tasks(name: str, environment: Environment, count: int) -> list[Task]:
    """The first `count` different tasks that data preparation keeps for evaluation, or as many as there are."""
    return list(islice(distinct_tasks(name, environment, "eval"), count))


def make_task(name: str, environment: Environment, record: Mapping[str, Any]) -> Task:
    """The task of a record that environment `name` gave; UserError where something of it is missing or of another type.

    Two tasks of one prompt are one task.
    """
    if not isinstance(record, Mapping):
        raise UserError(f"a task must be a mapping, not {type(record).__name__}")
    for key in record:
        if key not in _FIELDS:
            raise UserError(f"unknown key {key!r} of a task", did_you_mean(str(key), _FIELDS))
    messages = record.get("messages")
    if messages is None:
        prompt = record.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise UserError(f"prompt must be text, not {prompt!r}")
    else:
        if not isinstance(messages, list | tuple) or not messages:
            raise UserError(f"messages must be a list with at least one message, not {messages!r:.80}")
        check_messages(messages)
        messages = list(messages)
        prompt = "\n\n".join(str(message["content"]) for message in messages)
    spec = record.get("spec")
    if not isinstance(spec, Mapping):
        raise UserError(f"spec must be a mapping, not {type(spec).__name__}")
    tools = {"tools": record["tools"]} if record.get("tools") else {}
    try:
        plain = json.loads(json.dumps(dict(spec) | tools, allow_nan=False))
    except (TypeError, ValueError) as failure:
        raise UserError(f"spec is no JSON: {failure}", "texts, numbers, lists and mappings go into the data") from None
    canonical = f"{name}|{' '.join(prompt.casefold().split())}"
    answer = record.get("answer")
    solution = Solution("", "" if answer is None else str(answer))
    return Task(name, prompt, canonical, plain, solution, messages=messages, environment=environment)


def verify_answer(environment: Environment, spec: dict[str, Any], answer: str) -> Verdict:
    """The verdict of an environment; an error where it raises, or gives something else than a verdict or 0..1."""
    try:
        return as_verdict(environment.verify_answer(spec, answer))
    except Exception as failure:
        return error(_told(failure))


def as_verdict(value: Any) -> Verdict:
    """A verdict, an error among them, as it is; or that of a number. A score that is not in 0..1 is an error."""
    if isinstance(value, Verdict) and (value.status == "error" or 0 <= value.score <= 1):
        return value
    try:
        score = float(value.score if isinstance(value, Verdict) else value)
    except (TypeError, ValueError):
        return error(f"verify_answer gave {value!r}, not a number in 0..1")
    if not 0 <= score <= 1:  # NaN included
        return error(f"verify_answer gave {score}, which is not in 0..1")
    return right() if score == 1 else partly(score, "") if score else wrong("")


class OwnEpisode:
    """An `Episode` of a task of the user's. The verdict is asked for in a thread as soon as the last response is there,
    so that those of many attempts are waited for together."""

    def __init__(self, task: Task, environment: Environment, thinking: bool | None) -> None:
        self.task, self.environment, self.thinking = task, environment, thinking
        self.tools: list[dict[str, Any]] = task.spec.get("tools", [])
        self.has_turns = getattr(environment, "open_episode", None) is not None
        self.episode: Any = None
        self.answer = ""
        self._begun = False
        self._verdict: Future[Verdict] | None = None

    def respond(self, response: str) -> list[dict[str, Any]] | None:
        """What the environment answers, if it has episodes."""
        self.answer = answer_of(response, self.thinking)
        if not self._begun:  # not before: what it raises then makes an error of this attempt alone
            self._begun = True
            opened = getattr(self.environment, "open_episode", None)
            self.episode = None if opened is None else opened(self.task.spec)
        answered = None if self.episode is None else self.episode.respond(self.answer)
        if answered is None:
            self._verdict = _pool().submit(self._ask)
        return answered

    def verdict(self) -> Verdict:
        """That of the environment, once it is there."""
        return (self._verdict or _pool().submit(self._ask)).result()

    def _ask(self) -> Verdict:
        if self.episode is None:
            return verify_answer(self.environment, self.task.spec, self.answer)
        try:
            return as_verdict(self.episode.verdict())
        except Exception as failure:
            return error(_told(failure))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="verify")


def _told(failure: Exception) -> str:
    """What went wrong, in one line."""
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
