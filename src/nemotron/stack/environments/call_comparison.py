"""Whether calls of tools are those that were expected.

Two ways, as two resources servers of NeMo Gym have them by default (commit 07d6b0d):

- `equal_calls`, single_step_tool_use_with_argument_comparison: all arguments, by their type; several calls are a set.
- `equal_step`, swe_pivot: one call of a coding agent, by what it acts on and how like its text is.

A call is {name, arguments}. Where ours gives another reward than the servers' own functions in the cases recorded from
them, `tests/nemotron/stack/environments/test_tool_comparison.py` says so, and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

Call = Mapping[str, Any]

FLOAT_TOLERANCE = 1e-6
# The servers' defaults: `word_count_similarity_threshold` and `similarity_full_credit`.
WORD_THRESHOLD, SIMILAR = 0.4, 0.8
# SequenceMatcher takes the product of both lengths.
MAX_SIMILARITY_CHARS = 2000
# Of a path what counts: directory and file. What is above differs between checkouts.
_PATH_PARTS = 2
END_OF_FILE = -1  # as the last line of a view


def equal_calls(expected: Sequence[Call], calls: Sequence[Call], threshold: float = WORD_THRESHOLD) -> bool:
    """Whether `calls` are those expected, in any order: each is matched with one of the other side.

    threshold: least similarity of two texts of several words, on the server's scale, where equal texts have 0.5.
    """
    if not expected:
        raise ValueError("no call is expected")
    if len(calls) != len(expected):
        return False
    return _most_matches([[_same_call(want, call, threshold) for call in calls] for want in expected]) == len(expected)


def _most_matches(fits: Sequence[Sequence[bool]]) -> int:
    """The size of a largest matching: `fits[i][j]`, whether expected call i may be matched with call j."""
    owner: dict[int, int] = {}

    def place(i: int, tried: set[int]) -> bool:
        for j, fit in enumerate(fits[i]):
            if fit and j not in tried:
                tried.add(j)
                if j not in owner or place(owner[j], tried):
                    owner[j] = i
                    return True
        return False

    return sum(place(i, set()) for i in range(len(fits)))


def _same_call(expected: Call, call: Call, threshold: float) -> bool:
    return bool(expected["name"] == call["name"]) and _same_value(expected["arguments"], call["arguments"], threshold)


def _same_value(expected: Any, value: Any, threshold: float) -> bool:
    """Whether a value is what was expected: of its type, where 2 and 2.0 are one number; all keys, all items."""
    if isinstance(expected, Mapping):
        has_keys = isinstance(value, Mapping) and expected.keys() == value.keys()
        return has_keys and all(_same_value(each, value[key], threshold) for key, each in expected.items())
    if isinstance(expected, list):
        same_length = isinstance(value, list) and len(expected) == len(value)
        return same_length and all(_same_value(*pair, threshold) for pair in zip(expected, value, strict=True))
    if isinstance(expected, str):
        return isinstance(value, str) and _same_text(expected, value, threshold)
    if isinstance(expected, bool) or isinstance(value, bool) or expected is None:
        return expected is value
    try:
        return isinstance(value, int | float) and abs(expected - value) <= FLOAT_TOLERANCE
    except OverflowError:  # an integer beyond any float
        return False


def _same_text(expected: str, text: str, threshold: float) -> bool:
    """One word has to be equal; of several, the share that is equal, in order, has to reach twice `threshold`."""
    words = expected.split()
    if expected == text or len(words) < 2:
        return expected == text
    matcher, least = SequenceMatcher(None, words, text.split(), autojunk=False), min(1.0, 2 * threshold)
    return matcher.real_quick_ratio() >= least and matcher.ratio() >= least  # the first bounds it by the lengths alone


def equal_step(expected: Call, calls: Sequence[Call]) -> bool:
    """Whether a step, in which a coding agent makes one call, is the expected one.

    Its tool is the expected one. A path ends as the expected one does, in directory and file. A command begins with the
    same word, and is similar; so are both texts of an edit. A range of lines covers four fifths of the expected one.
    Any other argument is equal.
    """
    if len(calls) != 1 or calls[0]["name"] != expected["name"]:
        return False
    wanted, given = expected["arguments"], dict(calls[0]["arguments"])
    if "view_range" in wanted:  # without one it is the whole file
        given.setdefault("view_range", wanted["view_range"])
    if wanted.keys() != given.keys() or not all(_same_argument(key, wanted[key], given[key]) for key in wanted):
        return False
    texts = [key for key in ("old_str", "new_str", "command") if key in wanted]
    return all(_similarity(wanted[key], given[key]) >= SIMILAR for key in texts)


def _same_argument(key: str, wanted: Any, given: Any) -> bool:
    match key:
        case "path" | "file" | "file_path":
            return isinstance(given, str) and _last_parts(given) == _last_parts(str(wanted))
        case "command":
            return isinstance(given, str) and given.split()[:1] == str(wanted).split()[:1]
        case "view_range" if _is_range(wanted):
            return _is_range(given) and _covers(given, wanted)
        case "old_str" | "new_str":
            return isinstance(given, str)
    return _same_value(wanted, given, 0.5)


def _last_parts(path: str) -> list[str]:
    return path.strip().strip("/").split("/")[-_PATH_PARTS:]


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(line) is int for line in value)


def _covers(given: list[int], wanted: list[int]) -> bool:
    """Whether the lines of a view hold four fifths of those wanted; both are [first, last], -1 the file's last line."""
    (first, last), (given_first, given_last) = wanted, given
    if last == END_OF_FILE:  # how many lines there are is not known
        return given_last == END_OF_FILE and given_first <= first
    shared = (last if given_last == END_OF_FILE else min(last, given_last)) - max(first, given_first) + 1
    return shared >= 0.8 * (last - first + 1)


def _similarity(wanted: str, given: str) -> float:
    """Share of characters in common, in order: 0 to 1, 1 for equal texts."""
    pair = given[:MAX_SIMILARITY_CHARS], wanted[:MAX_SIMILARITY_CHARS]  # in this order: it is not symmetric
    return 1.0 if wanted == given else SequenceMatcher(None, *pair).ratio()
