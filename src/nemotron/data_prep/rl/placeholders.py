"""Placeholder records: prompts that a published blend may not contain, and names instead.

The RL blends of Nemotron 3 Nano and Super (nvidia/Nemotron-3-Nano-RL-Training-Blend,
nvidia/Nemotron-RL-Super-Training-Blends) hold records of two mathematics collections that are published elsewhere:
BytedTsinghua-SIA/DAPO-Math-17k (split `train`) and Skywork/Skywork-OR1-RL-Data (split `math`). Such a record says in
`dataset` which collection it is of, and in `_hf_placeholder` which row and how the question is asked:

    {"dataset": "nano_v3_sft_profiled_dapo17k",
     "_hf_placeholder": {"row": 12, "question_template": {"prefix": "Solve …\\n\\n", "suffix": ""}}, …}
    {"dataset": "nano_v3_sft_profiled_skywork_no_omni",
     "_hf_placeholder": {"row": 7, "question_template": {"template": "… {question} …"}}, …}

The question stands in the row's `prompt[0].content`, the answer in `reward_model.ground_truth`. DAPO's question is
wrapped in a prompt of its own, which comes off; then the record's prefix goes before it (and the blank line after it
goes), or the suffix behind. Skywork's goes into the template, and its answer is a JSON list whose first element counts.
The record gets `question` (DAPO: as it is asked; Skywork: the bare one), `expected_answer`, and
`responses_create_params` with the prompt as its one user message.

Source: the blends' cards on huggingface.co, and what their companion scripts `create_nanov3_jsonl.py` and
`fill_placeholders.py` write. Those pass on a record of a collection that they do not know; here it is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nemo_runspec.errors import UserError, did_you_mean
from nemotron.data_prep.sources.reading import ReadReport, Row

FIELD = "_hf_placeholder"
UNRESOLVED = "placeholder not resolved"
_MARK = "{question}"
_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
_DAPO_AFTER = 'Remember to put your answer on its own line after "Answer:".'


@dataclass(frozen=True, slots=True)
class Reference:
    """A collection that placeholders point to.

    `location`: where it is, in the terms of `list_files`. `before`, `after`: the prompt around each of its questions,
    taken off. `answers_in_list`: an answer is a JSON list, and its first element counts.
    """

    location: str
    before: str = ""
    after: str = ""
    answers_in_list: bool = False


_DAPO = Reference("hf://BytedTsinghua-SIA/DAPO-Math-17k/train", _DAPO_BEFORE, _DAPO_AFTER)
_SKYWORK = Reference("hf://Skywork/Skywork-OR1-RL-Data/math", answers_in_list=True)
PUBLISHED: Mapping[str, Reference] = {
    "nano_v3_sft_profiled_dapo17k": _DAPO,
    "nano_v3_sft_profiled_skywork_no_omni": _SKYWORK,
    "super_v3_lcsft_step1000_dapo17k": _DAPO,
    "super_v3_lcsft_step1000_skyworks": _SKYWORK,
}
"""What the published blends write in `dataset` -> the collection."""


def is_placeholder(record: Mapping[str, Any]) -> bool:
    """Whether a record points to another collection instead of holding its question."""
    return bool(record.get(FIELD))


def resolve_placeholders(
    rows: Iterable[Row],
    references: Mapping[str, Reference] = PUBLISHED,
    *,
    report: ReadReport,
    where: Callable[[int], str] = lambda index: f"record {index + 1}",
    on_error: Literal["stop", "skip"] = "stop",
    read: Callable[[str], Iterable[Mapping[str, Any]]] | None = None,
) -> Iterator[Row]:
    """The rows, in order and with their index, each placeholder filled in; records of other kinds as they are.

    Goes through `rows` twice, first for what is pointed to: they must be something that can be iterated again (a list,
    an object with `__iter__`), and an iterator is a TypeError. Each collection is read once, up to the last row that is
    needed; in memory are the questions and answers of the rows that are needed, no more.

    `where(index)`: how messages name a record. `read(location)`: the rows of a collection in order, by default what
    `list_files` and `read_piece` give.

    What is not right is a UserError that names the record under `stop`; under `skip` the record is left out and
    counted in `report`: a placeholder that is not complete, a collection or a row that is not there, a template that
    does not say where the question goes, a row whose question is not wrapped in the known prompt or has no answer.
    """
    if iter(rows) is rows:
        raise TypeError("rows are gone through twice: give something that can be iterated again")
    needed: dict[str, set[int]] = {}
    for row in rows:
        if is_placeholder(row.value):
            pointer = pointer_of(row.value, references)
            if not isinstance(pointer, str):
                needed.setdefault(pointer[0], set()).add(pointer[1])
    found = _fetch(needed, references, read or _read_rows)
    return _resolved(rows, references, found, report, where, on_error)


def _resolved(
    rows: Iterable[Row],
    references: Mapping[str, Reference],
    found: Mapping[str, Mapping[int, Mapping[str, Any]]],
    report: ReadReport,
    where: Callable[[int], str],
    on_error: Literal["stop", "skip"],
) -> Iterator[Row]:
    for row in rows:
        if not is_placeholder(row.value):
            yield row
            continue
        filled = _fill(row.value, references, found)
        if not isinstance(filled, str):
            yield Row(row.index, filled)
        elif on_error == "stop":
            name = row.value.get("dataset")
            hint = did_you_mean(str(name), references, "known") if name not in references else None
            raise UserError(f"{where(row.index)}: {filled}", hint)
        else:
            report.skip(UNRESOLVED, where(row.index), filled)


def _fetch(
    needed: Mapping[str, set[int]],
    references: Mapping[str, Reference],
    read: Callable[[str], Iterable[Mapping[str, Any]]],
) -> dict[str, dict[int, Mapping[str, Any]]]:
    """name -> row -> the part of it that matters. Names that share a collection share one reading of it."""
    wanted: dict[str, set[int]] = {}
    for name, numbers in needed.items():
        wanted.setdefault(references[name].location, set()).update(numbers)
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for location, numbers in wanted.items():
        last, part = max(numbers), found.setdefault(location, {})
        for number, row in enumerate(read(location)):
            if number in numbers:
                part[number] = {"prompt": row.get("prompt"), "reward_model": row.get("reward_model")}
            if number == last:
                break
    return {name: found[references[name].location] for name in needed}


def _read_rows(location: str) -> Iterator[Mapping[str, Any]]:
    from nemotron.data_prep.sources.locations import list_files
    from nemotron.data_prep.sources.pieces import pieces_of
    from nemotron.data_prep.sources.reader import read_piece
    from nemotron.data_prep.sources.reading import Reading

    columns = {"prompt": "prompt", "reward_model": "reward_model"}
    reading = Reading(columns=columns, required=(), present=("prompt", "reward_model"))
    for file in list_files([location]):
        for piece in pieces_of(file, 64 << 20):
            for row in read_piece(piece, reading, ReadReport()):
                yield row.value


def pointer_of(record: Mapping[str, Any], references: Mapping[str, Reference]) -> tuple[str, int] | str:
    """What a placeholder record says: the name of its collection and the row there, or what is wrong with it."""
    placeholder, name = record[FIELD], record.get("dataset")
    if not isinstance(placeholder, Mapping):
        return f"{FIELD} is {type(placeholder).__name__}, not an object"
    if not isinstance(name, str) or name not in references:
        return f"placeholder of an unknown collection: dataset is {name!r}"
    number = placeholder.get("row")
    if isinstance(number, str) and number.isdecimal():
        number = int(number)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        return f"{FIELD}.row is {number!r}, not a row number"
    return name, number


def _fill(
    record: Mapping[str, Any],
    references: Mapping[str, Reference],
    found: Mapping[str, Mapping[int, Mapping[str, Any]]],
) -> dict[str, Any] | str:
    """The record with its question and answer, or what is wrong."""
    pointer = pointer_of(record, references)
    if isinstance(pointer, str):
        return pointer
    name, number = pointer
    reference = references[name]
    source = found[name].get(number)
    if source is None:
        return f"{reference.location} has no row {number}"
    at = f"{reference.location} row {number}"
    question = _question(source.get("prompt"), reference)
    if question is None:
        return f"{at}: its prompt is not the one that the blend was made from"
    answer = _answer(source.get("reward_model"), reference)
    if answer is None:
        return f"{at} has no answer that can be read"
    asked = _ask(question, record[FIELD].get("question_template"))
    if asked is None:
        return f"{FIELD}.question_template does not say where the question goes: give one of prefix, suffix, template"
    filled = {key: value for key, value in record.items() if key != FIELD}
    filled["question"] = asked if reference.before else question
    filled["expected_answer"] = answer
    filled["responses_create_params"] = {"input": [{"role": "user", "content": asked}]}
    return filled


def _question(prompt: Any, reference: Reference) -> str | None:
    """The bare question of a row; None if it is not there, or not between `before` and `after`."""
    if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping)):
        return None
    text = prompt[0].get("content")
    if not isinstance(text, str):
        return None
    if not reference.before:
        return text if text.strip() else None
    begin, end = text.find(reference.before), text.rfind(reference.after)
    inner = text[begin + len(reference.before) : end] if 0 <= begin < end else ""
    return inner if inner.strip() else None


def _answer(reward_model: Any, reference: Reference) -> str | None:
    raw = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    if reference.answers_in_list and isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError:
            return None
    if reference.answers_in_list:
        raw = raw[0] if isinstance(raw, list) and raw else None
    return raw.strip() or None if isinstance(raw, str) else None


def _ask(question: str, template: Any) -> str | None:
    """The question as the blend asks it. None: the template gives no place for it, or two."""
    if not isinstance(template, Mapping):
        return None
    given = {key: text for key, text in template.items() if text}
    if len(given) != 1 or not all(isinstance(text, str) for text in given.values()):
        return None
    if "prefix" in given:
        return f"{given['prefix']}{question}".removesuffix("\n\n")
    if "suffix" in given:
        return f"{question}{given['suffix']}"
    whole = given.get("template", "")
    return whole.replace(_MARK, question) if whole.count(_MARK) == 1 else None
