"""What scores without understanding reach on the tasks of an evaluation, and what share of the task space was seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_runspec.errors import RunFailed
from nemotron.kit.metrics import Progress
from nemotron.kit.schemas.evaluation import ResponsesConfig
from nemotron.stack.environments import (
    FAMILIES,
    Task,
    best_constant_answer,
    fraction_of_space_seen,
    nearest_neighbour_lookup,
    task_space_size,
)


def score_baselines(
    tasks: Sequence[Task], seen: Sequence[Task], settings: ResponsesConfig, lookup_tasks: int
) -> dict[str, dict[str, Any]]:
    """Per family: the best constant answer, the nearest-neighbour look-up, and how much of the task space was seen.

    Args:
        tasks: of the evaluation.
        seen: that the training data list, duplicates included. Where a family has none, the last two are None. All of
            them count for `seen_fraction`, which is an upper bound: RL draws fewer of its prompts, and pretraining
            samples its sources by weight.
        settings: the difficulty of the tasks, and the sandbox of their checks.
        lookup_tasks: how many of the tasks seen the look-up knows, the last of each family.

    Raises:
        RunFailed: a task of the evaluation is among those seen.
    """
    baselines: dict[str, dict[str, Any]] = {}
    families = list(dict.fromkeys(task.family for task in tasks))
    progress = Progress(len(families), label="baselines")
    for family in families:
        held_out = [task for task in tasks if task.family == family]
        trained = [task for task in seen if task.family == family]
        canonicals = {task.canonical for task in trained}
        if leaked := sorted(canonicals & {task.canonical for task in held_out}):
            raise RunFailed(f"{len(leaked)} evaluation tasks of {family} are in the training data", leaked[0])
        is_generated, difficulty = family in FAMILIES, settings.difficulty.get(family)
        constant, known = best_constant_answer(held_out, settings.sandbox), trained[-lookup_tasks:]
        looked_up = nearest_neighbour_lookup(known, held_out, settings.sandbox) if lookup_tasks else 0.0
        seen_fraction = fraction_of_space_seen(canonicals, family, difficulty) if is_generated else None
        baselines[family] = {
            "constant": constant.score,
            "constant_answer": constant.answer,
            "task_space": task_space_size(family, difficulty) if is_generated else None,
            "nearest_neighbour": looked_up if trained else None,
            "seen_tasks": len(canonicals) or None,
            "seen_fraction": seen_fraction if trained else None,
        }
        progress.update(len(baselines))
    progress.close()
    return baselines
