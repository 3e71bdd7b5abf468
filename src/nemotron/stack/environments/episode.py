"""A task being worked on: responses go in, what the environment answers comes out, and at the end a verdict."""

from __future__ import annotations

from typing import Any, Protocol

from nemotron.kit.schemas.sandbox import Sandbox
from nemotron.stack.environments import calculator, math
from nemotron.stack.environments.own import OwnEpisode
from nemotron.stack.environments.repository_repair import FAMILY as REPOSITORY_REPAIR
from nemotron.stack.environments.repository_repair import RepairEpisode
from nemotron.stack.environments.task import Task, Verdict
from nemotron.stack.environments.tool_comparison import FAMILY as TOOL_COMPARISON
from nemotron.stack.environments.tool_comparison import ComparisonEpisode
from nemotron.stack.environments.workplace_assistant import FAMILY as WORKPLACE_ASSISTANT
from nemotron.stack.environments.workplace_assistant import WorkplaceEpisode


class Episode(Protocol):
    """One attempt at one task. `tools`: what the prompt declares, as chat templates take them. `has_turns`: whether a
    response may be answered."""

    tools: list[dict[str, Any]]
    has_turns: bool

    def respond(self, response: str) -> list[dict[str, Any]] | None:
        """What the environment answers to a response: messages of the role `tool`; None ends the episode.

        `response`: what the model wrote after the generation prompt, without the token that ended its turn.
        """

    def verdict(self) -> Verdict:
        """What the attempt is worth as it stands now."""


def open_episode(task: Task, thinking: bool | None = None, sandbox: Sandbox = "bubblewrap") -> Episode | None:
    """An attempt at `task`; None where one response is verified as it is, which is what most families do.

    `thinking`: whether the generation prompt opens `<think>` (`answer_of`). `sandbox`: where programs are run.
    """
    if task.environment is not None:
        return OwnEpisode(task, task.environment, thinking)
    if task.family == WORKPLACE_ASSISTANT:
        return WorkplaceEpisode(task, thinking)
    if task.family == TOOL_COMPARISON:
        return ComparisonEpisode(task, thinking)
    if task.family == REPOSITORY_REPAIR:
        return RepairEpisode(task, thinking, sandbox)
    if task.family == math.FAMILY and calculator.tools(task.spec):
        return calculator.CalculatorEpisode(task, thinking)
    return None
