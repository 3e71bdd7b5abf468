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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_runspec.errors import UserError, did_you_mean

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


def pointer_of(record: Mapping[str, Any], references: Mapping[str, Reference]) -> tuple[str, int]:
    """The name of the collection that a placeholder record points to, and the number of the row in it, from 0.

    UserError: it does not say, or the collection is not known.
    """
    placeholder, name = record[FIELD], record.get("dataset")
    if not isinstance(placeholder, Mapping):
        raise UserError(f"{FIELD} is {type(placeholder).__name__}, not an object")
    if not isinstance(name, str) or name not in references:
        hint = did_you_mean(str(name), references, "known")
        raise UserError(f"placeholder of an unknown collection: dataset is {name!r}", hint)
    number = placeholder.get("row")
    if isinstance(number, str) and number.isdecimal():
        number = int(number)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise UserError(f"{FIELD}.row is {number!r}, not a row number")
    return name, number


def fill(
    record: Mapping[str, Any],
    references: Mapping[str, Reference],
    rows: Mapping[str, Mapping[int, Mapping[str, Any]]],
) -> dict[str, Any]:
    """A placeholder record with its question and answer; whatever else it holds stays.

    `rows`: location of a collection -> number -> the row, of which `prompt` and `reward_model` are used.

    UserError: a placeholder that is not complete, a collection or a row that is not there, a template that does not say
    where the question goes, a row whose question is not wrapped in the known prompt or that has no answer.
    """
    name, number = pointer_of(record, references)
    reference = references[name]
    row = rows.get(reference.location, {}).get(number)
    if row is None:
        raise UserError(f"{reference.location} has no row {number}")
    question = _question(row.get("prompt"), reference)
    if question is None:
        raise UserError(f"{reference.location} row {number}: its prompt is not the one that the blend was made from")
    answer = _answer(row.get("reward_model"), reference)
    if answer is None:
        raise UserError(f"{reference.location} row {number} has no answer that can be read")
    prompt = _prompt(question, record[FIELD].get("question_template"))
    if prompt is None:
        raise UserError(
            f"{FIELD}.question_template does not say where the question goes: give one of prefix, suffix, template"
        )
    return {
        **{key: value for key, value in record.items() if key != FIELD},
        "question": prompt if reference.before else question,
        "expected_answer": answer,
        "responses_create_params": {"input": [{"role": "user", "content": prompt}]},
    }


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


def _prompt(question: str, template: Any) -> str | None:
    """The question as the blend asks it. None: the template gives no place for it, or two."""
    if not isinstance(template, Mapping):
        return None
    parts = {key: text for key, text in template.items() if text}
    if len(parts) != 1 or not all(isinstance(text, str) for text in parts.values()):
        return None
    if "prefix" in parts:
        return f"{parts['prefix']}{question}".removesuffix("\n\n")
    if "suffix" in parts:
        return f"{question}{parts['suffix']}"
    whole = parts.get("template", "")
    return whole.replace(_MARK, question) if whole.count(_MARK) == 1 else None
