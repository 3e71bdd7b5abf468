"""Instruction following: write under constraints that a program checks; usually several answers are right.

Two shapes of `spec`:

- Generated: {"kind", "count", "named", "given", "separator"}: words to write.
- Published (`constraints.py` has the identifiers): {"instruction_id_list": [identifier, …], "kwargs": [arguments, …],
  "grading_mode": "binary" | "fraction", "reading": "strict" | "loose"}. `binary` scores 1 if all constraints are
  followed, `fraction` the share of them. The strict reading takes the answer as it stands, the loose one also without
  its first or last line and without asterisks, as IFEval does. Both keys may be missing: binary, strict.

Kinds of generated instructions: repeat a word and then write another, pick some of the given words (perhaps avoiding
one), reorder words with one at the front, write a number of different words with the first and last given, write words
in upper case. `constraint_share` of the problems have the published shape instead (`constrained_words.py`).
Demonstrations vary in order and separators. The careful reasoning trace numbers the words before they
are written; the short one only says how many.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import comb
from typing import Any, get_args

from nemo_runspec.errors import UserError
from nemotron.kit.schemas.difficulty import InstructionFollowingDifficulty, InstructionKind
from nemotron.stack.environments import constrained_words
from nemotron.stack.environments.constraints import follows, follows_loosely
from nemotron.stack.environments.gym import task_without_solution
from nemotron.stack.environments.task import Solution, Task, Verdict, partly, right, wrong
from nemotron.stack.environments.words import word_list

FAMILY = "instruction_following"
KINDS = get_args(InstructionKind)
PUBLISHED_FIELDS = ("instruction_id_list", "kwargs", "grading_mode", "reading")
SEPARATORS = {"any": "", "commas": " Use commas.", "dashes": " Use dashes."}
_PHRASINGS: dict[str, tuple[str, ...]] = {
    "repeat": ("Write {0} {n} times, then {1}.", "Repeat {0} {n} times and end with {1}."),
    "pick": ("Pick {n} of: {all}.", "List {n} of these words: {all}."),
    "pick_not": ("Pick {n} of: {all}. Not {0}.", "List {n} of these words, but not {0}: {all}."),
    "reorder": ("Reorder: {all}. Start with {0}.", "Write {all} in any order, {0} first."),
    "first_last": ("Write {n} different words, {0} first, {1} last.", "Write {n} different words from {0} to {1}."),
    "upper": ("Write in upper case: {all}.", "Write {all} in upper case."),
}
_ANY_SEPARATOR = re.compile(r"\s*[,-]\s*(?:and\s+)?|\s+and\s+|\s+")
_WORD = re.compile(r"[A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Problem:
    """An instruction. `named`: words with a role, in the order of the phrasing; `given`: words with none, unordered."""

    kind: str
    count: int
    named: tuple[str, ...]
    given: tuple[str, ...]
    separator: str = "any"

    @property
    def canonical(self) -> str:
        """One string for all orders of the words given."""
        given = ",".join(sorted(self.given))
        return f"{FAMILY}|{self.kind}|{self.count}|{','.join(self.named)}|{given}|{self.separator}"


def draw(rng: random.Random, difficulty: InstructionFollowingDifficulty) -> Problem | constrained_words.Problem:
    """Draw one problem."""
    if difficulty.constraint_share and rng.random() < difficulty.constraint_share:
        return constrained_words.draw(rng, difficulty)
    kind, words = rng.choice(difficulty.kinds), word_list(difficulty.words_per_category)
    if kind == "repeat":
        times = rng.randint(difficulty.min_times, difficulty.max_times)
        return Problem(kind, times, tuple(rng.sample(words, 2)), (), rng.choice(list(SEPARATORS)))
    if kind == "first_last":
        return Problem(kind, rng.randint(3, difficulty.max_count), tuple(rng.sample(words, 2)), ())
    if kind == "upper":
        return Problem(kind, difficulty.num_upper, (), tuple(rng.sample(words, difficulty.num_upper)))
    if kind == "reorder":
        given = rng.sample(words, difficulty.num_reorder)
        return Problem(kind, difficulty.num_reorder, (given[0],), tuple(given))
    given = rng.sample(words, difficulty.num_given)
    count = rng.randint(2, difficulty.num_given - 1)
    return Problem(kind, count, (given[0],) if kind == "pick_not" else (), tuple(given))


def build(
    problem: Problem | constrained_words.Problem, difficulty: InstructionFollowingDifficulty, rng: random.Random
) -> Task:
    """Word the problem and draw one of its right answers as the demonstration."""
    if isinstance(problem, constrained_words.Problem):
        prompt, spec, solution = constrained_words.build(problem, difficulty, rng)
        return Task(FAMILY, prompt, f"{FAMILY}|{problem.canonical}", spec, solution)
    shown = list(problem.given)
    rng.shuffle(shown)
    phrasing = rng.choice(_PHRASINGS[problem.kind])
    prompt = phrasing.format(*problem.named, n=problem.count, all=", ".join(shown)) + SEPARATORS[problem.separator]
    items = _right_items(problem, shown, difficulty, rng)
    joiner = {"any": rng.choice((", ", " ")), "commas": ", ", "dashes": "-"}[problem.separator]
    careful = rng.random() < difficulty.careful_share
    reasoning = " ".join(f"{n} {item}" for n, item in enumerate(items, 1)) if careful else f"{len(items)} words"
    spec = {
        "kind": problem.kind,
        "count": problem.count,
        "named": list(problem.named),
        "given": sorted(problem.given),
        "separator": problem.separator,
    }
    solution = Solution(reasoning, joiner.join(items), "careful" if careful else "short")
    return Task(FAMILY, prompt, problem.canonical, spec, solution)


def _right_items(
    problem: Problem, shown: list[str], difficulty: InstructionFollowingDifficulty, rng: random.Random
) -> list[str]:
    """The words of one right answer: in the order given (`in_order_share`), or drawn from all right answers."""
    named = list(problem.named)
    in_order = rng.random() < difficulty.in_order_share
    if problem.kind == "repeat":
        return [named[0]] * problem.count + [named[1]]
    if problem.kind == "upper":
        return [word.upper() for word in shown]
    if problem.kind == "first_last":
        middle = [
            word for word in rng.sample(word_list(difficulty.words_per_category), problem.count) if word not in named
        ]
        return [named[0], *middle[: problem.count - 2], named[1]]
    if problem.kind == "reorder":
        rest = [word for word in shown if word != named[0]]
        if not in_order:
            rng.shuffle(rest)
        return [named[0], *rest]
    allowed = [word for word in shown if word not in named]
    return allowed[: problem.count] if in_order else rng.sample(allowed, problem.count)


def from_gym(record: Mapping[str, Any]) -> Task:
    """A record for the resources server `instruction_following`; UserError where no answer to it could be verified."""
    metadata = record.get("verifier_metadata")
    fields = {**record, **metadata} if isinstance(metadata, Mapping) else record  # older ones have them at the top
    spec = {name: fields[name] for name in PUBLISHED_FIELDS if fields.get(name) is not None}
    try:
        _check_constraints(spec, "")
    except (KeyError, ValueError, TypeError) as failure:
        raise UserError(f"its constraints cannot be checked: {failure}") from None
    return task_without_solution(FAMILY, record, spec)


def verify_answer(spec: dict[str, Any], answer: str) -> Verdict:
    """Right if the answer is a list of words, separated as asked, that meets the constraint of its kind.

    Separators count as commas, dashes, spaces, new lines or `and` where none was asked for; a full stop may end it.
    With published constraints, right if it follows all of them, right in part where `grading_mode` is `fraction`.
    """
    if "instruction_id_list" in spec:
        return _check_constraints(spec, answer)
    kind, count = str(spec["kind"]), int(spec["count"])
    named, given, separator = list(spec["named"]), list(spec["given"]), str(spec["separator"])
    if kind not in KINDS or separator not in SEPARATORS:
        raise ValueError(f"unknown kind {kind!r} or separator {separator!r}")
    text = answer.removesuffix(".")
    if separator == "any":
        items = _ANY_SEPARATOR.split(text)
    else:
        items = [item.strip() for item in text.split("," if separator == "commas" else "-")]
    if not all(_WORD.fullmatch(item) for item in items):
        return wrong("not a list of words" if separator == "any" else f"not a list of words separated by {separator}")
    return _check(kind, count, named, given, items)


def _check_constraints(spec: Mapping[str, Any], answer: str) -> Verdict:
    """The verdict under published constraints; ValueError or TypeError for a spec that cannot be checked."""
    constraints, arguments = spec["instruction_id_list"], spec["kwargs"]
    mode, reading = spec.get("grading_mode", "binary"), spec.get("reading", "strict")
    if mode not in ("binary", "fraction") or reading not in ("strict", "loose"):
        raise ValueError(f"unknown grading_mode {mode!r} or reading {reading!r}")
    if not constraints or len(constraints) != len(arguments):
        raise ValueError(f"{len(constraints)} constraints with {len(arguments)} arguments")
    check = follows if reading == "strict" else follows_loosely
    # All are checked, so that a broken one never depends on the answer to show.
    ignored = [name for name, each in zip(constraints, arguments, strict=True) if not check(name, each, answer)]
    if not ignored:
        return right()
    reason = f"does not follow {', '.join(ignored)}"
    share = 1 - len(ignored) / len(constraints)
    return partly(share, reason) if mode == "fraction" and share > 0 else wrong(reason)


def _check(kind: str, count: int, named: list[str], given: list[str], items: list[str]) -> Verdict:
    """The constraint of each kind, on the words of the answer."""
    if kind == "repeat":
        return right() if items == [named[0]] * count + [named[1]] else wrong("not the words asked for")
    if kind == "upper":
        return (
            right() if sorted(items) == sorted(word.upper() for word in given) else wrong("not the words in upper case")
        )
    if len(items) != count:
        return wrong(f"{len(items)} words, not {count}")
    if len({item.lower() for item in items}) != count:
        return wrong("a word occurs twice")
    if kind == "first_last":
        return right() if [items[0], items[-1]] == named else wrong("wrong first or last word")
    if not set(items) <= set(given):
        return wrong("a word that was not given")
    if kind == "pick_not" and named[0] in items:
        return wrong(f"{named[0]} was to be avoided")
    if kind == "reorder" and items[0] != named[0]:
        return wrong(f"does not start with {named[0]}")
    return right()


def space_size(difficulty: InstructionFollowingDifficulty) -> int:
    """Number of different canonical tasks, exact."""
    words = len(word_list(difficulty.words_per_category))
    picks = comb(words, difficulty.num_given) * (difficulty.num_given - 2)  # counts 2 .. num_given - 1
    sizes = {
        "repeat": words * (words - 1) * (difficulty.max_times - difficulty.min_times + 1) * len(SEPARATORS),
        "first_last": words * (words - 1) * (difficulty.max_count - 2),
        "upper": comb(words, difficulty.num_upper),
        "reorder": comb(words, difficulty.num_reorder) * difficulty.num_reorder,
        "pick": picks,
        "pick_not": picks * difficulty.num_given,
    }
    size = sum(sizes[kind] for kind in set(difficulty.kinds)) if difficulty.constraint_share < 1 else 0
    return size + (constrained_words.space_size(difficulty) if difficulty.constraint_share else 0)
