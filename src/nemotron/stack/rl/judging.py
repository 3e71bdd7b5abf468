"""A judge: a model that is asked to compare responses, what its verdicts earn, and how often they are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer

from nemotron.kit import chat
from nemotron.kit.schemas.rl import GenRMRewardConfig, JudgeConfig
from nemotron.stack.environments import Task, answer_of
from nemotron.stack.models import NemotronH
from nemotron.stack.models.decoding.generate import generate
from nemotron.stack.rl.comparisons import comparison, truth_of
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


def reward_of(task: Task, response: str, opened: bool | None, format_penalty: float, ranking_weight: float) -> float:
    """What a judge in training earns by its response to a comparison (`judge_reward`).

    `opened`: whether the prompt opens reasoning (`chat.opens_reasoning`).
    """
    return judge_reward(read_judgement(answer_of(response, opened)), truth_of(task), format_penalty, ranking_weight)


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
        return self._answer(self.encode(comparisons), seed, poll)

    def encode(self, comparisons: Sequence[Task]) -> list[list[int]]:
        """The prompts of comparisons in tokens."""
        texts = [
            chat.answer_prompt(
                [{"role": "user", "content": task.prompt}], thinking=self.cfg.enable_thinking, template=self.template
            )
            for task in comparisons
        ]
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def _answer(self, prompts: list[list[int]], seed: int, poll: Callable[[], None]) -> list[Judgement | None]:
        cfg = self.cfg
        fitting = [row for row, ids in enumerate(prompts) if len(ids) <= cfg.max_prompt_tokens]
        order = sorted(fitting, key=lambda row: (len(prompts[row]), row))
        judgements: list[Judgement | None] = [None] * len(prompts)
        opened = chat.template_opens_reasoning(self.template, cfg.enable_thinking)
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
                judgements[row] = read_judgement(answer_of(text, opened))
        return judgements

    def matches(
        self,
        groups: Sequence[tuple[Task, Sequence[Response], Sequence[tuple[int, int]]]],
        seed: int,
        poll: Callable[[], None] = lambda: None,
    ) -> tuple[list[list[Match]], dict[tuple[int, int], int]]:
        """The verdicts on pairs of responses to the same task, for each of `groups`: task, responses, pairs.

        A judge is not asked about a response that forfeits, nor, where its prompt would be too long, about that pair:
        the second value has the tokens of such prompts, by the positions of group and pair.
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
        prompts = self.encode(comparisons)
        judgements = dict(zip(asked, self._answer(prompts, seed, poll), strict=True))
        sizes = dict(zip(asked, map(len, prompts), strict=True))
        matches: list[list[Match]] = [
            [
                (i, j, judgements.get((group, position)) or forfeit(responses[i], responses[j]))
                for position, (i, j) in enumerate(pairs)
            ]
            for group, (_, responses, pairs) in enumerate(groups)
        ]
        return matches, {place: size for place, size in sizes.items() if size > self.cfg.max_prompt_tokens}


def judged_rewards(
    judge: Judge, groups: Sequence[tuple[Task, list[Response]]], cfg: GenRMRewardConfig, seed: int,
    poll: Callable[[], None] = lambda: None,
) -> tuple[list[list[float]], list[str], int]:  # fmt: skip
    """The rewards of several responses to each of several tasks, a line for each comparison without a verdict, and how
    many of these were too long to be asked about; their lines stand first."""
    asked = [(task, responses, circular_pairs(len(responses))) for task, responses in groups]
    of_groups, too_long = judge.matches(asked, seed, poll)
    unread = [
        f"{task.family}: the comparison of two responses to {task.prompt!r} has {size} tokens, "
        f"more than judge.max_prompt_tokens {judge.cfg.max_prompt_tokens}"
        for task, size in ((groups[group][0], size) for (group, _), size in too_long.items())
    ]
    unread += [
        f"{task.family}: no verdict on two responses to {task.prompt!r}"
        for group, ((task, _), matches) in enumerate(zip(groups, of_groups, strict=True))
        for position, (_, _, judgement) in enumerate(matches)
        if judgement is None and (group, position) not in too_long
    ]
    rewards = [
        group_rewards(responses, matches, cfg) for (_, responses), matches in zip(groups, of_groups, strict=True)
    ]
    return rewards, unread, len(too_long)


def wins(
    judge: Judge, pairs: Sequence[tuple[Task, Response, Response]], seed: int, poll: Callable[[], None] = lambda: None
) -> list[float]:
    """How often the first response wins, of each pair: 1, 0, or 0.5 for a tie, mean of both orders.

    Equal responses are a tie, and nobody is asked.
    """
    differing = [row for row, (_, first, second) in enumerate(pairs) if first != second]
    groups = [(pairs[row][0], pairs[row][1:], [(0, 1), (1, 0)]) for row in differing]
    results = [0.5] * len(pairs)
    for row, matches in zip(differing, judge.matches(groups, seed, poll)[0], strict=True):
        won = []
        for i, j, judgement in matches:
            scores = dict(zip((i, j), (judgement.after_tie_break() if judgement else (0.0, 0.0)), strict=True))
            won.append(0.5 + 0.5 * np.sign(scores[0] - scores[1]))
        results[row] = float(np.mean(won))
    return results
