"""Structured output: data in a given format that has to validate under a JSON schema.

Two shapes of `spec`:

- Generated: {"schema": …}: a small schema and some facts in the prompt, to be answered in JSON. `const` in the schema
  carries the values that follow from the facts, so that validating means being right.
- Published: {"schema_str": the schema as JSON text, "schema_type": "json" | "yaml" | "xml" | "toml" | "csv"}, or, where
  the answer is one call of a tool, {"schema_str", "response_mode": "tool_call", "tools": declarations, "tool_name",
  "tool_payload_key"}: its arguments, or the one of them that the key names, have to validate. The last two may be
  missing. The schema is read strictly, as NeMo Gym's environment `structured_outputs` does: every property that it
  lists is required, and no other is allowed. `formats.py` says how each format is read.

Where a check in Gym lets through what is not right, it is mended here: a key twice, NaN, infinity and numbers that
overflow are refused in every format, a table needs a row, and `format` (a date, say) is checked. A broken schema, and
one that points to another document, is an error and not an answer that is wrong. An answer whose check takes more than
5 s of processor time, under a `pattern` that backtracks without end for instance, is wrong.

In generated tasks a number may be asked for as a string, and facts come in another order than keys. Any key order and
spacing is right. The careful reasoning trace writes the typed values down first, in the order of the schema; the short
one only counts the keys.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from jsonschema import SchemaError

from nemo_runspec.errors import UserError, first_line
from nemotron.kit.chat import parse_tool_calls
from nemotron.kit.schemas.difficulty import StructuredOutputDifficulty
from nemotron.stack.environments import validation
from nemotron.stack.environments.formats import FORMATS, Format
from nemotron.stack.environments.gym import task_without_solution
from nemotron.stack.environments.killable import OutOfTimeError, UndecidedError, Worker
from nemotron.stack.environments.task import Solution, Task, Verdict, right, wrong
from nemotron.stack.environments.validation import as_text, checked, may_take_long, mismatch
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
# Keywords of JSON schema whose value is a schema or a list of them, and those that hold schemas by name.
_SCHEMAS = (
    *("additionalProperties", "items", "prefixItems", "contains", "not", "if", "then", "else"),
    *("unevaluatedItems", "unevaluatedProperties", "propertyNames", "anyOf", "oneOf"),
)
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_worker = Worker(validation, cpu_seconds=5.0)
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


def from_gym(record: Mapping[str, Any]) -> Task:
    """A record for the resources server `structured_outputs`; UserError where no answer to it could be verified.

    One that is answered with a call is refused: its prompt declares tools.
    """
    if record.get("response_mode") not in (None, "text"):
        raise UserError(f"response_mode {record['response_mode']!r}: only records that are answered in text are read")
    spec = {name: record[name] for name in ("schema_str", "schema_type") if record.get(name) is not None}
    try:
        _verify_published(spec, "")
    except (KeyError, ValueError, TypeError, SchemaError, UndecidedError) as failure:
        raise UserError(f"its schema cannot be checked: {first_line(failure)}") from None
    return task_without_solution(FAMILY, record, spec)


def verify_answer(spec: dict[str, Any], answer: str) -> Verdict:
    """Right if the whole answer is one value that validates under the schema of the task."""
    if "schema_str" in spec:
        return _verify_published(spec, answer)
    return _validated(spec["schema"], answer, "json")


def _verify_published(spec: Mapping[str, Any], answer: str) -> Verdict:
    """The verdict under a published schema; ValueError, KeyError or jsonschema.SchemaError where it is broken."""
    schema = strict_schema(json.loads(spec["schema_str"]))
    _refuse_references(schema)
    checked(as_text(schema))  # so that a broken one never depends on the answer to show
    mode, form = spec.get("response_mode", "text"), spec.get("schema_type", "json")
    if mode not in ("text", "tool_call") or form not in FORMATS:
        raise ValueError(f"unknown response_mode {mode!r} or schema_type {form!r}")
    if mode == "text":
        return _validated(schema, answer, form)
    _, calls = parse_tool_calls(answer, spec["tools"])
    if len(calls) != 1:
        return wrong(f"{len(calls)} tool calls, not one")
    name, payload, key = calls[0]["name"], calls[0]["arguments"], spec.get("tool_payload_key")
    if spec.get("tool_name") not in (None, name):
        return wrong(f"a call of {name}, not of {spec['tool_name']}")
    if key is not None:
        if key not in payload:
            return wrong(f"no argument {key}")
        payload = payload[key]
    return _validated(schema, json.dumps(payload), "json")


def strict_schema(schema: Any) -> Any:
    """The schema with all properties required and no others allowed, at every level but in `allOf`.

    The parts of `allOf` describe one object: none of them may forbid the properties of the others.
    """
    if isinstance(schema, list):
        return [strict_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
            strict[keyword] = {name: strict_schema(each) for name, each in value.items()}
        elif keyword in _SCHEMAS:
            strict[keyword] = strict_schema(value)
        else:
            strict[keyword] = value
    if isinstance(schema.get("properties"), dict):
        strict |= {"required": list(schema["properties"]), "additionalProperties": False}
    return strict


def _refuse_references(value: Any) -> None:
    """ValueError for a reference that leaves the schema: following it would read another document, from the network."""
    if isinstance(value, dict):
        for keyword in ("$ref", "$dynamicRef"):
            target = value.get(keyword)
            if isinstance(target, str) and not target.startswith("#"):
                raise ValueError(f"the schema refers to another document: {target}")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _refuse_references(each)


def _validated(schema: Any, document: str, form: Format) -> Verdict:
    """Right if `document` is one of the format that validates; one that takes too long over it is wrong."""
    schema_text = as_text(schema)
    checked(schema_text)
    if not may_take_long(schema_text):
        reason = mismatch(schema_text, document, form)
    else:
        try:
            reason = _worker.call(mismatch, schema_text, document, form)
        except OutOfTimeError as failure:
            reason = f"whether it validates is not known: {failure}"
    return right() if reason is None else wrong(reason)


def space_size(difficulty: StructuredOutputDifficulty) -> int:
    """Number of different canonical tasks, exact: the elementary symmetric sums of the number of values of each key."""
    values = dict.fromkeys((*FLAG_KEYS, *CHOICE_KEYS), 2)
    values |= dict.fromkeys(WORD_KEYS, difficulty.words_per_category)
    values |= dict.fromkeys(NUMBER_KEYS, difficulty.max_number * (1 + difficulty.numbers_as_strings))
    sums = [1] + [0] * difficulty.max_keys  # sums[k]: number of objects with k of the keys seen so far
    for key, k in product(_keys(difficulty), range(difficulty.max_keys, 0, -1)):
        sums[k] += sums[k - 1] * values[key]
    return sum(sums[difficulty.min_keys :])
