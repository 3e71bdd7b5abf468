"""Held-out tasks of a family for lm-eval, and their verdicts: those of our own evaluation with the same seed.

lm-eval's YAML files beside this one name these functions. Tasks are generated in place of a download; how many and
which of them `--metadata` says, as in `--metadata num_tasks=500 seed=1`.
"""

from __future__ import annotations

import json
from typing import Any

import datasets

from nemo_runspec.errors import UserError
from nemotron.stack.environments import (
    Task,
    generate_tasks,
    plain_answer,
    plain_prompt,
    verifiable_families,
    verify,
)
from nemotron.stack.environments.multiple_choice import LETTERS


def held_out(family: str, num_tasks: int = 200, seed: int = 0, **_: Any) -> dict[str, datasets.Dataset]:
    """The split `test`: the task as JSON, since the specs of a family differ in their keys, and what is asked.

    UserError: the answers are programs, and no sandbox starts here; `num_tasks` or `seed` is no number,
    or there are to be no tasks.
    """
    for name, value in {"num_tasks": num_tasks, "seed": seed}.items():
        if not isinstance(value, int):
            raise UserError(f"--metadata {name}={value}: a whole number expected")
    if num_tasks < 1:
        raise UserError(f"--metadata num_tasks={num_tasks}: at least 1 expected")
    verifiable_families([family])
    tasks = generate_tasks(family, "eval", num_tasks, seed)
    rows = [{"prompt": t.prompt, "task": json.dumps(t.to_dict()), "answer": t.solution.answer} for t in tasks]
    return {"test": datasets.Dataset.from_list(rows)}


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """What an answer is worth; nan, and so the mean, where it could not be decided."""
    return {"acc": verify(_task(doc), results[0], thinking=False).score}


def plain(doc: dict[str, Any]) -> str:
    """The prompt for a model that knows no chat template: the document of pretraining up to its reasoning."""
    return plain_prompt(_task(doc))


def score_plain(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """What the answer on the second line is worth, after the line of the reasoning."""
    task = _task(doc)
    return {"acc": verify(task, plain_answer(results[0], task.family), thinking=False).score}


def letters(doc: dict[str, Any]) -> list[str]:
    """The letters of a question's options."""
    return list(LETTERS[: len(_task(doc).spec["options"])])


def right_letter(doc: dict[str, Any]) -> int:
    """Which of `letters` is right."""
    return LETTERS.index(_task(doc).spec["letter"])


def _task(doc: dict[str, Any]) -> Task:
    return Task.from_dict(json.loads(doc["task"]))
