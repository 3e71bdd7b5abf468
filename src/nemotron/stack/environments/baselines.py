"""Baselines without understanding: the best constant answer, and the answer of the most similar training task.

Both are printed beside every result, with an upper bound on the share of the task space that training saw. A score is
evidence of learning only as far as it lies above them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemotron.kit.schemas.difficulty import Difficulty
from nemotron.kit.schemas.sandbox import Sandbox
from nemotron.stack.environments.families import runs_programs, task_space_size, verify_all
from nemotron.stack.environments.task import Task

_NGRAM = 3
# A constant answer can only be good if it is frequent, so trying the most frequent ones is enough.
_CANDIDATES = 32
# Of programs the first: each takes a start of the sandbox for each task, and hardly two tasks have the same.
_PROGRAMS = 1


@dataclass(frozen=True, slots=True)
class ConstantAnswer:
    """The answer that, given to every task, is right most often, and the share of tasks it is right for."""

    answer: str
    score: float


def best_constant_answer(tasks: Sequence[Task], sandbox: Sandbox = "bubblewrap") -> ConstantAnswer:
    """The best constant answer among the 32 most common demonstrated ones, chosen on these very tasks.

    Choosing it with knowledge of the tasks that it is scored on makes it an upper bound on an honest constant. Of
    programs only the most common one is tried, which bounds nothing.
    """
    best = ConstantAnswer("", 0.0)
    are_programs = runs_programs(task.family for task in tasks)
    candidates = Counter(task.solution.answer for task in tasks).most_common(_PROGRAMS if are_programs else _CANDIDATES)
    for answer, _ in candidates:
        verdicts = verify_all(tasks, [answer] * len(tasks), sandbox=sandbox)
        score = sum(verdict.score for verdict in verdicts if verdict.status == "score") / len(tasks)
        if score > best.score:
            best = ConstantAnswer(answer, score)
    return best


def _ngrams(prompt: str) -> set[str]:
    """The character n-grams of a prompt, its ends marked."""
    text = f"^{prompt}$"
    return {text[i : i + _NGRAM] for i in range(len(text) - _NGRAM + 1)}


def nearest_neighbour_lookup(
    train_tasks: Sequence[Task], eval_tasks: Sequence[Task], sandbox: Sandbox = "bubblewrap"
) -> float:
    """Share of evaluation tasks that the demonstrated answer of the most similar training task gets right.

    Similarity is the cosine of character-trigram indicator vectors of the prompts, weighted by inverse document
    frequency so that shared wording counts little and shared content much; the first of equal ones wins.
    """
    if not train_tasks or not eval_tasks:
        return 0.0
    index: dict[str, list[int]] = {}
    for position, task in enumerate(train_tasks):
        for ngram in _ngrams(task.prompt):
            index.setdefault(ngram, []).append(position)
    postings = {ngram: np.array(where) for ngram, where in index.items()}
    weight = {ngram: float(np.log((1 + len(train_tasks)) / len(where)) ** 2) for ngram, where in postings.items()}
    squared_norm = np.zeros(len(train_tasks))
    for ngram, where in postings.items():
        squared_norm[where] += weight[ngram]
    norm = np.sqrt(np.maximum(squared_norm, 1e-12))
    answers = []
    for task in eval_tasks:
        shared = np.zeros(len(train_tasks))
        for ngram in sorted(_ngrams(task.prompt) & postings.keys()):
            shared[postings[ngram]] += weight[ngram]
        answers.append(train_tasks[int(np.argmax(shared / norm))].solution.answer)
    verdicts = verify_all(eval_tasks, answers, sandbox=sandbox)
    return sum(verdict.score for verdict in verdicts if verdict.status == "score") / len(eval_tasks)


def fraction_of_space_seen(
    canonicals: Iterable[str], family: str, difficulty: Mapping[str, Any] | Difficulty | None = None
) -> float:
    """Distinct canonical tasks of a family among `canonicals`, as a share of all there are at this difficulty.

    Canonical forms of other families are not counted: each begins with the name of its family. Of the tasks that a data
    artifact lists this is an upper bound on what training saw: RL draws fewer of its prompts, and pretraining samples
    its sources by weight.
    """
    seen = {canonical for canonical in canonicals if canonical.startswith(f"{family}|")}
    return len(seen) / task_space_size(family, difficulty)
