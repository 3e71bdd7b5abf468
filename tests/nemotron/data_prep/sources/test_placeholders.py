"""Placeholder records: filled in as the blends' own scripts do it, or refused."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_runspec.errors import UserError
from nemotron.data_prep.rl.placeholders import PUBLISHED, UNRESOLVED, Reference, resolve_placeholders
from nemotron.data_prep.sources.reading import ReadReport, Row

from .hub_server import Hub
from .test_hub import hub  # noqa: F401

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


def numbered(*records: dict[str, Any]) -> list[Row]:
    return [Row(index, record) for index, record in enumerate(records)]


class Collections:
    """Rows by location, and what was read of them."""

    def __init__(self, **rows: list[dict[str, Any]]) -> None:
        self.rows = {
            PUBLISHED[DAPO].location: rows.get("dapo", []),
            PUBLISHED[SKYWORK].location: rows.get("skywork", []),
        }
        self.read: list[str] = []
        self.given = 0

    def __call__(self, location: str) -> Iterator[Mapping[str, Any]]:
        self.read.append(location)
        for row in self.rows[location]:
            self.given += 1
            yield row


def resolve(rows: Iterable[Row], collections: Collections, **options: Any) -> list[dict[str, Any]]:
    return [row.value for row in resolve_placeholders(rows, report=ReadReport(), read=collections, **options)]


def test_each_kind_is_filled_as_the_published_scripts_fill_it() -> None:
    """The expected texts were put together by hand from the scripts' rules, not by this code."""
    collections = Collections(
        dapo=[dapo_row("What is 1+1?", "2"), dapo_row("What is 2+2?", " 4 ")],
        skywork=[skywork_row("unused", "0"), skywork_row("Find {x}.", "\\frac{1}{2}", "0.5")],
    )
    other = {"dataset": "nano_v3_sft_profiled_stem_mcqa", "question": "Which?", "_hf_placeholder": None}
    out = resolve(
        numbered(
            placeholder(DAPO, 1, prefix=ASKED, suffix=""),
            other,
            placeholder(DAPO, 0, prefix="", suffix="Box it."),
            placeholder(SKYWORK, 1, template="Think. {question}\nBox it."),
        ),
        collections,
    )
    assert [record["question"] for record in out] == [
        "Put the answer in a box.\n\n\n\nWhat is 2+2?",  # the blank line behind goes, the one before stays
        "Which?",
        "\n\nWhat is 1+1?\n\nBox it.",
        "Find {x}.",
    ]
    assert [record.get("expected_answer") for record in out] == ["4", None, "2", "\\frac{1}{2}"]
    prompts = [record["responses_create_params"]["input"] for record in out if record is not other]
    assert prompts == [
        [{"role": "user", "content": text}]
        for text in (out[0]["question"], out[2]["question"], "Think. Find {x}.\nBox it.")
    ]
    assert out[1] is other
    assert all("_hf_placeholder" not in record for record in (out[0], out[2], out[3]))
    assert out[0]["agent_ref"] == {"name": "math_with_judge"}, "what else a record says stays"


@given(
    st.lists(
        st.one_of(
            st.integers(0, 30).map(lambda n: placeholder(DAPO, n, suffix="!")),
            st.integers(0, 30).map(lambda n: placeholder(SKYWORK, n, template="{question}")),
            st.text().map(lambda text: {"dataset": "own", "question": text}),
        ),
        max_size=30,
    )
)
def test_order_and_number_of_rows_stay_and_collections_are_read_once(records: list[dict[str, Any]]) -> None:
    collections = Collections(
        dapo=[dapo_row(f"d{n}", str(n)) for n in range(31)], skywork=[skywork_row(f"s{n}", str(n)) for n in range(31)]
    )
    out = resolve(numbered(*records), collections)
    assert len(out) == len(records)
    for before, after in zip(records, out, strict=True):
        if before["dataset"] == "own":
            assert after is before
        else:
            row = before["_hf_placeholder"]["row"]
            assert after["expected_answer"] == str(row)
            assert after["question"] == (f"\n\nd{row}\n\n!" if before["dataset"] == DAPO else f"s{row}")
    assert len(collections.read) == len(set(collections.read))
    needed: dict[str, int] = {}
    for record in records:
        if record["dataset"] != "own":
            row = record["_hf_placeholder"]["row"]
            needed[record["dataset"]] = max(needed.get(record["dataset"], 0), row + 1)
    assert collections.given == sum(needed.values()), "and no further than to the last row that is needed"


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
def test_what_cannot_be_filled_is_refused_with_its_record_or_counted(record: dict[str, Any], says: str) -> None:
    unwrapped = {"prompt": [{"role": "user", "content": "What is 1+1?"}], "reward_model": {"ground_truth": "2"}}
    collections = Collections(
        dapo=[dapo_row("a"), unwrapped, dapo_row("a", " ")],
        skywork=[skywork_row("a", "1"), {**skywork_row("a"), "reward_model": {"ground_truth": "{1}"}}],
    )
    rows = numbered({"dataset": "own"}, record, placeholder(DAPO, 0, suffix="!"))
    with pytest.raises(UserError) as caught:
        resolve(rows, collections, where=lambda index: f"blend.jsonl:{index + 1}")
    assert caught.value.message.startswith("blend.jsonl:2: ") and says in caught.value.message
    if "unknown collection" in says:
        assert caught.value.hint == f"did you mean {DAPO}?"
    report = ReadReport()
    kept = list(resolve_placeholders(rows, report=report, read=collections, on_error="skip"))
    assert [row.index for row in kept] == [0, 2]
    assert report.skipped == {UNRESOLVED: 1} and says in report.samples[0]["reason"]


def test_an_iterator_is_refused_rather_than_half_read() -> None:
    with pytest.raises(TypeError, match="iterated again"):
        resolve_placeholders(iter(numbered()), report=ReadReport())


def test_collections_come_from_the_hub(hub: Hub, tmp_path: Path) -> None:  # noqa: F811
    """With the layouts of the two datasets: one Parquet file without a split's name, and one a split."""

    def parquet(rows: list[dict[str, Any]]) -> bytes:
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=2)
        return sink.getvalue()

    hub.add(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        {"data/dapo-math-17k.parquet": parquet([dapo_row(f"d{n}", str(n)) for n in range(7)])},
    )
    hub.add(
        "Skywork/Skywork-OR1-RL-Data",
        {
            "data/math-00000-of-00001.parquet": parquet([skywork_row(f"s{n}", str(n)) for n in range(7)]),
            "data/code-00000-of-00001.parquet": parquet([skywork_row("code", "no")]),
        },
    )
    rows = numbered(placeholder(DAPO, 6, prefix=ASKED), placeholder(SKYWORK, 4, template="{question}"))
    out = [row.value for row in resolve_placeholders(rows, report=ReadReport())]
    assert [(record["question"], record["expected_answer"]) for record in out] == [
        (f"{ASKED}\n\nd6", "6"),
        ("s4", "4"),
    ]
    own = tmp_path / "own.parquet"
    own.write_bytes(parquet([skywork_row("mine", "1")]))
    references = {"own": Reference(str(own), answers_in_list=True)}
    (row,) = resolve_placeholders(
        numbered(placeholder("own", 0, template="{question}?")), references, report=ReadReport()
    )
    assert row.value["responses_create_params"]["input"][0]["content"] == "mine?"
