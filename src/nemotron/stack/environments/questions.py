"""Questions of the user's own: a question, its answer, and how a response is held against it.

They are for evaluation, and no generator draws them; the family of such a task is `questions/NAME` after its source.
"""

from __future__ import annotations

import contextlib
import json
import re
import string
import textwrap
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from nemo_runspec.errors import UserError
from nemotron.kit.schemas.environments import QUESTIONS as PREFIX
from nemotron.stack.environments.patterns import is_found
from nemotron.stack.environments.task import Solution, Task, Verdict, right, wrong

Match = Literal["exact", "contains", "regex", "choice"]
# `A` and `I` are also words: behind them a blank is not enough.
_LETTER = re.compile(r"\(?([A-Z])(?:[).:,\n]|$|(?<![AI])\s)")


def match_of(record: Mapping[str, Any], match: Match | None) -> Match:
    """How responses to a question are compared: as its record says in `match`, else as its source does; where neither
    does, `choice` if there are choices, `exact` otherwise. UserError: the record says something else."""
    stated = record.get("match") or match or ("choice" if record.get("choices") else "exact")
    if stated not in get_args(Match):
        raise UserError(
            f"the record's field `match` is {stated!r}, not one of {', '.join(get_args(Match))}",
            "it says how the answer is compared; `columns: {match: FIELD}` in the source takes another field",
        )
    return cast(Match, stated)


def make_task(source: str, record: Mapping[str, Any], match: Match | None) -> Task:
    """The task of one question.

    Args:
        record: `question`; `answer`: text, a number, or a list of those of which one has to match, of a choice its
            letter, or its text; `choices`: the options of `choice`, which are appended to the question as A), B), …: a
            list; ARC's `{"text": […], "label": […]}`, whose answer may be one of the labels; or either as JSON text.
        match: of the source; `match_of` has what a record may say about it.

    Raises:
        UserError: the question is empty or no text, there is no answer, a regular expression is none, the choices are
            no such list, or the answer is not among them.
    """
    question, answer, match = _text_of(record["question"], "question"), record.get("answer"), match_of(record, match)
    given = answer if isinstance(answer, list) else [answer]
    answers = [_text_of(each, "answer").strip() for each in given if each is not None]
    if not question.strip():
        raise UserError("the question is empty")
    if not answers or not all(answers):
        raise UserError("a question without an answer")
    spec: dict[str, Any] = {"match": match, "answers": answers}
    if match == "regex":
        for pattern in answers:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(f"answer {pattern!r} is not a regular expression: {error}") from None
    if match == "choice":
        options, labels = _options(record.get("choices"))
        letters = string.ascii_uppercase[: len(options)]
        by_label = dict(zip(labels or letters, letters, strict=True))
        lettered = list(zip(letters, options, strict=True))
        exact = [name for name, option in lettered if option == answers[0]]
        said = exact or [name for name, option in lettered if _plain(option) == _plain(answers[0])]
        letter = by_label.get(answers[0]) or (said[0] if len(said) == 1 else None)
        if letter is None:
            which = "that of several" if said else "none"
            raise UserError(f"answer {answers[0]!r} is {which} of the {len(options)} choices, nor the letter of one")
        spec |= {"answers": [letter], "options": options}
        question += "".join(f"\n{name}) {option}" for name, option in lettered)
        answers = [letter]
    return Task(f"{PREFIX}{source}", question, f"{PREFIX}{source}|{_plain(question)}", spec, Solution("", answers[0]))


def verify_answer(spec: dict[str, Any], answer: str) -> Verdict:
    """Right if one of the answers matches.

    `exact`: the response is the answer, but for case, blanks and a final full stop. `contains`: the answer stands in
    the response as whole words, but for case and blanks, and a number as no part of another one. `regex`: it is found
    in the response, within 1 s of processor time. `choice`: the response is the text of that option, or begins with its
    letter.
    """
    answers, said = spec["answers"], _plain(answer)
    match spec["match"]:
        case "exact":
            matches = any(said == _plain(each) for each in answers)
        case "contains":
            matches = any(_contains(said, _plain(each)) for each in answers)
        case "regex":
            matches = any(is_found(each, answer) for each in answers)
        case "choice":
            matches = _chosen(spec["options"], answer) == answers[0]
        case other:
            raise ValueError(f"unknown match {other!r}")
    return right() if matches else wrong(f"not {' or '.join(answers)}")


def answered(spec: dict[str, Any], answer: str) -> str | None:
    """What is compared of an answer: for `exact` its text but for case, blanks and a full stop, for `choice` the letter
    of the option that it chooses; None where it has none."""
    said = _plain(answer)
    if spec["match"] == "exact":
        return said or None
    return _chosen(spec["options"], answer)


def _text_of(value: Any, field: str) -> str:
    """Text, or a number as people write it: a column of numbers, one of them missing, holds 42 as 42.0."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if not isinstance(value, str | int | float) or value != value:  # nan is no answer
        raise UserError(f"{field} must be text or a number, not {textwrap.shorten(repr(value), 100, placeholder=' …')}")
    return str(value)


def _contains(said: str, answer: str) -> bool:
    """Whether the answer stands there as whole words, and a number as a whole: 7 is not in 7.5, 7,000, -7 or 1/7."""
    before = r"(?<![\w+\-\u2212\u2013/])(?<![\d\s][.,])" if answer[:1].isdigit() else r"(?<!\w)"
    after = r"(?!\w|[+\-\u2212\u2013/.,]\d)" if answer[-1:].isdigit() else r"(?!\w)"
    return re.search(f"{before}{re.escape(answer)}{after}", f" {said}") is not None


def _chosen(options: list[str], answer: str) -> str | None:
    """The letter of the only option whose text the answer is, letter before it or not, else the letter that it begins
    with. A single letter is always that of an option, never its text."""
    said, lettered = _plain(answer), list(zip(string.ascii_uppercase, options, strict=False))
    for letter, option in lettered:
        if said == f"{letter.casefold()} {_plain(option)}":
            return letter
    exact = [letter for letter, option in lettered if answer.strip() == option]
    named = exact or [letter for letter, option in lettered if said == _plain(option)]
    only = named[0] if len(named) == 1 else None
    if named and len(said) > 1:
        return only
    begins = _LETTER.match(answer.strip())
    return begins[1] if begins else only


def _options(choices: Any) -> tuple[list[str], list[str]]:
    """The texts of the options, and their labels where the record has some."""
    value = choices
    if isinstance(value, str):  # of a CSV
        with contextlib.suppress(ValueError):  # refused below
            value = json.loads(value)
    labels: Any = []
    if isinstance(value, dict):
        labels = value.get("label") or []
        value = value.get("text")
    texts = value if isinstance(value, list | tuple) else []
    is_plain = isinstance(labels, list) and all(isinstance(each, str | int | float) for each in (*texts, *labels))
    if not texts or not is_plain or (labels and len(labels) != len(texts)):
        shown = textwrap.shorten(repr(choices), 100, placeholder=" …")
        raise UserError(
            f"choices must be a list of texts, not {shown}",
            'as JSON: ["red", "blue"], or {"text": ["red", "blue"], "label": ["A", "B"]}',
        )
    if len(texts) > len(string.ascii_uppercase):
        raise UserError(f"{len(texts)} choices; there are letters for {len(string.ascii_uppercase)}")
    written, named = ([_text_of(each, "choices").strip() for each in some] for some in (texts, labels))
    return written, named


def _plain(text: str) -> str:
    """Without differences of case and blanks, and without a final full stop."""
    return " ".join(text.casefold().split()).removesuffix(".")
