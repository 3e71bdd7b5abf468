"""A generative reward model: what its text says of two responses, and what a group of responses earns by that.

The judge reads a prompt with two responses and writes `{"score_1": 4, "score_2": 2, "ranking": 1}`: how good each one
is, 1 to 5, and which one is better, from 1, the first by far, to 6, the second by far (tech report of Nemotron 3 Nano,
arXiv 2512.20848, section 3.2). Order and names are those of NeMo Gym's server `genrm_compare`; where it can be played,
ours differs: docs/architecture/environments.md lists how.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemotron.kit.chat import parse_response
from nemotron.kit.schemas.rl import GenRMRewardConfig

SCORES = ("score_1", "score_2")
BOUNDS = {"score_1": (1.0, 5.0), "score_2": (1.0, 5.0), "ranking": (1.0, 6.0)}
LOWEST_SCORE = 1.0
DEFAULT_SCORE, DEFAULT_RANKING = 3.0, 3.5
"""In the middle of both: what a comparison without a verdict counts."""
_DECODER = json.JSONDecoder()
_CODE = re.compile(r"```.*?```", re.DOTALL)
_STYLE = (
    re.compile(r"^[^\S\n]*#{1,6}\s", re.MULTILINE),  # headers
    re.compile(r"^[^\S\n]*(?:[-*+]|\d+\.)\s", re.MULTILINE),  # items of lists
    re.compile(r"\*\*[^*\n]+\*\*|__[^_\n]+__"),  # bold
    re.compile("[\U0001f1e6-\U0001f1ff\U0001f300-\U0001faff\u2600-\u27bf\u2b00-\u2bff\u24c2]"),  # emoji
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge says of two responses. well_formed: all three numbers were there and in their ranges."""

    score_1: float
    score_2: float
    ranking: float
    well_formed: bool = True

    def after_tie_break(self) -> tuple[float, float]:
        """The scores; where they are equal, apart by 2 (3.5 - ranking), in favour of the better one."""
        shift = 3.5 - self.ranking if self.score_1 == self.score_2 else 0.0
        return self.score_1 + shift, self.score_2 - shift


UNREADABLE = Judgement(DEFAULT_SCORE, DEFAULT_SCORE, DEFAULT_RANKING, well_formed=False)


def read_judgement(text: str) -> Judgement | None:
    """The last verdict in what a judge wrote after its reasoning; None where there is none.

    A verdict is a JSON object with at least one of the three numbers, or an object under its key `overall`. Numbers out
    of range are clamped and missing ones are the middle; either way the verdict is not well-formed. A value that is no
    finite number spoils the whole verdict: `true`, NaN and 1e400 are no scores.
    """
    last = None
    position = text.find("{")
    while position >= 0:
        try:
            record, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            last = _judgement_of(record) or last
        position = text.find("{", end)
    return last


def _judgement_of(record: dict[str, Any]) -> Judgement | None:
    if isinstance(record.get("overall"), dict):
        record = record["overall"]
    numbers = {name: _number(record[name]) for name in BOUNDS if name in record}
    if not numbers or any(math.isnan(number) for number in numbers.values()):
        return None
    clamped = {name: min(max(number, BOUNDS[name][0]), BOUNDS[name][1]) for name, number in numbers.items()}
    return Judgement(
        clamped.get("score_1", DEFAULT_SCORE),
        clamped.get("score_2", DEFAULT_SCORE),
        clamped.get("ranking", DEFAULT_RANKING),
        well_formed=clamped == numbers and len(numbers) == len(BOUNDS),
    )


def _number(value: object) -> float:
    """`value` as a finite number, as text too; NaN where it is none."""
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        return math.nan
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def judge_reward(predicted: Judgement | None, truth: Judgement, format_penalty: float, ranking_weight: float) -> float:
    """What a judge in training earns: -C1 I_format - |P_h1 - G_h1| - |P_h2 - G_h2| - C2 |P_r - G_r|.

    P is predicted and G the truth, h the helpfulness scores and r the ranking; I_format is 1 where the verdict is not
    well-formed. Without a verdict P is the middle, so that C1 = 10 makes any wrong verdict better than none.
    """
    judgement = predicted or UNREADABLE
    return (
        -format_penalty * (not judgement.well_formed)
        - abs(judgement.score_1 - truth.score_1)
        - abs(judgement.score_2 - truth.score_2)
        - ranking_weight * abs(judgement.ranking - truth.ranking)
    )


@dataclass(frozen=True, slots=True)
class Response:
    """A response in its two parts, without blanks around them."""

    reasoning: str
    answer: str

    @classmethod
    def of(cls, text: str) -> Response:
        """The parts of what a model wrote, `<think>` included (`parse_response`)."""
        reasoning, answer = parse_response(text)
        return cls(reasoning or "", answer)

    @property
    def forfeits(self) -> bool:
        """Whether no judge is asked: there is no answer, or the response names the scores of a verdict."""
        return not self.answer or any(name in part for name in SCORES for part in (self.reasoning, self.answer))


def circular_pairs(num_responses: int) -> list[tuple[int, int]]:
    """Each response beside the next one, the last beside the first: every one is judged twice, once in each place."""
    return [(index, (index + 1) % num_responses) for index in range(num_responses)]


def forfeit(first: Response, second: Response) -> Judgement | None:
    """The verdict where a response forfeits, without a judge: the lowest score for it, the middle for the other one."""
    if not first.forfeits and not second.forfeits:
        return None
    score_1, score_2 = (LOWEST_SCORE if response.forfeits else DEFAULT_SCORE for response in (first, second))
    return Judgement(score_1, score_2, DEFAULT_RANKING)


Match = tuple[int, int, Judgement | None]
"""The positions of two responses of a group, and what a judge said of them; None: nothing that can be read."""


def group_rewards(responses: Sequence[Response], matches: Sequence[Match], cfg: GenRMRewardConfig) -> list[float]:
    """The rewards of the responses to one prompt: base score, bonuses for being short, weights of lengths and style."""
    bases = base_scores(len(responses), matches)
    reasoning = [len(response.reasoning) for response in responses]
    answers = [len(response.answer) for response in responses]
    density = [style_density(response.answer) for response in responses]
    parts = [
        bases,
        bonuses(bases, reasoning, cfg.top_percentile, cfg.reasoning_bonus),
        bonuses(bases, answers, cfg.top_percentile, cfg.answer_bonus),
        centred_weights(reasoning, reasoning, cfg.group_reasoning_length_penalty_coeff),
        centred_weights(answers, answers, cfg.group_answer_length_penalty_coeff),
        centred_weights(density, answers, cfg.group_style_penalty_coeff),
    ]
    return [sum(of_response) for of_response in zip(*parts, strict=True)]


def base_scores(num_responses: int, matches: Sequence[Match]) -> list[float]:
    """The mean score of each response over its matches, ties broken by the ranking; the middle without a match."""
    scores: list[list[float]] = [[] for _ in range(num_responses)]
    for first, second, judgement in matches:
        for index, score in zip((first, second), (judgement or UNREADABLE).after_tie_break(), strict=True):
            scores[index].append(score)
    return [sum(of_matches) / len(of_matches) if of_matches else DEFAULT_SCORE for of_matches in scores]


def bonuses(bases: Sequence[float], lengths: Sequence[int], top_percentile: float, bonus: float) -> list[float]:
    """`bonus` for the shortest text of the group that is not empty, where its base score is among the best."""
    best_first = sorted(bases, reverse=True)
    threshold = best_first[max(0, int(len(bases) * top_percentile) - 1)]
    shortest = min((length for length in lengths if length), default=0)
    winner = lengths.index(shortest) if shortest else None
    return [bonus if index == winner and base >= threshold else 0.0 for index, base in enumerate(bases)]


def centred_weights(values: Sequence[float], lengths: Sequence[int], coefficient: float) -> list[float]:
    """`coefficient` for the smallest value to 0 for the largest, less the mean: their sum is 0.

    A text of length 0 counts in nothing and has the weight 0: who says nothing is not brief. So have all where the
    values are equal.
    """
    counted = [value for value, length in zip(values, lengths, strict=True) if length]
    low, high = min(counted, default=0.0), max(counted, default=0.0)
    if low == high:
        return [0.0] * len(values)
    mean = sum((high - value) / (high - low) for value in counted) / len(counted)
    return [
        coefficient * ((high - value) / (high - low) - mean) if length else 0.0
        for value, length in zip(values, lengths, strict=True)
    ]


def style_density(text: str) -> float:
    """Headers, items of lists, words in bold and emoji, by the characters of the text, code blocks left out."""
    prose = _CODE.sub("", text).strip()
    return sum(len(pattern.findall(prose)) for pattern in _STYLE) / len(prose) if prose else 0.0
