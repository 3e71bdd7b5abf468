"""Comparisons of two responses to a task: what a judge is shown, and what is right to say.

A comparison is a `Task` itself, of the family of the task that was answered: its prompt holds both answers, its spec
the truth, and its solution is a demonstration from which a judge learns the form: solve the task, say which answer
agrees with that, then give the scores.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash
from tokenizers import Tokenizer

from nemo_runspec.errors import UserError
from nemotron.kit import chat
from nemotron.kit.jsonl import read_own_jsonl
from nemotron.kit.schemas.sandbox import Sandbox
from nemotron.stack.environments import Solution, Task, Verdict, to_messages, verify_all
from nemotron.stack.rl.genrm import Judgement, Response, circular_pairs, forfeit, read_judgement
from nemotron.stack.rl.rollouts import Rollout
from nemotron.stack.rl.shaping import Message

_SCORES_OF_RANKING = {1: (5, 1), 2: (4, 2), 3: (4, 3), 4: (3, 4), 5: (2, 4), 6: (1, 5)}
RIGHT, WRONG, UNUSABLE = 5, 2, 1
"""How good a verified response is: right, wrong, without an answer. A share of right is between the first two."""
_WORD = re.compile(r"\d|[^\W\d_]+")
_WORD_OR_SIGN = re.compile(rf"{_WORD.pattern}|[^\w\s]|_")  # everything but whitespace
_WORDS_NAMED = 4
_SPOILED, _RESPACED = 0.7, 0.15  # of the comparisons that a program makes; in the others both answers are equal


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
    size_1, size_2 = lengths(first), lengths(second)
    if size_1 == size_2:
        return None
    return Judgement(score_1, score_2, 3 if size_1 < size_2 else 4)


def lengths(response: Response) -> tuple[int, int]:
    """Characters of the reasoning and of the answer; the first number decides which of two responses is shorter."""
    return len(response.reasoning), len(response.answer)


def swapped(truth: Judgement) -> Judgement:
    """What is right to say with the two responses in the other order."""
    return Judgement(truth.score_2, truth.score_1, 7 - truth.ranking)


def parted(first: str, second: str) -> tuple[str, str, str, str]:
    """What two texts begin with, what each has then, and what both end with.

    Compared by words, digits and signs. Each text is its part between the common ones but for whitespace, of which the
    common parts have that of the first text. Where only whitespace differs, nothing is common.
    """
    words_1, words_2 = list(_WORD_OR_SIGN.finditer(first)), list(_WORD_OR_SIGN.finditer(second))
    names_1, names_2 = [word[0] for word in words_1], [word[0] for word in words_2]
    if names_1 == names_2:
        return ("", first, second, "") if first != second else (first, "", "", "")
    shorter = min(len(names_1), len(names_2))
    begin = next((i for i in range(shorter) if names_1[i] != names_2[i]), shorter)
    end = next((i for i in range(shorter - begin) if names_1[-1 - i] != names_2[-1 - i]), shorter - begin)

    def between(text: str, words: list[re.Match[str]]) -> tuple[int, int]:
        if begin + end < len(words):
            return words[begin].start(), words[len(words) - 1 - end].end()
        start = words[begin - 1].end() if begin else 0  # no word of its own, but perhaps whitespace
        return start, start if end else len(text)

    (start_1, end_1), (start_2, end_2) = between(first, words_1), between(second, words_2)
    return first[:start_1], first[start_1:end_1], second[start_2:end_2], first[end_1:]


def same_words(first: str, second: str) -> bool:
    """Whether two texts are equal but for whitespace."""
    return _WORD_OR_SIGN.findall(first) == _WORD_OR_SIGN.findall(second)


def comparison(task: Task, first: Response, second: Response, truth: Judgement | None, template: str) -> Task:
    """The comparison of two responses to `task`; without a `truth` it can only be asked, not be learned from.

    The prompt shows what both answers share once, and beside it A and B, in which they differ (`parted`); then which
    response is the shorter one: a small model finds differences, and counts no characters. The demonstration reasons as
    a right response did, or as the task's solution, and names the answer that is right, with its first words if the two
    differ in words. Where the task has no solution the demonstration is the verdict alone.
    """
    begin, part_1, part_2, end = parted(first.answer, second.answer)
    size_1, size_2 = lengths(first), lengths(second)
    shorter = "neither" if size_1 == size_2 else "A" if size_1 < size_2 else "B"
    shown = f"{begin}_{end} A) {part_1} B) {part_2}", f"Shorter: {shorter}"
    prompt = "\n".join(chat.inert(text, template) for text in (task.prompt, *shown))
    if truth is None:
        return Task(task.family, prompt, task.canonical, {}, Solution("", ""))
    numbers = {name: _whole(getattr(truth, name)) for name in ("score_1", "score_2", "ranking")}
    reasoning = ""
    if task.solution.answer:
        sides = [("A", part_1, first, truth.score_1), ("B", part_2, second, truth.score_2)]
        good = sorted((side for side in sides if side[3] > WRONG), key=lambda side: (-side[3], lengths(side[2])))
        reasoning, named = task.solution.reasoning, "none"
        if good:
            _, part, response, _ = good[0]
            words = "" if same_words(part_1, part_2) else _first_words(part)
            named = f"{words} {' '.join(side[0] for side in good)}".strip()
            if not same_words(response.answer, task.solution.answer):
                reasoning = response.reasoning
        reasoning = f"{reasoning} => {named}"
    demonstration = Solution(chat.inert(reasoning, template), json.dumps(numbers))
    return Task(task.family, prompt, task.canonical, asdict(truth), demonstration)


def _first_words(text: str) -> str:
    words = list(_WORD.finditer(text))[:_WORDS_NAMED]
    return text[: words[-1].end()] if words else text.strip()


def first_comparison(
    task: Task, responses: Sequence[Response], verdicts: Sequence[Verdict], finished: Sequence[bool], template: str
) -> tuple[Task, Task] | None:
    """The comparison of the first two neighbours of which one is better, in both orders; None where no two are.

    Right over wrong comes before short over long. A response that forfeits is compared with none: a judge is never
    asked about it.
    """
    chosen: tuple[int, int, Judgement] | None = None
    for i, j in circular_pairs(len(responses)):
        truth = preference(responses[i], responses[j], (verdicts[i], verdicts[j]), (finished[i], finished[j]))
        if truth is None or forfeit(responses[i], responses[j]) is not None:
            continue
        if chosen is None or (chosen[2].score_1 == chosen[2].score_2 and truth.score_1 != truth.score_2):
            chosen = i, j, truth
    if chosen is None:
        return None
    i, j, truth = chosen
    return both_orders(task, responses[i], responses[j], truth, template)


def both_orders(task: Task, first: Response, second: Response, truth: Judgement, template: str) -> tuple[Task, Task]:
    """The comparison, and that of the two responses in the other order."""
    return comparison(task, first, second, truth, template), comparison(task, second, first, swapped(truth), template)


def made_comparisons(tasks: Sequence[Task], seed: int, template: str, sandbox: Sandbox) -> list[Task]:
    """A comparison of each task's demonstration with what a program made of it (`made_responses`), in either order.

    Demonstrations in the short style, which a small model imitates badly, are left out.
    """
    rng, comparisons = random.Random(seed), []
    for task in tasks:
        if task.solution.style == "short":
            continue
        other = rng.choice([other for other in tasks if other.family == task.family])
        first, second = made_responses(task, other, rng)
        right, made = verify_all([task, task], [first.answer, second.answer], False, sandbox)
        truth = preference(first, second, (right, made), (True, True))
        equally_good = truth is not None and truth.score_1 == truth.score_2
        if equally_good and not same_words(first.answer, second.answer):
            continue  # the demonstration would copy the reasoning of the made one, perhaps that of another task
        if truth is not None:
            comparisons.append(rng.choice(both_orders(task, first, second, truth, template)))
    return comparisons


def made_responses(task: Task, other: Task, rng: random.Random) -> tuple[Response, Response]:
    """A response with the right answer, and one in which, mostly, a program replaced a word or digit of it, or spaces.

    Whether that is still right is not known. One of them, no matter which, has the reasoning of `other`, a task of the
    same family: the judge sees no more of it than which one is shorter.
    """
    right = task.solution.answer
    kind, made = rng.random(), right
    if kind < _SPOILED:
        made = spoiled(right, f"{task.prompt} {other.prompt}", rng)
    elif kind < _SPOILED + _RESPACED:
        made = respaced(right)
    reasoning = [task.solution.reasoning, other.solution.reasoning]
    rng.shuffle(reasoning)  # which one is shorter must say nothing of which one is right
    return Response(reasoning[0], right), Response(reasoning[1], made)


def spoiled(answer: str, text: str, rng: random.Random) -> str:
    """`answer` with another digit in place of one of its own, or a word of `text` in place of one of its own."""
    words = list(_WORD.finditer(answer))
    if not words:
        return answer
    word = rng.choice(words)
    if word[0].isdigit():
        choices = [digit for digit in "0123456789" if digit != word[0]]
    else:  # letters stay letters: the options of a multiple choice
        alike = [name for name in _WORD.findall(text) if (len(name) == 1) == (len(word[0]) == 1)]
        choices = [name.upper() if word[0].isupper() else name for name in alike if not name.isdigit()]
        choices = [name for name in choices if name != word[0]]
    return answer[: word.start()] + (rng.choice(choices) if choices else word[0]) + answer[word.end() :]


def respaced(answer: str) -> str:
    """`answer` without blanks behind its colons and commas, or with them where it has none: JSON may have either."""
    dense = re.sub(r"([:,]) +", r"\1", answer)
    return dense if dense != answer else re.sub(r"([:,])(?=\S)", r"\1 ", answer)


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


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


def own_comparison(record: Mapping[str, Any], where: str, template: str) -> Task:
    """The comparison of a record: `prompt`, `response_1`, `response_2`, and which one is better.

    That is `ranking`, 1 to 6, with or without the scores `score_1` and `score_2`, 1 to 5; or `preference`, 1 or 2.
    UserError, with `where` the record stands: a key is missing, a number is out of range, or the scores or the
    preference say that one response is better and the ranking that the other one is.
    """
    for key in ("prompt", "response_1", "response_2"):
        if not isinstance(record.get(key), str) or not record[key].strip():
            raise UserError(f"{where}: {key!r} must be text", f"it has: {', '.join(map(str, record))}")
    preferred = record.get("preference")
    is_preference = preferred in (1, 2) and not isinstance(preferred, bool)
    if "ranking" not in record and not is_preference:
        raise UserError(f"{where}: needs a 'ranking', 1 to 6, or a 'preference', 1 or 2, not {preferred!r}")
    ranking = record.get("ranking", 2 if preferred == 1 else 5)
    if not isinstance(ranking, int) or isinstance(ranking, bool) or ranking not in _SCORES_OF_RANKING:
        raise UserError(f"{where}: 'ranking' is {ranking!r}, not a whole number from 1 to 6")
    better = {True: "the first", False: "the second"}
    if is_preference and (preferred == 1) != (ranking < 3.5):
        raise UserError(
            f"{where}: preference {preferred} is {better[preferred == 1]} response, ranking {ranking} "
            f"{better[ranking < 3.5]}"
        )
    scores = dict(zip(("score_1", "score_2"), _SCORES_OF_RANKING[ranking], strict=True))
    numbers = {**scores, **{key: record[key] for key in scores if key in record}, "ranking": ranking}
    truth = read_judgement(json.dumps(numbers))
    if truth is None or not truth.well_formed:
        raise UserError(f"{where}: scores go from 1 to 5, not {numbers['score_1']!r} and {numbers['score_2']!r}")
    if (truth.score_1 - truth.score_2) * (3.5 - truth.ranking) < 0:
        raise UserError(
            f"{where}: scores {truth.score_1:g} and {truth.score_2:g} prefer {better[truth.score_1 > truth.score_2]} "
            f"response, ranking {ranking} {better[ranking < 3.5]}"
        )
    first, second = (Response.of(record[key]) for key in ("response_1", "response_2"))
    canonical = " ".join(record["prompt"].casefold().split())
    task = Task("comparison", record["prompt"], canonical, {}, Solution("", ""))
    return comparison(task, first, second, truth, template)


def read_comparisons(paths: Sequence[Path], template: str) -> list[tuple[Task, Task]]:
    """The user's own comparisons, JSONL, each in both orders."""
    pairs = []
    for path in paths:
        for where, record in read_own_jsonl(path):
            task = own_comparison(record, where, template)
            truth = swapped(truth_of(task))
            other = {**record, "response_1": record["response_2"], "response_2": record["response_1"]}
            names = ("score_1", "score_2", "ranking")
            other |= {name: _whole(getattr(truth, name)) for name in names} | {"preference": None}
            pairs.append((task, own_comparison(other, where, template)))
    return pairs


def truth_of(task: Task) -> Judgement:
    """What is right to say of a comparison."""
    return Judgement(**task.spec)


def different(pairs: Sequence[tuple[Task, Task]]) -> list[tuple[Task, Task]]:
    """The comparisons without those that are shown and judged as one before them, in the same or the other order."""
    first: dict[frozenset[tuple[str, str]], tuple[Task, Task]] = {}
    for pair in pairs:
        first.setdefault(frozenset((task.prompt, json.dumps(task.spec)) for task in pair), pair)
    return list(first.values())


def hold_out(pairs: Sequence[tuple[Task, Task]]) -> tuple[list[tuple[Task, Task]], list[tuple[Task, Task]]]:
    """Comparisons to train on and to validate on: those of a twentieth of the prompts; none of fewer than 20."""
    parts: dict[bool, list[tuple[Task, Task]]] = {True: [], False: []}
    for pair in pairs:
        parts[xxhash.xxh64_intdigest(pair[0].canonical.encode()) % 20 == 0].append(pair)
    return (parts[False], parts[True]) if len(pairs) >= 20 and parts[False] else (list(pairs), [])
