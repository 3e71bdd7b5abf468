"""Comparisons of two responses to a task: what a judge is shown, what is right to say, and asking one.

A comparison is a `Task` itself, of the family of the task that was answered: its prompt shows both responses, its spec
holds the truth, and its solution is a demonstration from which a judge learns the form: solve the task, go through both
answers, then say which response is better.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.kit import chat
from nemotron.kit.schemas.rl import GenRMRewardConfig, JudgeConfig
from nemotron.stack.environments import Solution, Task, Verdict, answer_of, to_messages
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.rl.genrm import (
    Judgement,
    Match,
    Response,
    circular_pairs,
    forfeit,
    group_rewards,
    judge_reward,
    read_judgement,
)
from nemotron.stack.rl.rollouts import Rollout
from nemotron.stack.rl.shaping import Message

_SCORES_OF_RANKING = {1: (5, 1), 2: (4, 2), 3: (4, 3), 4: (3, 4), 5: (2, 4), 6: (1, 5)}
RIGHT, WRONG, UNUSABLE = 5, 2, 1
"""How good a verified response is: right, wrong, without an answer. A share of right is between the first two."""
_WORDS: dict[float, str] = {RIGHT: "right", WRONG: "wrong", UNUSABLE: "unusable"}


def preference(
    first: Response, second: Response, verdicts: tuple[Verdict, Verdict], finished: tuple[bool, bool]
) -> Judgement | None:
    """Which of two verified responses is better: the right one, then the one of less reasoning, then of less answer.

    Right over wrong is a ranking of 1 or 6, shorter over longer, among equally good ones, 3 or 4. None where neither is
    better, or a verdict is an error.
    """
    if any(verdict.status == "error" for verdict in verdicts):
        return None
    score_1, score_2 = (
        round(WRONG + (RIGHT - WRONG) * verdict.score) if ended and not response.forfeits else UNUSABLE
        for response, verdict, ended in zip((first, second), verdicts, finished, strict=True)
    )
    if score_1 != score_2:
        return Judgement(score_1, score_2, 1 if score_1 > score_2 else 6)
    size_1, size_2 = ((len(response.reasoning), len(response.answer)) for response in (first, second))
    if size_1 == size_2:
        return None
    return Judgement(score_1, score_2, 3 if size_1 < size_2 else 4)


def swapped(truth: Judgement) -> Judgement:
    """What is right to say with the two responses in the other order."""
    return Judgement(truth.score_2, truth.score_1, 7 - truth.ranking)


def comparison(task: Task, first: Response, second: Response, truth: Judgement | None, template: str) -> Task:
    """The comparison of two responses to `task`; without a `truth` it can only be asked, not be learned from.

    A response stands in the prompt as its answer, the characters that its reasoning has, and that. The demonstration
    solves the task, then repeats each answer with that number and says whether it is right: small models can copy what
    follows a `1:`. Where the task has no solution the demonstration is the verdict alone.
    """
    begun = [
        f"{number}: {chat.inert(response.answer, template)} ({len(response.reasoning)})"
        for number, response in enumerate((first, second), start=1)
    ]
    shown = [
        f"{beginning} {chat.inert(response.reasoning, template)}"
        for beginning, response in zip(begun, (first, second), strict=True)
    ]
    demonstration = Solution("", "")
    if truth is not None:
        numbers = {name: _whole(getattr(truth, name)) for name in ("score_1", "score_2", "ranking")}
        steps = []
        if task.solution.answer:
            steps.append(f"{task.solution.reasoning} => {task.solution.answer}")
            words = (_WORDS.get(score, "partly") for score in (truth.score_1, truth.score_2))
            steps += [f"{beginning} {word}" for beginning, word in zip(begun, words, strict=True)]
        demonstration = Solution("\n".join(steps), json.dumps(numbers))
    spec = {} if truth is None else asdict(truth)
    prompt = "\n".join((chat.inert(task.prompt, template), *shown, "Scores?"))
    return Task(task.family, prompt, task.canonical, spec, demonstration)


def first_comparison(
    task: Task, responses: Sequence[Response], verdicts: Sequence[Verdict], finished: Sequence[bool], template: str
) -> tuple[Task, Task] | None:
    """The comparison of the first two neighbours of which one is better, in both orders; None where no two are.

    A response that forfeits is compared with none: a judge is never asked about it.
    """
    for i, j in circular_pairs(len(responses)):
        first, second = responses[i], responses[j]
        truth = preference(first, second, (verdicts[i], verdicts[j]), (finished[i], finished[j]))
        if truth is not None and forfeit(first, second) is None:
            return (
                comparison(task, first, second, truth, template),
                comparison(task, second, first, swapped(truth), template),
            )
    return None


def demonstration(task: Task, tokenizer: Tokenizer, template: str, thinking: bool) -> Rollout:
    """The right verdict on a comparison, as if the judge had written it."""
    segments = chat.render_with_mask(to_messages(task, thinking), enable_thinking=thinking, template=template)
    ids: dict[bool, list[int]] = {True: [], False: []}
    for text, trained in segments:
        if not trained and ids[True]:
            break  # the line break after the turn
        ids[trained] += tokenizer.encode(text, add_special_tokens=False).ids
    size = len(ids[True])
    return Rollout(0, ids[False], ids[True], [0.0] * size, 0.0, False, 0.0, [Message(size, True)])


def count_preferred(comparisons: Sequence[Task], judgements: Sequence[Judgement | None]) -> dict[str, float]:
    """How many verdicts prefer what is better, of right over wrong and of short over long, and how many there are."""
    counts = dict.fromkeys(("right", "right_of", "short", "short_of", "well_formed"), 0.0)
    for task, judgement in zip(comparisons, judgements, strict=True):
        truth = truth_of(task)
        kind = "short" if truth.score_1 == truth.score_2 else "right"
        counts[f"{kind}_of"] += 1
        if judgement is not None:
            counts["well_formed"] += judgement.well_formed
            score_1, score_2 = judgement.after_tie_break()
            true_1, true_2 = truth.after_tie_break()
            counts[kind] += (score_1 - score_2) * (true_1 - true_2) > 0
    return counts


def preferred_rates(sums: Mapping[str, float]) -> dict[str, float]:
    """The shares in `sums`, which are what `count_preferred` counted, summed over all ranks.

    preferred: verdicts that prefer what is better; right_over_wrong and short_over_long: of the two kinds of
    comparisons. well_formed: verdicts with all numbers in their ranges.
    """
    total = sums["right_of"] + sums["short_of"]
    return {
        "preferred": (sums["right"] + sums["short"]) / max(total, 1),
        "right_over_wrong": sums["right"] / max(sums["right_of"], 1),
        "short_over_long": sums["short"] / max(sums["short_of"], 1),
        "well_formed": sums["well_formed"] / max(total, 1),
    }


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


def own_comparison(record: Mapping[str, Any], where: str, template: str) -> Task:
    """The comparison of a record: `prompt`, `response_1`, `response_2`, and which one is better.

    That is `ranking`, 1 to 6, with or without the scores `score_1` and `score_2`, 1 to 5; or `preference`, 1 or 2.
    UserError, with `where` the record stands: a key is missing, a number is out of range, or the scores say that one
    response is better and the ranking that the other one is.
    """
    for key in ("prompt", "response_1", "response_2"):
        if not isinstance(record.get(key), str) or not record[key].strip():
            raise UserError(f"{where}: {key!r} must be text", f"it has: {', '.join(map(str, record))}")
    preferred = record.get("preference")
    if "ranking" not in record and preferred not in (1, 2):
        raise UserError(f"{where}: needs a 'ranking', 1 to 6, or a 'preference', 1 or 2, not {preferred!r}")
    ranking = record.get("ranking", 2 if preferred == 1 else 5)
    if not isinstance(ranking, int) or isinstance(ranking, bool) or ranking not in _SCORES_OF_RANKING:
        raise UserError(f"{where}: 'ranking' is {ranking!r}, not a whole number from 1 to 6")
    scores = dict(zip(("score_1", "score_2"), _SCORES_OF_RANKING[ranking], strict=True))
    numbers = {**scores, **{key: record[key] for key in scores if key in record}, "ranking": ranking}
    truth = read_judgement(json.dumps(numbers))
    if truth is None or not truth.well_formed:
        raise UserError(f"{where}: scores go from 1 to 5, not {numbers['score_1']!r} and {numbers['score_2']!r}")
    if (truth.score_1 - truth.score_2) * (3.5 - truth.ranking) < 0:
        better = {True: "the first", False: "the second"}
        raise UserError(
            f"{where}: scores {truth.score_1:g} and {truth.score_2:g} prefer {better[truth.score_1 > truth.score_2]} "
            f"response, ranking {ranking} {better[ranking < 3.5]}"
        )
    first, second = (Response.of(record[key]) for key in ("response_1", "response_2"))
    task = Task("comparison", record["prompt"], where, {}, Solution("", ""))
    return comparison(task, first, second, truth, template)


def read_comparisons(paths: Sequence[Path], template: str) -> list[tuple[Task, Task]]:
    """The user's own comparisons, JSONL, each in both orders."""
    pairs = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() also cuts at U+2028, JSON does not
        except (OSError, UnicodeDecodeError) as failure:
            raise UserError(f"cannot read {path}: {failure}") from None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except ValueError as failure:
                raise UserError(f"{where}: not JSON: {failure}") from None
            if not isinstance(record, dict):
                raise UserError(f"{where}: must be an object")
            task = own_comparison(record, where, template)
            truth = swapped(truth_of(task))
            other = {**record, "response_1": record["response_2"], "response_2": record["response_1"]}
            names = ("score_1", "score_2", "ranking")
            other |= {name: _whole(getattr(truth, name)) for name in names}
            pairs.append((task, own_comparison(other, where, template)))
    return pairs


def truth_of(task: Task) -> Judgement:
    """What is right to say of a comparison."""
    return Judgement(**task.spec)


def reward_of(task: Task, response: str, thinking: bool, format_penalty: float, ranking_weight: float) -> float:
    """What a judge in training earns by its response to a comparison (`judge_reward`)."""
    return judge_reward(read_judgement(answer_of(response, thinking)), truth_of(task), format_penalty, ranking_weight)


class Judge:
    """A model that compares. Its `template` renders the comparisons, with reasoning on where `cfg` says so."""

    def __init__(self, model: NemotronH, tokenizer: Tokenizer, template: str, cfg: JudgeConfig) -> None:
        self.model, self.tokenizer, self.template, self.cfg = model, tokenizer, template, cfg
        stop = tokenizer.token_to_id(chat.load_template(template).stop or "")
        self.stop_ids = [] if stop is None else [stop]

    def say(
        self, comparisons: Sequence[Task], seed: int, poll: Callable[[], None] = lambda: None
    ) -> list[Judgement | None]:
        """The verdict on each comparison; None where there is none, or the prompt is too long.

        The same comparisons and seed give the same verdicts.
        """
        cfg = self.cfg
        texts = [
            chat.render(
                [{"role": "user", "content": task.prompt}], enable_thinking=cfg.enable_thinking,
                add_generation_prompt=True, template=self.template,
            )
            for task in comparisons
        ]  # fmt: skip
        prompts = [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]
        fitting = [row for row, ids in enumerate(prompts) if len(ids) <= cfg.max_prompt_tokens]
        order = sorted(fitting, key=lambda row: (len(prompts[row]), row))
        judgements: list[Judgement | None] = [None] * len(comparisons)
        device = self.model.lm_head.weight.device
        for start in range(0, len(order), cfg.batch_size):
            rows = order[start : start + cfg.batch_size]
            state = int(np.random.SeedSequence([seed, start]).generate_state(1)[0])
            out = generate(
                self.model, [prompts[row] for row in rows], cfg.max_new_tokens, cfg.temperature, cfg.top_p,
                self.stop_ids, torch.Generator(device=device).manual_seed(state), poll=poll,
            )  # fmt: skip
            for row, ids in zip(rows, out.tokens, strict=True):
                text = chat.response_of(self.tokenizer.decode(ids, skip_special_tokens=False), self.template)
                judgements[row] = read_judgement(answer_of(text, cfg.enable_thinking))
        return judgements

    def matches(
        self,
        groups: Sequence[tuple[Task, Sequence[Response], Sequence[tuple[int, int]]]],
        seed: int,
        poll: Callable[[], None] = lambda: None,
    ) -> list[list[Match]]:
        """The verdicts on pairs of responses to the same task, for each of `groups`: task, responses, pairs.

        A judge is not asked about a response that forfeits, nor, where its prompt would be too long, about that pair.
        """
        asked = [
            (group, position)
            for group, (_, responses, pairs) in enumerate(groups)
            for position, (i, j) in enumerate(pairs)
            if forfeit(responses[i], responses[j]) is None
        ]
        comparisons = []
        for group, position in asked:
            task, responses, pairs = groups[group]
            i, j = pairs[position]
            comparisons.append(comparison(task, responses[i], responses[j], None, self.template))
        judgements = dict(zip(asked, self.say(comparisons, seed, poll), strict=True))
        return [
            [
                (i, j, judgements.get((group, position)) or forfeit(responses[i], responses[j]))
                for position, (i, j) in enumerate(pairs)
            ]
            for group, (_, responses, pairs) in enumerate(groups)
        ]


def judged_rewards(
    judge: Judge, groups: Sequence[tuple[Task, list[Response]]], cfg: GenRMRewardConfig, seed: int,
    poll: Callable[[], None] = lambda: None,
) -> tuple[list[list[float]], list[str]]:  # fmt: skip
    """The rewards of several responses to each of several tasks, and a line for each comparison without a verdict."""
    asked = [(task, responses, circular_pairs(len(responses))) for task, responses in groups]
    of_groups = judge.matches(asked, seed, poll)
    unread = [
        f"{task.family}: no verdict on two responses to {task.prompt!r}"
        for (task, _), matches in zip(groups, of_groups, strict=True)
        for _, _, judgement in matches
        if judgement is None
    ]
    rewards = [
        group_rewards(responses, matches, cfg) for (_, responses), matches in zip(groups, of_groups, strict=True)
    ]
    return rewards, unread


def wins(judge: Judge, pairs: Sequence[tuple[Task, Response, Response]], seed: int) -> list[float]:
    """How often the first response wins, of each pair: 1, 0, or 0.5 for a tie, mean of both orders."""
    groups = [(task, [first, second], [(0, 1), (1, 0)]) for task, first, second in pairs]
    results = []
    for matches in judge.matches(groups, seed):
        won = []
        for i, j, judgement in matches:
            scores = dict(zip((i, j), (judgement.after_tie_break() if judgement else (0.0, 0.0)), strict=True))
            won.append(0.5 + 0.5 * np.sign(scores[0] - scores[1]))
        results.append(float(np.mean(won)))
    return results
