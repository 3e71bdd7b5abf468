"""Whether two answers in LaTeX mean the same, by math-verify, as `math_equality.py` asks in a process of its own.

It imports nothing of the project: see `killable.py`.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

_TOKEN = re.compile(r"\\.|[{}]|(?<![<>!])=", re.DOTALL)
_SEPARATOR = re.compile(r"(?<!\\)[,;]")  # a blank is `\,`
_BASE = re.compile(r"[0-9]\s*_\s*(?:\{[^{}]*\}|\w)")  # 101_2
_NAME = re.compile(
    r"\s*(?:\\?[A-Za-z]+|\\(?:text|mathrm|mathbf)\{[^{}]*\})'*(?:[_^](?:\{[^{}]*\}|\w))*(?:\([^()]*\))?\s*"
)


class UnreadableError(Exception):
    """What is expected cannot be read."""


def begin() -> None:
    """Load the library, which takes a second."""
    logging.disable(logging.CRITICAL)  # it warns that we set no timeout of its own
    _library_agrees("1", "2")


def mean_the_same(expected: str, answer: str) -> bool | None:
    """Whether they do; None: what is expected cannot be read."""
    try:
        return _mean_the_same(expected, answer)
    except UnreadableError:
        return None


def _mean_the_same(expected: str, answer: str) -> bool:
    """As math-verify finds, but where it takes less than the whole answer.

    Of an equation it takes the last side alone, and lets `33=16` pass for 16: here a name may stand before it, and all
    other sides have to be equal. It drops the base of `16_8`: here an answer has none that is not expected.
    """
    if not set(_BASE.findall(answer)) <= set(_BASE.findall(expected)):
        return False
    wanted, sides = _sides(expected), _sides(answer)
    is_one = len(wanted) == 1 and not _SEPARATOR.search(expected)  # a comma beside an equation then adds nothing to it
    if len(sides) == 1 or len(sides) == len(wanted) == 2 or (_SEPARATOR.search(answer) and not is_one):
        return _library_agrees(expected, answer)
    if len(wanted) > 1 and not (_NAME.fullmatch(wanted[0]) and wanted[0].split() == sides[0].split()):
        return False
    if _NAME.fullmatch(sides[0]):
        sides = sides[1:]
    return all(_library_agrees(wanted[-1], side) for side in sides)


def _sides(text: str) -> list[str]:
    """The sides of an equation; an equals sign in braces, as in `\\sum_{k=1}`, does not part any."""
    sides, depth, start = list[str](), 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in "{}":
            depth += 1 if token[0] == "{" else -1
        elif token[0] == "=" and depth == 0:
            sides.append(text[start : token.start()])
            start = token.end()
    return [*sides, text[start:]]


def _library_agrees(expected: str, answer: str) -> bool:
    from math_verify import verify

    wanted, answered = _parsed(expected), _parsed(answer)
    if not wanted:
        raise UnreadableError
    if "%" not in expected:
        answered = [_without_percent(each) for each in answered]
    return bool(verify(wanted, answered, timeout_seconds=None, raise_on_error=True)) and _is_close(wanted, answered)


@lru_cache(maxsize=1000)  # one expected answer is compared with a whole group of completions
def _parsed(text: str) -> list[Any]:
    """SymPy's reading of a text, where there is one, then the normalised text."""
    from math_verify import LatexExtractionConfig, parse

    target = LatexExtractionConfig(boxed_match_priority=0)
    return list(parse(f"\\boxed{{{text}}}", [target], parsing_timeout=None, raise_on_error=True))


def _without_percent(value: Any) -> Any:
    """`16%` as 4/25, for the library lets it pass for 16 as well."""
    from sympy import Basic, UnevaluatedExpr

    if isinstance(value, Basic) and value.has(UnevaluatedExpr):
        return value.replace(UnevaluatedExpr, lambda inner: inner)
    return value


def _is_close(expected: list[Any], answer: list[Any]) -> bool:
    """Whether numbers of which one has a decimal point agree to four digits.

    The library compares six decimals, so that 0.0 would pass for 10^{-8}.
    """
    from sympy import Expr, Float, UnevaluatedExpr

    both = (expected[0], answer[0])
    if not all(isinstance(each, Expr) and each.is_number and not each.has(UnevaluatedExpr) for each in both):
        return True
    if not any(each.has(Float) for each in both):
        return True
    wanted, answered = (complex(each) for each in both)
    return abs(wanted - answered) <= 1e-4 * abs(wanted)
