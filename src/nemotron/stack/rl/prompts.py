"""Prompts of RL by environment family, drawn in a fixed ratio."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.kit.schemas.rl import CurriculumConfig
from nemotron.kit.schemas.sandbox import Sandbox
from nemotron.stack.environments import (
    Environment,
    Task,
    prompt_tools,
    runs_programs,
    tool_comparison,
    verifiable_families,
)
from nemotron.stack.environments.sandbox import sandbox_failure
from nemotron.stack.rl.curriculum import Curriculum
from nemotron.stack.training.checkpoint import Restored
from nemotron.stack.training.distributed import gather_bytes


class PromptSource:
    """Batches of tasks as a pure function of (seed, step), which is what makes a resumed run exact.

    Args:
        path: JSONL with a task record under `task` in each line, as `data prep rl` writes it.
        shares: family -> its share of a batch, relative.
        environments: those of the user's own, by the family of their tasks.

    Raises:
        UserError: a family of `shares` has no prompt, or its share of a batch rounds to none.
    """

    def __init__(
        self, path: Path, shares: Mapping[str, float], batch_size: int, seed: int,
        environments: Mapping[str, Environment] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.seed = seed
        self.pools = read_prompts(path, environments)
        for family in shares:
            if family not in self.pools:
                raise UserError(
                    f"env.families: {path} has no prompts of '{family}'", f"it has: {', '.join(sorted(self.pools))}"
                )
        edges = np.round(np.cumsum([0.0, *shares.values()]) / sum(shares.values()) * batch_size).astype(int)
        self.counts = dict(zip(shares, np.diff(edges).tolist(), strict=True))
        if none := [family for family, count in self.counts.items() if not count]:
            raise UserError(
                f"env.families: the share of '{none[0]}' rounds to none of {batch_size} prompts a step",
                "a larger share, or more prompts a step",
            )
        self.path = path
        self.curricula: dict[str, Curriculum] = {}

    def follow(self, settings: CurriculumConfig, num_steps: int) -> None:
        """From now on draw by pass rate, in a run of `num_steps`; UserError unless each prompt has a `pass_rate`."""
        rates: dict[str, list[float]] = {}
        with self.path.open(encoding="utf-8") as lines:
            for number, record in enumerate(map(json.loads, lines), start=1):
                if type(rate := record.get("pass_rate")) not in (int, float) or not 0 <= rate <= 1:
                    raise UserError(
                        f"data.curriculum: {self.path}:{number} has no pass_rate from 0 to 1",
                        "stage2_rl/data_prep_curriculum.py measures those of a model",
                    )
                rates.setdefault(record["task"]["family"], []).append(rate)
        for family, count in self.counts.items():
            curriculum = Curriculum(rates[family], count, num_steps, settings)
            if not curriculum.num_prompts:
                raise UserError(
                    f"data.curriculum.drop_pass_rate {settings.drop_pass_rate:g} leaves no prompt of '{family}'",
                    f"the lowest of its pass rates is {min(rates[family]):g}",
                )
            self.curricula[family] = curriculum

    def batch(self, step: int) -> list[Task]:
        """The prompts of a step: per family its share, walking through an order that is shuffled anew each epoch.

        Under a curriculum each pass rate has such an order of its own.
        """
        tasks = []
        for position, (family, count) in enumerate(self.counts.items()):
            pool = self.pools[family]
            if curriculum := self.curricula.get(family):
                draws = zip(curriculum.members, curriculum.draws[step], strict=True)
                for level, (members, (before, taken)) in enumerate(draws):
                    order = shuffled(len(members), range(before, before + taken), self.seed, position, level)
                    tasks += [pool[members[index]] for index in order]
            else:
                positions = range(step * count, (step + 1) * count)
                tasks += [pool[index] for index in shuffled(len(pool), positions, self.seed, position)]
        return tasks

    def pass_rate(self, step: int) -> dict[str, float]:
        """The metric `prompt_pass_rate`: mean pass rate of a step's prompts; nothing without a curriculum."""
        total = sum(curriculum.pass_rate(step) for curriculum in self.curricula.values())
        return {"prompt_pass_rate": total / sum(self.counts.values())} if self.curricula else {}

    def drawn(self, num_steps: int) -> list[Task]:
        """What the steps of a run draw, each prompt once."""
        return list({id(task): task for step in range(num_steps) for task in self.batch(step)}.values())

    def tasks(self) -> list[Task]:
        """All that a step may draw."""
        return [task for family in self.counts for task in self.pools[family]]

    def check_single_responses(self, reason: str) -> None:
        """UserError, which says the reason, where what answers a prompt may be several responses."""
        for task in self.tasks():
            if has_turns(task):
                raise UserError(
                    f"env.families: {task.family} has tasks of several turns; {reason}",
                    f"one of them is {task.prompt[:80]!r}",
                )

    def check_comparable(self) -> None:
        """UserError where no judge can compare what answers a prompt: several responses, or a call of a tool."""
        self.check_single_responses("a judge compares single responses")
        for task in self.tasks():
            if prompt_tools(task):
                raise UserError(
                    f"env.families: {task.family} has tasks whose answer is a call of a tool; a judge compares texts",
                    f"one of them is {task.prompt[:80]!r}",
                )


def has_turns(task: Task) -> bool:
    """Whether its environment may answer a response, so that another one follows."""
    if task.environment is not None:
        return getattr(task.environment, "open_episode", None) is not None
    return bool(prompt_tools(task)) and task.family != tool_comparison.FAMILY


def verifiable_shares(shares: Mapping[str, float], sandbox: Sandbox) -> dict[str, float]:
    """Those of `shares` (family -> its share of a batch) that every rank can verify, so that all draw the same prompts.

    All ranks call it together. UserError on all of them where no family remains.
    """
    failure = ""
    if runs_programs(shares):
        failures = [message.decode() for message in gather_bytes(sandbox_failure(sandbox).encode())]
        rank = next((rank for rank, message in enumerate(failures) if message), 0)
        failure = f"process {rank}: {failures[rank]}" if rank else failures[0]
    return {family: shares[family] for family in verifiable_families(shares, sandbox, failure)}


def check_same_families(restored: Restored | None, families: Sequence[str]) -> None:
    """UserError where the run that is resumed trained on other families, since the sandbox has come or gone since."""
    if restored and (before := restored.state["families"]) != list(families):
        raise UserError(
            f"the run that was stopped trains on {', '.join(before)}, and now {', '.join(families)} can be verified",
            "on a machine like that one it resumes; with --force it starts afresh",
        )


def shuffled(size: int, positions: range, *seed: int) -> list[int]:
    """Which of `size` items stand at `positions` of an endless walk through them, in an order of its own each epoch."""
    return [int(_order(size, *seed, position // size)[position % size]) for position in positions]


@lru_cache(maxsize=64)  # each step draws from the same ones, until an epoch ends
def _order(size: int, *seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(size)


def read_prompts(path: Path, environments: Mapping[str, Environment] = MappingProxyType({})) -> dict[str, list[Task]]:
    """The tasks of a prompt file by family, in file order; those of a family in `environments` belong to it."""
    by_family: dict[str, list[Task]] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            record = json.loads(line)
            if "task" not in record:
                raise UserError(
                    f"{path}:{number} has no task", "records of NeMo Gym are for train_nemo_rl.py; name other RLPrompts"
                )
            task = Task.from_dict(record["task"])
            environment = environments.get(task.family)
            by_family.setdefault(task.family, []).append(replace(task, environment=environment))
    return by_family


def encode_prompts(
    texts: Sequence[str], tokenizer: Tokenizer, *, max_new_tokens: int, max_length: int
) -> list[list[int]]:
    """Prompts in tokens; UserError where one of them and a whole response are longer than `max_length`."""
    prompts = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    longest = max(prompts, key=len, default=[])
    if len(longest) + max_new_tokens > max_length:
        raise UserError(
            f"policy.max_total_sequence_length {max_length} has no room for a prompt of {len(longest)} tokens and "
            f"{max_new_tokens} new ones (policy.generation.max_new_tokens)",
            f"the prompt begins {tokenizer.decode(longest)[:60]!r}",
        )
    return prompts
