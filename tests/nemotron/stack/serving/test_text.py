"""What is said while an answer is written is together what the parsers make of the whole, however it is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nemotron.kit.chat import opening_of, parse_response, parse_tool_calls
from nemotron.stack.serving.text import Delta, ResponseText, TokenText, begun

TOOLS = [{"name": "add", "parameters": {"properties": {"a": {"type": "integer"}, "note": {"type": "string"}}}}]
CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>",
    "<parameter=note>", "</parameter>", "<TOOLCALL>", "</TOOLCALL>", '[{"name": "add", "arguments": {"a": 1}}]', CALL,
    '<TOOLCALL>[{"name": "add", "arguments": {}}]</TOOLCALL>', "\n", " ", "1", "so", "é", "<", "</", "<tool", "]",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def pieces(text: str, cuts: list[int]) -> list[str]:
    """`text` cut at these places, as far as it has them."""
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]


def said(response: ResponseText, parts: list[str]) -> Delta:
    deltas = [response.push(part) for part in parts] + [response.end()]
    return Delta(
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        [call for delta in deltas for call in delta.calls],
    )


@settings(max_examples=400, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 10_000), max_size=20), st.sampled_from(["<think>\n", "<think></think>"]))
def test_the_pieces_are_the_whole(text: str, cuts: list[int], opened: str) -> None:
    reasoning, answer = parse_response(opened + text)
    content, calls = parse_tool_calls(answer, TOOLS)
    delta = said(ResponseText(opening_of("user: x" + opened), TOOLS), pieces(text, cuts))
    assert (delta.reasoning or None, delta.content) == (reasoning, content)
    assert sorted(map(str, delta.calls)) == sorted(
        map(str, calls)
    )  # XML calls come before lists, whichever stood first


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 10_000), max_size=20))
def test_without_tools_calls_stay_in_the_answer(text: str, cuts: list[int]) -> None:
    delta = said(ResponseText("reasoning", None), pieces(text, cuts))
    reasoning, answer = parse_response("<think>\n" + text)
    assert (delta.reasoning or None, delta.content, delta.calls) == (reasoning, answer, [])


@pytest.mark.parametrize(
    "text", ["so <think> 1", "because</think>4", " <think>because</think> 4", "<thi", "<think>", ""]
)
def test_a_response_that_opens_its_own_reasoning_begins_with_the_tag(text: str) -> None:
    for cuts in ([], list(range(len(text)))):
        delta = said(ResponseText("unknown", None), pieces(text, cuts))
        expected = parse_response(text) if text.lstrip().startswith("<think>") else (None, text.strip())
        assert (delta.reasoning or None, delta.content) == expected


def test_reasoning_and_answer_are_said_before_they_end() -> None:
    response = ResponseText("reasoning", TOOLS)
    parts = ("be", "cause", "</thi", "nk>\n", "It", " is ", "4", f".\n{CALL[:-2]}", ">")
    assert [response.push(part) for part in parts] == [
        Delta("be"), Delta("cause"), Delta(), Delta(), Delta(content="It"), Delta(content=" is"), Delta(content=" 4"),
        Delta(content="."), Delta(calls=[{"name": "add", "arguments": {"a": 1}}]),
    ]  # fmt: skip
    assert not response.reasons and response.end() == Delta()


def test_what_cannot_become_a_call_is_not_held_back() -> None:
    assert ResponseText("answer", TOOLS).push("a <tool_call> is text") == Delta(content="a <tool_call> is text")


@pytest.mark.parametrize(
    ("prompt", "opening"), [("a<think>\n", "reasoning"), ("a<think></think>", "answer"), ("a\n", "unknown")]
)
def test_a_prompt_says_what_its_response_begins_with(prompt: str, opening: str) -> None:
    assert opening_of(prompt) == opening


def test_the_end_of_a_text_may_be_the_beginning_of_a_mark() -> None:
    assert [begun(text, ("abc", "ca")) for text in ("xab", "a", "abc", "x", "")] == [2, 1, 1, 0, 0]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes, and a few longer tokens: most characters outside ASCII are several tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["STOP and stop, the end"] * 3, trainer)
    return made


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 279), max_size=30))
def test_tokens_are_the_text_that_the_tokenizer_decodes(tokenizer: Tokenizer, ids: list[int]) -> None:
    text = TokenText(tokenizer, (0,))
    shown = "".join(text.push(token) for token in ids)
    assert shown + text.end() == tokenizer.decode(ids, skip_special_tokens=False) and text.stopped_by is None


@settings(max_examples=200, deadline=None)
@given(st.text("STOPabé\n", max_size=30), st.lists(st.text("STOPé\n", min_size=1, max_size=5), min_size=1, max_size=3))
def test_a_text_ends_before_the_first_stop_string(tokenizer: Tokenizer, whole: str, stops: list[str]) -> None:
    text = TokenText(tokenizer, (0,), stops)
    shown = "".join(text.push(token) for token in tokenizer.encode(whole).ids if text.stopped_by is None)
    shown += text.end()
    # The first one to be complete ends it: of several in one token, the one that begins first.
    assert not any(stop in shown for stop in stops)
    if text.stopped_by is None:
        assert shown == whole
    else:
        assert text.stopped_by in stops and whole.startswith(shown + str(text.stopped_by))


def test_a_stop_token_ends_it_and_is_not_shown(tokenizer: Tokenizer) -> None:
    text = TokenText(tokenizer, (0,))
    assert [text.push(token) for token in (*tokenizer.encode("so").ids, 0)][-1] == "" and text.end() == ""
    assert text.stopped_by == 0


def test_half_a_character_is_held_back_and_shown_as_such_at_the_end(tokenizer: Tokenizer) -> None:
    text, (first, second) = TokenText(tokenizer, (0,)), tokenizer.encode("é").ids
    assert (text.push(first), text.push(second)) == ("", "é")
    assert (text.push(first), text.end()) == ("", "\ufffd")
