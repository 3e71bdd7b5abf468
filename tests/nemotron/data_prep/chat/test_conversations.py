"""Conversations: reading, curation, reasoning control, and training spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_runspec.errors import UserError
from nemotron.data_prep.chat.conversations import (
    Conversation,
    ConversationTable,
    control_reasoning,
    curate_conversations,
    read_conversations,
    training_spans,
)
from nemotron.data_prep.sources.locations import list_files
from nemotron.data_prep.sources.reading import ReadReport
from nemotron.kit.chat import render_with_mask


def turn(question: str, answer: str = "yes", **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]


def conversation(*turns: list[dict[str, Any]]) -> Conversation:
    return Conversation("mine", [message for pair in turns for message in pair], "train")


def test_reading_drops_empty_fields_and_splits_by_content(tmp_path: Path) -> None:
    rows = [{"messages": [{**m, "reasoning_content": None} for m in turn(f"question {i}")]} for i in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(read_conversations("mine", list_files([str(tmp_path / "a.jsonl")]), "messages", 0.2, seed=0))
    assert found[0].messages == turn("question 0")
    assert 20 < sum(item.split == "valid" for item in found) < 60  # 40 expected, standard deviation 5.7


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"message": []}, r"a\.jsonl:1: field 'messages' is missing, did you mean 'message'\?"),
        ({"messages": []}, r"a\.jsonl:1: field 'messages' must be a list of messages"),
        (
            {"messages": [{"role": "usr", "content": "x"}]},
            r"a\.jsonl:1: message 0: unknown role 'usr', did you mean 'user'",
        ),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path: Path, row: dict[str, Any], complaint: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=complaint):
        list(read_conversations("mine", list_files([str(tmp_path / "a.jsonl")]), "messages", 0.2, seed=0))


def test_tools_come_with_their_conversation(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": '{"a": 1}'}]}
    messages = [{"role": "user", "content": "1+1?"}, call, {"role": "tool", "content": "2"}, *turn("Sure?")]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": messages, "tools": [{"name": "add"}]}) + "\n")
    (found,) = read_conversations("mine", list_files([str(path)]), "messages", 0.2, seed=0)
    assert found.tools == [{"name": "add"}]
    assert found.messages[1]["tool_calls"] == [{"name": "add", "arguments": {"a": 1}}]
    with path.open("a") as file:
        file.write(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl:2: message 1: calls 'add', which is not declared"):
        list(read_conversations("mine", list_files([str(path)]), "messages", 0.2, seed=0))
    report = ReadReport()
    assert len(list(read_conversations("mine", list_files([str(path)]), "messages", 0.2, 0, "skip", report))) == 1
    assert (report.records, report.skipped) == (1, {"tool without declaration": 1})


def test_control_tokens_anywhere_and_repetitions_whatever_their_ids() -> None:
    table = ConversationTable()
    call = {"name": "say", "arguments": {"text": "hm<|im_end|>"}}
    calling = conversation([{"role": "user", "content": "Say it."}, {"role": "assistant", "tool_calls": [call]}])
    first, second = (conversation([{**message, "id": i} for message in turn("Sure?")]) for i in range(2))
    assert list(curate_conversations([calling, first, second], [], table)) == [first]
    assert table.counts["mine"] == {"read": 3, "control token in a message": 1, "exact duplicate": 1}


def test_empty_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(UserError, match="source 'mine' is empty"):
        list(read_conversations("mine", list_files([str(tmp_path / "a.jsonl")]), "messages", 0.2, seed=0))


def test_curation_of_conversations() -> None:
    table = ConversationTable()
    good = conversation(turn("What colour is the sky on a clear day at noon?"))
    conversations = [
        good,
        conversation(turn("What colour is the sky on a clear day at noon?")),
        conversation(turn("Please end<|im_end|> the turn")),
        conversation([{"role": "user", "content": "Nobody answers this question."}]),
        conversation(turn("12+30=?")),
        conversation(turn("Now tell me: how many letters are in the word banana, please?")),
    ]
    prompts = ["12 + 30 = ?", "How many letters are in the word banana?"]
    assert list(curate_conversations(conversations, prompts, table)) == [good]
    assert table.counts["mine"] == {
        "read": 6,
        "exact duplicate": 1,
        "control token in a message": 1,
        "no assistant turn": 1,
        "overlaps evaluation prompt": 2,
    }


def test_reasoning_control_has_the_stated_shares() -> None:
    trace = " ".join(str(i) for i in range(10))
    originals = [conversation(turn(f"question {i}", reasoning_content=trace)) for i in range(4000)]
    controlled = list(control_reasoning(originals, off_share=0.1, truncated_share=0.03, seed=0))
    traces = [item.messages[1].get("reasoning_content") for item in controlled]
    off = sum(t is None for t in traces)
    truncated = [t for t in traces if t is not None and t != trace]
    # A tenth of the cut traces keep no word at all. Four standard deviations.
    assert abs(off - 4000 * 0.103) < 4 * (4000 * 0.1 * 0.9) ** 0.5
    assert abs(len(truncated) - 4000 * 0.027) < 4 * (4000 * 0.027) ** 0.5
    assert all(trace.startswith(t) for t in truncated)
    assert len(set(truncated)) == 9  # every length from 1 to 9 words
    assert all(item.messages[1]["content"] == "yes" for item in controlled)
    assert traces == [
        item.messages[1].get("reasoning_content")
        for item in reversed(list(control_reasoning(originals[::-1], off_share=0.1, truncated_share=0.03, seed=0)))
    ]
    assert originals[0].messages[1]["reasoning_content"] == trace  # the input is left alone


def test_spans_train_every_answer_with_its_reasoning() -> None:
    multi = conversation(turn("a", reasoning_content="r1"), turn("b", reasoning_content="r2"), turn("c"))
    spans = list(training_spans(multi))
    assert [len(span.messages) for span in spans] == [2, 4, 6]
    trained = [text for span in spans for text, is_trained in render_with_mask(span.messages) if is_trained]
    assert trained == ["r1\n</think>\nyes<|im_end|>", "r2\n</think>\nyes<|im_end|>", "yes<|im_end|>"]
    assert list(training_spans(conversation(turn("a"), turn("b")))) == [conversation(turn("a"), turn("b"))]


@pytest.mark.parametrize(("most", "more"), [(None, False), (2, True), (3, False), (4, False)])
def test_a_cap_that_leaves_something_out_says_so(most: int | None, more: bool) -> None:
    table = ConversationTable()
    assert list(table.first("mine", iter(range(3)), most, "max_tasks")) == list(range(3))[:most]
    assert table.counts == ({"mine": {"the first only (max_tasks)": 2}} if more else {})
    assert ("max_tasks: the first 2 records of mine; more are there" in str(table)) == more


def test_a_bad_record_behind_a_cap_stops_nobody(tmp_path: Path) -> None:
    lines = [json.dumps({"messages": turn(f"Say {i}")}) for i in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{"]))
    table = ConversationTable()
    own = read_conversations("mine", list_files([str(tmp_path / "a.jsonl")]), "messages", 0.2, seed=0)
    assert len(list(table.first("mine", own, 3, "max_conversations"))) == 3
    assert "more are there" in str(table)
