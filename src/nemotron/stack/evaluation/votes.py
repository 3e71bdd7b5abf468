"""Answers that are compared with one another: which tasks have such, and the form in which they are compared."""

from __future__ import annotations

from nemotron.stack.environments import Task, math, multiple_choice, prompt_tools, questions
from nemotron.stack.environments.killable import UndecidedError


def has_votes(task: Task) -> bool:
    """Whether samples of a task can vote: it has one short answer. Programs, calls and free text have none."""
    if task.environment is not None or prompt_tools(task):
        return False
    if task.family.startswith(questions.PREFIX):
        return task.spec["match"] in ("exact", "choice")
    return task.family in (math.FAMILY, multiple_choice.FAMILY)


def vote_of(task: Task, answer: str) -> str | None:
    """An answer as the verifier compares it; None where there is none, or it could not be found out.

    Published mathematics is compared as text without its delimiters, since each pair takes math-verify a while.
    """
    if task.family.startswith(questions.PREFIX):
        return questions.answered(task.spec, answer)
    if task.family == math.FAMILY:
        return math.answered(task.spec, answer)
    try:
        return multiple_choice.answered(task.spec, answer)
    except UndecidedError:  # the verdict is an error already
        return None
