"""Structured output: a small schema and some facts in the prompt; the answer must be JSON that validates.

The check is jsonschema's, under the schema of the task: types and enumerations as shown in the prompt, and `const` for
the values that follow from the facts, so that validating means being right. A number may be asked for as a string, and
facts come in another order than keys. Any key order and spacing is right. The careful reasoning trace writes the typed
values down first, in the order of the schema; the short one only counts the keys.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from jsonschema import Draft202012Validator

from nemotron.kit.schemas.difficulty import StructuredOutputDifficulty
from nemotron.stack.environments.task import Solution, Task, Verdict, right, wrong
from nemotron.stack.environments.words import words_by_category

FAMILY = "structured_output"
WORD_KEYS = ("animal", "color", "fruit", "tool", "job", "vehicle")
NUMBER_KEYS = ("age", "count", "price", "weight")
FLAG_KEYS = ("active", "open", "new", "paid")
CHOICE_KEYS = {
    "size": ("small", "large"),
    "side": ("left", "right"),
    "level": ("low", "high"),
    "mode": ("read", "write"),
}
_PHRASINGS = ("Write JSON with {keys}. Facts: {facts}.", "JSON keys: {keys}. Data: {facts}.")


@dataclass(frozen=True, slots=True)
class Problem:
    """An object to write. `fields`: (key, type shown in the prompt, JSON value), in the order of the schema."""

    fields: tuple[tuple[str, str, str | int | bool], ...]

    @property
    def canonical(self) -> str:
        """One string for all orders of the keys."""
        return f"{FAMILY}|" + ",".join(sorted(f"{key}:{kind}={json.dumps(value)}" for key, kind, value in self.fields))


def _keys(difficulty: StructuredOutputDifficulty) -> tuple[str, ...]:
    flags = FLAG_KEYS if difficulty.flags else ()
    return WORD_KEYS + NUMBER_KEYS + flags + (tuple(CHOICE_KEYS) if difficulty.choices else ())


def draw(rng: random.Random, difficulty: StructuredOutputDifficulty) -> Problem:
    """Draw one problem."""
    fields: list[tuple[str, str, str | int | bool]] = []
    for key in rng.sample(_keys(difficulty), rng.randint(difficulty.min_keys, difficulty.max_keys)):
        if key in NUMBER_KEYS:
            number = rng.randint(1, difficulty.max_number)
            as_string = difficulty.numbers_as_strings and rng.random() < 0.5
            fields.append((key, "string", str(number)) if as_string else (key, "integer", number))
        elif key in FLAG_KEYS:
            fields.append((key, "boolean", rng.random() < 0.5))
        elif key in CHOICE_KEYS:
            fields.append((key, "|".join(CHOICE_KEYS[key]), rng.choice(CHOICE_KEYS[key])))
        else:
            fields.append((key, "string", rng.choice(words_by_category(difficulty.words_per_category)[key])))
    return Problem(tuple(fields))


def build(problem: Problem, difficulty: StructuredOutputDifficulty, rng: random.Random) -> Task:
    """Word the problem, shuffle its facts, and draw one of its right spellings as the demonstration."""
    facts = list(problem.fields)
    rng.shuffle(facts)
    prompt = rng.choice(_PHRASINGS).format(
        keys=", ".join(f"{key} ({kind})" for key, kind, _ in problem.fields),
        facts=", ".join(f"{key} {_as_fact(value)}" for key, _, value in facts),
    )
    order = problem.fields if rng.random() < 0.7 else facts
    separators = (", ", ": ") if rng.random() < 0.7 else (",", ":")
    answer = json.dumps({key: value for key, _, value in order}, separators=separators)
    careful = rng.random() < difficulty.careful_share
    typed = ", ".join(f"{key} {json.dumps(value)}" for key, _, value in order)
    reasoning = typed if careful else f"{len(order)} keys"
    solution = Solution(reasoning, answer, "careful" if careful else "short")
    return Task(FAMILY, prompt, problem.canonical, {"schema": _schema(problem)}, solution)


def _as_fact(value: str | int | bool) -> str:
    """A value in the wording of the facts."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _schema(problem: Problem) -> dict[str, Any]:
    """The JSON schema of a problem: `const` carries the value that the facts give."""
    properties: dict[str, Any] = {}
    for key, kind, value in problem.fields:
        properties[key] = {"type": kind, "const": value}
        if "|" in kind:
            properties[key] = {"type": "string", "enum": kind.split("|"), "const": value}
    return {
        "type": "object",
        "properties": properties,
        "required": [key for key, _, _ in problem.fields],
        "additionalProperties": False,
    }


@lru_cache(maxsize=4096)
def _validator(schema_json: str) -> Draft202012Validator:
    """A validator for a schema that was itself checked; a broken schema raises jsonschema.SchemaError."""
    schema = json.loads(schema_json)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Object hook: JSON with a key twice is not one object that validates, whichever value a parser keeps."""
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _refuse_constant(name: str) -> None:
    """NaN and Infinity, which Python's parser accepts, are not JSON."""
    raise ValueError(f"{name} is not JSON")


def verify_answer(spec: dict[str, Any], answer: str) -> Verdict:
    """Right if the whole answer is one JSON value that validates under the schema of the task."""
    validator = _validator(json.dumps(spec["schema"], sort_keys=True))
    try:
        value = json.loads(answer, object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as failure:  # ValueError covers JSONDecodeError and integers too long to read
        return wrong(f"not JSON: {failure}")
    mismatch = next(validator.iter_errors(value), None)
    return right() if mismatch is None else wrong(mismatch.message)


def space_size(difficulty: StructuredOutputDifficulty) -> int:
    """Number of different canonical tasks, exact: the elementary symmetric sums of the number of values of each key."""
    values = dict.fromkeys((*FLAG_KEYS, *CHOICE_KEYS), 2)
    values |= dict.fromkeys(WORD_KEYS, difficulty.words_per_category)
    values |= dict.fromkeys(NUMBER_KEYS, difficulty.max_number * (1 + difficulty.numbers_as_strings))
    sums = [1] + [0] * difficulty.max_keys  # sums[k]: number of objects with k of the keys seen so far
    for key, k in product(_keys(difficulty), range(difficulty.max_keys, 0, -1)):
        sums[k] += sums[k - 1] * values[key]
    return sum(sums[difficulty.min_keys :])
