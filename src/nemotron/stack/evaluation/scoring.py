"""pass@1 of a model on verifiable tasks, greedy and sampled, with pass@k and majority@k of the samples.

The model is a callable, so everything here runs without one. Legend: T tasks, S samples a task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from nemo_runspec.errors import RunFailed
from nemotron.kit import chat
from nemotron.kit.schemas.sandbox import Sandbox
from nemotron.stack.environments import (
    Episode,
    Task,
    Verdict,
    answer_of,
    open_episode,
    plain_answer,
    plain_prompt,
    prompt_messages,
    prompt_tools,
    verify_all,
)
from nemotron.stack.evaluation.intervals import (
    Interval,
    bootstrap_interval,
    mean_interval,
    wilson_interval,
)
from nemotron.stack.evaluation.pass_at_k import ks_of, majority_at_k, pass_at_k
from nemotron.stack.evaluation.votes import has_votes, vote_of

_VERIFIED_TOGETHER = 64  # responses between two looks for a signal; programs among them run side by side


@dataclass(frozen=True, slots=True)
class Completion:
    """What a model generated for one prompt.

    text: special tokens kept, without the token that ended it. num_tokens: generated, that token included. entropy: of
    the model's distribution over the next token, nats, mean over these tokens. finished: ended by itself. verdict: of
    the episode that it was generated in, if any. called: names of the tools that it calls.
    """

    text: str
    num_tokens: int
    entropy: float
    finished: bool
    verdict: Verdict | None = None
    called: tuple[str, ...] = ()


class GenerateFn(Protocol):
    """Generates `samples` completions a prompt, those of one prompt together, prompts in order.

    `temperature` 0 is greedy; the same seed gives the same text. With `begin`, which opens an episode of the task of a
    prompt, by its position, if it has one, a completion has as many turns as the episode, and its verdict.
    """

    def __call__(
        self,
        prompts: Sequence[str],
        *,
        temperature: float,
        seed: int,
        samples: int = 1,
        begin: Callable[[int], Episode | None] | None = None,
    ) -> list[Completion]: ...


@dataclass(frozen=True)
class Evaluation:
    """Scores of one model on a list of tasks. `greedy_T` and `sampled_TS` hold 1, 0, or nan for a verifier error.

    `opened`: of each task, whether its prompt opens reasoning (`chat.opens_reasoning`). `errors`: of each response
    without a verdict, its family and why.
    """

    tasks: list[Task]
    prompt_format: Literal["chat", "chat_no_think", "plain"]
    greedy_T: np.ndarray
    sampled_TS: np.ndarray
    greedy_completions: list[Completion]
    sampled_completions: list[list[Completion]]
    opened: list[bool | None]
    errors: list[str]

    @property
    def families(self) -> list[str]:
        """The families of the tasks, in order of first appearance."""
        return list(dict.fromkeys(task.family for task in self.tasks))

    def rows(self, family: str) -> np.ndarray:
        """Positions of the tasks of a family."""
        return np.array([i for i, task in enumerate(self.tasks) if task.family == family], dtype=np.int64)

    def strata(self, which: Literal["greedy", "sampled"]) -> list[np.ndarray]:
        """Per family, the score of each task: greedy, or the mean over its samples."""
        if which == "greedy":
            return [self.greedy_T[self.rows(family)] for family in self.families]
        return [self.sampled_means()[self.rows(family)] for family in self.families]

    def sampled_means(self) -> np.ndarray:
        """[T]: the mean score of the samples of each task that have a verdict; nan where none has."""
        return _mean_over_samples(self.sampled_TS)

    def greedy(self, family: str) -> Interval:
        """Greedy pass@1 of a family, over tasks with a verdict: Wilson interval; bootstrap where scores are partial."""
        scores = self.greedy_T[self.rows(family)]
        scores = scores[~np.isnan(scores)]
        if not np.isin(scores, (0.0, 1.0)).all():
            return bootstrap_interval([scores])
        return wilson_interval(int(scores.sum()), len(scores))

    def sampled(self, family: str) -> Interval:
        """Sampled pass@1 of a family (mean over tasks of the mean over samples), tasks bootstrapped."""
        return mean_interval([_mean_over_samples(self.sampled_TS[self.rows(family)])])

    def pass_at(self, k: int, families: Sequence[str]) -> Interval:
        """pass@k: mean over the families of the mean over their tasks, which are bootstrapped."""
        strata = [self.sampled_TS[self.rows(family)] for family in families]
        return mean_interval([np.array([pass_at_k(scores, k) for scores in scores_TS]) for scores_TS in strata])

    def majority_at(self, k: int, family: str) -> Interval | None:
        """majority@k of a family, as `pass_at`; None where answers cannot be compared with one another (`votes`)."""
        rows = self.rows(family)
        if not all(has_votes(self.tasks[row]) for row in rows):
            return None
        values = []
        for row in rows:
            answers = [self._answer(row, completion.text) for completion in self.sampled_completions[row]]
            votes = [vote_of(self.tasks[row], answer) for answer in answers]
            values.append(majority_at_k(votes, self.sampled_TS[row], k))
        return mean_interval([np.array(values)])

    def _answer(self, row: int, response: str) -> str:
        if self.prompt_format == "plain":
            return plain_answer(response, self.tasks[row].family)
        return answer_of(response, self.opened[row])

    def mean(self, which: Literal["greedy", "sampled"]) -> Interval:
        """Mean over the families of pass@1, each family weighing the same, tasks bootstrapped within families."""
        return mean_interval(self.strata(which))

    def entropy(self, family: str | None = None) -> float:
        """Entropy of the policy, nats a token, mean over all sampled tokens; nan without samples."""
        rows = range(len(self.tasks)) if family is None else self.rows(family)
        sampled = [completion for row in rows for completion in self.sampled_completions[row]]
        tokens = sum(completion.num_tokens for completion in sampled)
        return (
            sum(completion.entropy * completion.num_tokens for completion in sampled) / tokens if tokens else math.nan
        )

    def hallucinated_tool(self, family: str | None = None) -> Interval:
        """Share of the responses, greedy and sampled, that call a tool which their prompt does not declare.

        The mean over tasks of the mean over their responses, tasks bootstrapped.
        """
        shares = []
        for row in range(len(self.tasks)) if family is None else self.rows(family):
            declared = {chat.function_of(tool)["name"] for tool in prompt_tools(self.tasks[row])}
            responses = [self.greedy_completions[row], *self.sampled_completions[row]]
            shares.append(sum(not declared.issuperset(response.called) for response in responses) / len(responses))
        return mean_interval([np.array(shares)])

    def error_rate(self) -> float:
        """Share of all responses that the verifiers could not decide."""
        scores = np.concatenate([self.greedy_T, self.sampled_TS.ravel()])
        return float(np.isnan(scores).mean()) if scores.size else 0.0

    def counts(self, families: Sequence[str]) -> dict[tuple[str, str, str], float]:
        """How many responses were right and how many have a verdict, which add up over parts of a list of tasks.

        Keys: `greedy` or `sampled`, the family, `right` or `scored`; all of them, for a family without tasks as well.
        """
        counts = {}
        for family in families:
            rows = self.rows(family)
            for which, scores in (("greedy", self.greedy_T[rows]), ("sampled", self.sampled_TS[rows])):
                counts[which, family, "right"] = float(np.nansum(scores))
                counts[which, family, "scored"] = float((~np.isnan(scores)).sum())
        return counts

    def metrics(self) -> dict[str, Any]:
        """Everything above as plain JSON, as it goes into the Results artifact: a mean and one entry a family."""
        report: dict[str, Any] = {
            "prompt_format": self.prompt_format,
            "samples": int(self.sampled_TS.shape[1]),
            "verifier_errors": self.error_rate(),
            "mean": self._entry(self.mean("greedy"), self.mean("sampled"), None),
            "families": {
                family: self._entry(self.greedy(family), self.sampled(family), family) for family in self.families
            },
        }
        return report

    def _entry(self, greedy: Interval, sampled: Interval, family: str | None) -> dict[str, Any]:
        rows = np.arange(len(self.tasks)) if family is None else self.rows(family)
        greedy_completions = [self.greedy_completions[row] for row in rows]
        entry: dict[str, Any] = {"tasks": len(rows), "greedy": greedy.estimate, "greedy_95": [greedy.low, greedy.high]}
        if self.sampled_TS.shape[1]:
            entry |= {"sampled": sampled.estimate, "sampled_95": [sampled.low, sampled.high]}
            entry["entropy_nats_per_token"] = self.entropy(family)
        if ks := ks_of(self.sampled_TS.shape[1]):
            entry |= _by_k("pass_at_k", {k: self.pass_at(k, [family] if family else self.families) for k in ks})
            entry |= _by_k("majority_at_k", {k: self.majority_at(k, family) if family else None for k in ks})
        entry["greedy_tokens"] = sum(completion.num_tokens for completion in greedy_completions) / max(1, len(rows))
        hallucinated = self.hallucinated_tool(family)
        entry |= {
            "hallucinated_tool": hallucinated.estimate,
            "hallucinated_tool_95": [hallucinated.low, hallucinated.high],
        }
        entry["greedy_finished"] = sum(completion.finished for completion in greedy_completions) / max(1, len(rows))
        return entry

    def generations(self, per_family: int) -> list[dict[str, Any]]:
        """The first tasks of each family with what the model wrote, for the reader: one record a task."""
        records = []
        for family in self.families:
            for row in self.rows(family)[:per_family]:
                task = self.tasks[row]
                record = {
                    "family": family,
                    "prompt": task.prompt,
                    "demonstration": task.solution.answer,
                    "greedy": self.greedy_completions[row].text,
                    "greedy_right": bool(self.greedy_T[row] == 1),
                }
                if self.sampled_TS.shape[1]:
                    record |= {
                        "sampled": self.sampled_completions[row][0].text,
                        "sampled_right": bool(self.sampled_TS[row, 0] == 1),
                    }
                records.append(record)
        return records


def _by_k(name: str, intervals: Mapping[int, Interval | None]) -> dict[str, Any]:
    """The estimates by k, and their intervals; nothing where there are none."""
    known = {str(k): interval for k, interval in intervals.items() if interval is not None}
    estimates = {k: interval.estimate for k, interval in known.items()}
    return {name: estimates, f"{name}_95": {k: [i.low, i.high] for k, i in known.items()}} if known else {}


def _mean_over_samples(scores_TS: np.ndarray) -> np.ndarray:
    """[T]: mean over the samples that have a verdict; nan where none has."""
    counted = ~np.isnan(scores_TS)
    total = np.where(counted, scores_TS, 0.0).sum(axis=1)
    with np.errstate(invalid="ignore"):
        mean: np.ndarray = total / counted.sum(axis=1)
    return mean


def prompt_text(task: Task, template: str | None, thinking: bool = True) -> str:
    """The prompt of a task: under a chat template, or plain for a model without one.

    `thinking`: with reasoning on, or off where the template has the switch.
    """
    if template is None:
        return plain_prompt(task)
    return chat.answer_prompt(
        prompt_messages(task), tools=prompt_tools(task) or None, thinking=thinking, template=template
    )


def _verdicts(
    attempts: Sequence[tuple[Task, Completion, bool | None]], template: str | None, sandbox: Sandbox
) -> list[Verdict]:
    """Of each attempt at a task, whose prompt opens reasoning or not, in their order; those of episodes have theirs."""
    tasks, texts = list[Task](), list[str]()
    for task, completion, opened in attempts:
        if completion.verdict is None:
            tasks.append(task)
            written = f"{chat.THINK}{completion.text}" if opened else completion.text
            texts.append(plain_answer(completion.text, task.family) if template is None else written)
    verified = iter(verify_all(tasks, texts, None, sandbox))
    return [completion.verdict or next(verified) for _, completion, _ in attempts]


def _format_of(
    template: str | None, thinking: bool, opened: Sequence[bool | None]
) -> Literal["chat", "chat_no_think", "plain"]:
    """How tasks are asked: in a chat, without reasoning where the prompts say so, or in plain text."""
    if template is None:
        return "plain"
    left_open = None in opened and chat.thinks(template, thinking)
    return "chat" if True in opened or left_open else "chat_no_think"


def evaluate_tasks(
    generate_fn: GenerateFn,
    tasks: Sequence[Task],
    *,
    template: str | None,
    thinking: bool = True,
    samples: int = 4,
    seed: int = 0,
    max_error_rate: float = 0.01,
    sandbox: Sandbox = "bubblewrap",
    with_greedy: bool = True,
    poll: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Generate and verify one greedy response a task, and `samples` sampled ones at temperature 1.

    Tasks with tools are episodes: the model is shown the results of its calls and goes on. So are those of the user's
    own environments, whose verdicts are then waited for together.

    Args:
        template: the chat template that the model was trained with; None: the document format of pretraining.
        thinking: reasoning on, or off where the template has the switch. Whether a response begins inside of
            reasoning is seen in its prompt.
        samples: sampled responses a task; 0 evaluates greedily only.
        max_error_rate: a larger share of responses that no verifier could decide raises RunFailed: then the scores
            would be those of another set of tasks.
        sandbox: where programs are run.
        with_greedy: False: sampled responses alone; `greedy_T` and `greedy_completions` are then empty.
        poll: called before the verdicts of each few tasks, which may take long; raises to stop.

    Returns:
        the scores, with all completions.
    """
    prompts = [prompt_text(task, template, thinking) for task in tasks]
    opened = [None if template is None else chat.opens_reasoning(prompt) for prompt in prompts]
    if template is not None and any(task.environment or prompt_tools(task) for task in tasks):
        generate_fn = partial(
            generate_fn, begin=lambda position: open_episode(tasks[position], opened[position], sandbox)
        )
    greedy = generate_fn(prompts, temperature=0.0, seed=seed) if with_greedy else []
    flat = generate_fn(prompts, temperature=1.0, seed=seed, samples=samples) if samples else []
    sampled = [flat[i * samples : (i + 1) * samples] for i in range(len(tasks))]
    attempts = [
        (task, completion, opens)
        for row, (task, several, opens) in enumerate(zip(tasks, sampled, opened, strict=True))
        for completion in (*greedy[row : row + 1], *several)
    ]
    verdicts: list[Verdict] = []
    for start in range(0, len(attempts), _VERIFIED_TOGETHER):
        poll()
        verdicts += _verdicts(attempts[start : start + _VERIFIED_TOGETHER], template, sandbox)
    scores_TS = np.array([verdict.score for verdict in verdicts], dtype=float)
    scores_TS = scores_TS.reshape(len(tasks), with_greedy + samples)
    greedy_T, sampled_TS = scores_TS[:, :with_greedy].ravel(), scores_TS[:, with_greedy:]
    prompt_format = _format_of(template, thinking, opened)
    errors = [
        f"{task.family}: {verdict.reason}"
        for (task, _, _), verdict in zip(attempts, verdicts, strict=True)
        if verdict.status == "error"
    ]
    evaluation = Evaluation(list(tasks), prompt_format, greedy_T, sampled_TS, greedy, sampled, opened, errors)
    if evaluation.error_rate() > max_error_rate:
        raise RunFailed(
            f"{evaluation.error_rate():.1%} of the responses could not be verified, more than max_error_rate "
            f"{max_error_rate:g} allows",
            f"first: {errors[0]}",
        )
    return evaluation
