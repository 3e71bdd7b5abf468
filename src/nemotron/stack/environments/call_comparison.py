"""How much calls of tools are worth beside the calls that were expected.

Two ways, as two resources servers of NeMo Gym have them (commit 07d6b0d):

- `compare_calls`, single_step_tool_use_with_argument_comparison: all arguments, by their type; several calls are a set.
- `compare_step`, swe_pivot: one call of a coding agent, by what it acts on and how like its text is.

A call is {name, arguments}. Where ours gives another reward than the servers' own functions in the cases recorded from
them, `tests/nemotron/stack/environments/test_tool_comparison.py` says so, and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

Call = Mapping[str, Any]

FLOAT_TOLERANCE = 1e-6
# SequenceMatcher takes the product of both lengths.
MAX_SIMILARITY_CHARS = 2000
# A longer edit is punished as one of this length.
MAX_EDIT_CHARS = 500
# Of a path what counts: directory and file. What is above differs between checkouts.
_PATH_PARTS = 2
_EDITED = ("old_str", "new_str")
END_OF_FILE = -1  # as the last line of a view


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What `compare_calls` allows; names and defaults are the server's.

    word_count_similarity_threshold: least similarity of two texts of several words, on the server's scale, where equal
    texts have 0.5. allow_subset, allow_superset: whether fewer or more calls than expected may be worth something.
    parallel_tool_call_reward_mode: binary_strict, all calls and no other; fractional, calls that are right over those
    that are there or expected, whichever are more; f1, twice those that are right over both together.
    """

    word_count_similarity_threshold: float = 0.4
    allow_subset: bool = False
    allow_superset: bool = False
    parallel_tool_call_reward_mode: Literal["binary_strict", "fractional", "f1"] = "binary_strict"


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What `compare_step` asks for; names and defaults are the server's.

    similarity_full_credit: least similarity of a text that counts as equal. continuous: one above similarity_threshold
    has half of the reward or more, and an edit costs up to diff_size_alpha of it by its length.
    """

    reward_mode: Literal["binary", "continuous"] = "binary"
    similarity_threshold: float = 0.4
    similarity_full_credit: float = 0.8
    diff_size_alpha: float = 0.1


def compare_calls(expected: Sequence[Call], calls: Sequence[Call], options: CallOptions) -> float:
    """The reward of `calls`, in any order, where `expected` would be right.

    Every expected call is matched with one of `calls` and the other way round, so that as many as possible match.
    """
    if not expected:
        raise ValueError("no call is expected")
    fewer, more = len(calls) < len(expected), len(calls) > len(expected)
    if not calls or (fewer and not options.allow_subset) or (more and not options.allow_superset):
        return 0.0
    threshold = options.word_count_similarity_threshold
    fits = [[_same_call(want, call, threshold) for call in calls] for want in expected]
    matched = _most_matches(fits)
    match options.parallel_tool_call_reward_mode:
        case "fractional":
            return matched / max(len(expected), len(calls))
        case "f1":
            return 2 * matched / (len(expected) + len(calls))
    return float(matched == len(expected) == len(calls))


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


def compare_step(expected: Call, calls: Sequence[Call], options: StepOptions) -> float:
    """The reward of a step, in which a coding agent makes one call, where `expected` would be right.

    Its tool is the expected one. A path ends as the expected one does, in directory and file. A command begins with the
    same word, and is similar; so are both texts of an edit. A range of lines covers four fifths of the expected one.
    Any other argument is equal.
    """
    if len(calls) != 1 or calls[0]["name"] != expected["name"]:
        return 0.0
    wanted, given = expected["arguments"], dict(calls[0]["arguments"])
    if "view_range" in wanted:  # without one it is the whole file
        given.setdefault("view_range", wanted["view_range"])
    if wanted.keys() != given.keys() or not all(_same_argument(key, wanted[key], given[key]) for key in wanted):
        return 0.0
    similar = [_similarity(wanted[key], given[key]) for key in (*_EDITED, "command") if key in wanted]
    similarity = min(similar, default=1.0)
    full, least = options.similarity_full_credit, options.similarity_threshold
    if options.reward_mode == "binary":
        return float(similarity >= full)
    if similarity < least:
        return 0.0
    reward = 1.0 if similarity >= full else 0.5 + 0.5 * (similarity - least) / (full - least)
    edit_chars = len("\n".join(str(given[key]) for key in _EDITED if key in given))
    return reward * (1 - options.diff_size_alpha * min(1.0, edit_chars / MAX_EDIT_CHARS))


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
