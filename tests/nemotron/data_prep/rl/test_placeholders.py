"""Placeholder records: filled in as the blends' own scripts do it, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemotron.data_prep.rl.placeholders import PUBLISHED, fill

DAPO, SKYWORK = "nano_v3_sft_profiled_dapo17k", "nano_v3_sft_profiled_skywork_no_omni"
ASKED = "Put the answer in a box.\n\n"


def dapo_row(problem: str, answer: str = "42") -> dict[str, Any]:
    """A row of DAPO-Math-17k, as its card shows them."""
    content = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
        f'{problem}\n\nRemember to put your answer on its own line after "Answer:".'
    )
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
    }


def skywork_row(problem: str, *answers: str) -> dict[str, Any]:
    """A row of Skywork-OR1-RL-Data's `math`, as its card shows them."""
    return {
        "prompt": [{"role": "user", "content": problem}],
        "reward_model": {"style": "rule", "ground_truth": json.dumps(answers)},
    }


def placeholder(dataset: str, row: Any, **template: str) -> dict[str, Any]:
    return {
        "id": row,
        "dataset": dataset,
        "_hf_placeholder": {"row": row, "question_template": template},
        "question": "",
        "agent_ref": {"name": "math_with_judge"},
    }


def filled(record: dict[str, Any], dapo: list[dict[str, Any]], skywork: list[dict[str, Any]]) -> dict[str, Any]:
    rows = {PUBLISHED[DAPO].location: dict(enumerate(dapo)), PUBLISHED[SKYWORK].location: dict(enumerate(skywork))}
    return fill(record, PUBLISHED, rows)


@pytest.mark.parametrize(
    ("record", "question", "answer", "prompt"),
    [
        # The blank line behind the prefix goes, the one before the question stays.
        (
            placeholder(DAPO, 1, prefix=ASKED, suffix=""),
            "Put the answer in a box.\n\n\n\nWhat is 2+2?",
            "4",
            "Put the answer in a box.\n\n\n\nWhat is 2+2?",
        ),
        (
            placeholder(DAPO, "0", prefix="", suffix="Box it."),
            "\n\nWhat is 1+1?\n\nBox it.",
            "2",
            "\n\nWhat is 1+1?\n\nBox it.",
        ),
        (
            placeholder(SKYWORK, 1, template="Think. {question}\nBox it."),
            "Find {x}.",
            "\\frac{1}{2}",
            "Think. Find {x}.\nBox it.",
        ),
    ],
)
def test_each_kind_is_filled_as_the_published_scripts_fill_it(
    record: dict[str, Any], question: str, answer: str, prompt: str
) -> None:
    """The expected texts were put together by hand from the scripts' rules, not by this code."""
    assert filled(
        record,
        dapo=[dapo_row("What is 1+1?", "2"), dapo_row("What is 2+2?", " 4 ")],
        skywork=[skywork_row("unused", "0"), skywork_row("Find {x}.", "\\frac{1}{2}", "0.5")],
    ) == {
        "id": record["id"],
        "dataset": record["dataset"],
        "agent_ref": {"name": "math_with_judge"},
        "question": question,
        "expected_answer": answer,
        "responses_create_params": {"input": [{"role": "user", "content": prompt}]},
    }


WRONG = [
    (placeholder(DAPO, 5, prefix=ASKED), "hf://BytedTsinghua-SIA/DAPO-Math-17k/train has no row 5"),
    (placeholder(DAPO, -1, prefix=ASKED), "_hf_placeholder.row is -1, not a row number"),
    (placeholder(DAPO, None, prefix=ASKED), "_hf_placeholder.row is None, not a row number"),
    (
        placeholder("nano_v3_sft_profiled_dapo", 0, prefix=ASKED),
        "unknown collection: dataset is 'nano_v3_sft_profiled_dapo'",
    ),
    (placeholder(DAPO, 0, prefix="a", suffix="b"), "does not say where the question goes"),
    (placeholder(DAPO, 0), "does not say where the question goes"),
    (placeholder(SKYWORK, 0, template="no place"), "does not say where the question goes"),
    (placeholder(SKYWORK, 0, template="{question} or {question}"), "does not say where the question goes"),
    (placeholder(DAPO, 1, prefix=ASKED), "its prompt is not the one that the blend was made from"),
    (placeholder(DAPO, 2, prefix=ASKED), "row 2 has no answer that can be read"),
    (placeholder(SKYWORK, 1, template="{question}"), "row 1 has no answer that can be read"),
    ({"dataset": DAPO, "_hf_placeholder": "12"}, "_hf_placeholder is str, not an object"),
]


@pytest.mark.parametrize(("record", "says"), WRONG)
def test_what_cannot_be_filled_is_refused(record: dict[str, Any], says: str) -> None:
    unwrapped = {"prompt": [{"role": "user", "content": "What is 1+1?"}], "reward_model": {"ground_truth": "2"}}
    with pytest.raises(UserError) as caught:
        filled(
            record,
            dapo=[dapo_row("a"), unwrapped, dapo_row("a", " ")],
            skywork=[skywork_row("a", "1"), {**skywork_row("a"), "reward_model": {"ground_truth": "{1}"}}],
        )
    assert says in caught.value.message
    if "unknown collection" in says:
        assert caught.value.hint == f"did you mean {DAPO}?"
