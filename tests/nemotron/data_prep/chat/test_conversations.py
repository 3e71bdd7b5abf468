"""Conversations: what is protected, reasoning control, and training spans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemotron.data_prep.chat.conversations import (
    Conversation,
    ConversationTable,
    ProtectedPrompts,
    control_reasoning,
    training_spans,
)
from nemotron.kit.chat import render_with_mask


def turn(question: str, answer: str = "yes", **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]


def conversation(*turns: list[dict[str, Any]]) -> Conversation:
    return Conversation("mine", [message for pair in turns for message in pair], "train")


def test_prompts_of_evaluation_tasks_are_protected() -> None:
    protected = ProtectedPrompts(["12 + 30 = ?", "How many letters are in the word banana?"])
    assert not protected.overlap(conversation(turn("What colour is the sky on a clear day at noon?")))
    assert protected.overlap(conversation(turn("12+30=?")))  # too short for the n-gram rule
    assert protected.overlap(conversation(turn("Hi"), turn("Say: how many letters are in the word banana, please?")))
    assert not protected.overlap(conversation(turn("Hi", "How many letters are in the word banana?")))  # no user turn


def test_conversations_that_differ_in_the_ids_of_calls_are_equal_where_no_template_shows_them(tmp_path: Path) -> None:
    function = {"name": "add", "arguments": {"a": 2}}
    calls = [{"function": function}, {"id": "abc", "type": "function", "function": function}]
    alike = [conversation(turn("2?", "", tool_calls=[call])) for call in calls]
    assert alike[0].key() == alike[1].key() and alike[1].messages[1]["tool_calls"] == [calls[1]]
    own = tmp_path / "own.jinja"
    own.write_text("{% for message in messages %}{{ message.tool_calls }}{{ message.content }}{% endfor %}")
    assert alike[0].key(str(own)) != alike[1].key(str(own))


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


def test_a_trace_without_blanks_is_cut_at_a_character() -> None:
    trace = "まず数を数えます。それから足します。"
    originals = [conversation(turn(f"question {i}", reasoning_content=trace)) for i in range(200)]
    cut = [
        item.messages[1].get("reasoning_content", "")
        for item in control_reasoning(originals, off_share=0.0, truncated_share=1.0, seed=0)
    ]
    assert all(trace.startswith(each) for each in cut) and len(set(cut)) == len(trace)


def test_spans_train_every_answer_with_its_reasoning() -> None:
    multi = conversation(turn("a", reasoning_content="r1"), turn("b", reasoning_content="r2"), turn("c"))
    spans = list(training_spans(multi, "nano3"))
    assert [len(span.messages) for span in spans] == [2, 4, 6]
    trained = [
        text for span in spans for text, is_trained in render_with_mask(span.messages, template="nano3") if is_trained
    ]
    assert trained == ["r1\n</think>\nyes<|im_end|>", "r2\n</think>\nyes<|im_end|>", "yes<|im_end|>"]
    assert list(training_spans(conversation(turn("a"), turn("b")), "nano3")) == [conversation(turn("a"), turn("b"))]


def test_of_two_spans_only_the_first_trains_what_both_hold() -> None:
    mixed = conversation(turn("a", "first"), turn("b", "second", reasoning_content="r"), turn("c"))
    trained = [
        [text for text, is_trained in render_with_mask(span.messages, template="nano3") if is_trained]
        for span in training_spans(mixed, "nano3")
    ]
    assert trained == [["first<|im_end|>", "r\n</think>\nsecond<|im_end|>"], ["yes<|im_end|>"]]


@pytest.mark.parametrize(("most", "more"), [(None, False), (2, True), (3, False), (4, False)])
def test_a_cap_that_leaves_something_out_says_so(most: int | None, more: bool) -> None:
    table = ConversationTable()
    assert list(table.first("mine", iter(range(3)), most, "max_tasks")) == list(range(3))[:most]
    assert table.counts == ({"mine": {"the first only (max_tasks)": 2}} if more else {})
    assert ("max_tasks: the first 2 records of mine; more are there" in str(table)) == more
