"""The API as clients know it, with an engine that answers by a script."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel, ValidationError
from scripted_server import Served

from nemotron.stack.serving.grammar import Grammar
from nemotron.stack.serving.requests import ChatMessage, ChatRequest, DetokenizeRequest

USER = [{"role": "user", "content": "What is 1 + 1?"}]
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"properties": {"a": {"type": "integer"}}}},
}
REASONS = "<|im_end|>\n<|im_start|>assistant\n<think>\n"
BROKEN = {"function": {"name": "f", "arguments": "{"}}
DEEP = {"function": {"name": "f", "arguments": "[" * 10_000 + "]" * 10_000}}
CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"


def test_a_chat(served: Served) -> None:
    served.says("because\n</think>\nIt is 2.")
    answer = served.client.chat.completions.create(model="tiny", messages=USER, temperature=0.5, top_p=0.9, seed=7)
    (choice,) = answer.choices
    assert served.prompt.endswith("<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert choice.message.role == "assistant" and choice.message.content == "It is 2."
    assert choice.message.reasoning_content == choice.message.reasoning == "because"
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None and choice.logprobs is None
    sampling = served.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 7)
    prompt = len(served.engine.asked[0][0])
    assert sampling.max_new_tokens == 1000 - prompt
    usage = answer.usage
    # 8 + 1 bytes of reasoning with its tag, 9 of the answer with the blank before it, and the token that ends the turn
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, 8 + 1 + 9 + 1)
    assert usage.completion_tokens_details.reasoning_tokens == 9
    assert not served.engine.running


def test_a_stream_is_together_the_whole(served: Served) -> None:
    text = f"because\n</think>\nSo: é.\n{CALL}"
    served.says(text)
    whole = served.client.chat.completions.create(model="tiny", messages=USER, tools=[ADD])
    chunks = list(
        served.client.chat.completions.create(
            model="tiny", messages=USER, tools=[ADD], stream=True, stream_options={"include_usage": True}
        )
    )
    *pieces, last = chunks
    deltas = [chunk.choices[0].delta for chunk in pieces]
    message = whole.choices[0].message
    assert deltas[0].role == "assistant" and all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == message.content == "So: é."
    assert "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas) == message.reasoning_content
    assert len(deltas) > len("because")  # a chunk a token
    (call,) = (call for delta in deltas for call in delta.tool_calls or ())
    assert call.index == 0 and call.function.name == message.tool_calls[0].function.name == "add"
    assert json.loads(call.function.arguments) == json.loads(message.tool_calls[0].function.arguments) == {"a": 1}
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + ["tool_calls"]
    assert last.choices == [] and last.usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_surrogate_pair_in_an_argument_stays_as_it_is_written(served: Served, stream: bool) -> None:
    served.says("</think>" + CALL.replace("\n1\n", '\n["\\ud83d"]\n').replace("=a>", "=b>"))
    add = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"b": {"type": "array"}}}}}
    out = served.client.chat.completions.create(model="tiny", messages=USER, tools=[add], stream=stream)
    chunks = list(out) if stream else [out]
    choices = [chunk.choices[0] for chunk in chunks]
    (call,) = [call for c in choices for call in (c.delta if stream else c.message).tool_calls or ()]
    assert json.loads(call.function.arguments) == {"b": '["\\ud83d"]'}


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers(served: Served, stream: bool) -> None:
    served.says("</think>one", "</think>two")
    out = served.client.chat.completions.create(model="tiny", messages=USER, n=2, seed=5, stream=stream)
    contents = ["", ""]
    for chunk in out if stream else [out]:
        for choice in chunk.choices:
            contents[choice.index] += (choice.delta if stream else choice.message).content or ""
    assert contents == ["one", "two"] and [sampling.seed for _, sampling in served.engine.asked] == [5, 6]
    if not stream:
        assert out.usage.completion_tokens == 2 * 5 and out.usage.prompt_tokens == len(served.engine.asked[0][0])


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_an_answer_and_the_engines_work(served: Served, stream: bool) -> None:
    served.says("</think>one END and what nobody waits for")
    served.engine.close_after = len(served.encode("</think>one END"))
    out = served.client.chat.completions.create(model="tiny", messages=USER, stop=["END"], stream=stream)
    chunks = list(out) if stream else [out]
    text = "".join((chunk.choices[0].delta if stream else chunk.choices[0].message).content or "" for chunk in chunks)
    last = chunks[-1].choices[0]
    assert text == "one" and (last.finish_reason, last.stop_reason) == ("stop", "END")
    assert served.engine.finished == {"stop": 1}


def test_a_stop_token_of_the_request_is_named(served: Served) -> None:
    served.follows(lambda prompt, sampling: served.encode("</think>a\nb"))
    (newline,) = served.encode("\n")
    out = served.client.chat.completions.create(
        model="tiny", messages=USER, extra_body={"stop_token_ids": [newline], "return_token_ids": True}
    )
    choice = out.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.stop_reason) == ("a", "stop", newline)
    assert choice.token_ids == served.encode("</think>a\n") and out.prompt_token_ids == served.engine.asked[0][0]


def test_an_answer_that_is_cut(served: Served) -> None:
    served.says("</think>a long answer")
    choice = served.client.chat.completions.create(model="tiny", messages=USER, max_completion_tokens=7).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("a long", "length")
    served.says("reasoning without an end")
    choice = served.client.chat.completions.create(model="tiny", messages=USER, max_tokens=9).choices[0]
    assert (choice.message.content, choice.message.reasoning_content) == ("", "reasoning")


def test_log_probabilities(served: Served) -> None:
    served.says("</think>é")
    out = served.client.chat.completions.create(model="tiny", messages=USER, logprobs=True, top_logprobs=1)
    tag, first, second, end = out.choices[0].logprobs.content
    assert tag.token == "</think>" and bytes(tag.bytes) == b"</think>" and tag.logprob == -0.5
    assert first.bytes is second.bytes is None  # halves of a character
    assert (end.token, tag.top_logprobs[0].logprob) == ("<|im_end|>", -0.25)
    stream = served.client.chat.completions.create(
        model="tiny", messages=USER, logprobs=True, stream=True,
        extra_body={"return_tokens_as_token_ids": True, "return_token_ids": True},
    )  # fmt: skip
    chunks = [chunk for chunk in stream if chunk.choices]
    named = [
        entry.token for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
    ]
    ids = served.encode("</think>é<|im_end|>")
    assert named == [f"token_id:{token}" for token in ids]
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == ids
    assert chunks[0].prompt_token_ids == served.engine.asked[-1][0]


def test_tools_are_shown_and_results_come_back(served: Served) -> None:
    served.says(f"</think>{CALL}{CALL}")
    choice = served.client.chat.completions.create(model="tiny", messages=USER, tools=[ADD]).choices[0]
    first, second = choice.message.tool_calls
    assert first.id != second.id and choice.message.content is None and choice.finish_reason == "tool_calls"
    assert "<name>add</name>" in served.prompt and "<description>Adds.</description>" in served.prompt
    served.says("</think>2")
    talk = [*USER, choice.message.model_dump(), {"role": "tool", "tool_call_id": first.id, "content": "two"}]
    served.client.chat.completions.create(model="tiny", messages=talk, tools=[ADD])
    assert CALL in served.prompt and "<tool_response>\ntwo\n</tool_response>" in served.prompt
    one = served.client.chat.completions.create(model="tiny", messages=USER, tools=[ADD], parallel_tool_calls=False)
    assert one.choices[0].message.tool_calls is None
    served.says(f"</think>{CALL}{CALL}")
    one = served.client.chat.completions.create(model="tiny", messages=USER, tools=[ADD], parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls) == 1
    none = served.client.chat.completions.create(model="tiny", messages=USER, tools=[ADD], tool_choice="none")
    assert none.choices[0].message.tool_calls is None and "<name>add</name>" not in served.prompt
    assert none.choices[0].message.content == f"{CALL}{CALL}".strip()


@pytest.mark.parametrize(
    ("template", "fields", "end"),
    [
        ("super3", {}, "<think>\n"),
        ("super3", {"chat_template_kwargs": {"enable_thinking": False}}, "<think></think>"),
        ("super3", {"reasoning_effort": "none"}, "<think></think>"),
        ("super3", {"max_thinking_tokens": 0}, "<think></think>"),
        ("super3", {"reasoning_effort": "low"}, "1 + 1?\n\n{reasoning effort: low}" + REASONS),
        ("super3", {"chat_template_kwargs": {"low_effort": True}}, "{reasoning effort: low}" + REASONS),
        ("ultra3", {"reasoning_effort": "medium"}, "{reasoning effort: efficient}" + REASONS),
        ("nano3", {"reasoning_effort": "high"}, "1 + 1?" + REASONS),
    ],
)  # fmt: skip
def test_how_much_it_reasons(serve: Callable[..., Served], template: str, fields: dict[str, Any], end: str) -> None:
    served = serve(template)
    served.says("2")
    choice = served.client.chat.completions.create(model="tiny", messages=USER, extra_body=fields).choices[0]
    assert served.prompt.endswith(end)
    thinks = end.endswith("<think>\n")
    assert (choice.message.content, choice.message.reasoning_content) == (("", "2") if thinks else ("2", None))


@pytest.mark.parametrize(
    "fields", [{"max_thinking_tokens": 9}, {"thinking_token_budget": 9}, {"nvext": {"max_thinking_tokens": 9}}]
)
def test_a_budget_of_reasoning(served: Served, fields: dict[str, Any]) -> None:
    served.says("</think>2")
    served.client.chat.completions.create(model="tiny", messages=USER, extra_body=fields)
    budget = served.sampling.budget
    assert budget is not None and budget.max_tokens == 9
    assert (served.decode(budget.tag_ids), served.decode(budget.end_ids)) == ("</think>", "\n</think>\n")


def test_a_schema_holds_the_answer_behind_the_reasoning(served: Served) -> None:
    served.says("</think>{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    served.client.chat.completions.create(model="tiny", messages=USER, response_format=wanted)
    assert served.sampling.grammar is not None and served.decode(served.sampling.grammar_after) == "</think>"
    served.client.chat.completions.create(
        model="tiny", messages=USER, response_format={"type": "json_object"}, reasoning_effort="none"
    )
    assert served.sampling.grammar is not None and served.sampling.grammar_after == ()
    served.client.chat.completions.create(model="tiny", messages=USER, response_format={"type": "text"})
    assert served.sampling.grammar is None
    wanted["json_schema"]["schema"] = {"type": "no such"}  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match=r"response_format: .*no such"):
        served.client.chat.completions.create(model="tiny", messages=USER, response_format=wanted)


@pytest.mark.parametrize("template", ["super3", "nano2"])
def test_a_call_can_be_required(serve: Callable[..., Served], template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(template)
    compiled: list[str] = []
    monkeypatch.setattr(Grammar, "__init__", lambda self, grammar, *_: compiled.append(grammar))
    served.says(f"</think>{CALL}")
    other = {"type": "function", "function": {"name": "other"}}
    for choice, names in (
        ("required", {"add", "other"}),
        ({"type": "function", "function": {"name": "other"}}, {"other"}),
    ):
        served.client.chat.completions.create(model="tiny", messages=USER, tools=[ADD, other], tool_choice=choice)
        assert set(re.findall(r"\b(?:add|other)\b", compiled[-1])) == names
        assert ("TOOLCALL" in compiled[-1]) == (template == "nano2") and "add" in served.prompt  # all are shown
    served.client.chat.completions.create(model="tiny", messages=USER, tools=[ADD], tool_choice="auto")
    assert served.sampling.grammar is None


def test_completions(served: Served) -> None:
    served.says(" there", end="</s>")
    out = served.client.completions.create(model="tiny", prompt=["hello", "hi"], max_tokens=99, n=1)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in out.choices] == [
        (0, " there", "stop"), (1, " there", "stop"),
    ]  # fmt: skip
    assert [served.decode(prompt) for prompt, _ in served.engine.asked] == ["hello", "hi"]
    chunks = list(served.client.completions.create(model="tiny", prompt=served.encode("hello"), stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " there" and served.sampling.max_new_tokens == 16
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_offsets_in_a_stream_are_those_of_a_whole_response(served: Served) -> None:
    """The text of `f` and `o` is held back while it may begin the stop string; a character takes several tokens."""
    served.says("foam é", end="</s>")
    ask = {"model": "tiny", "prompt": "a", "logprobs": 1, "stop": ["foobar"], "max_tokens": 99}
    whole = served.client.completions.create(**ask).choices[0]
    chunks = [chunk.choices[0].logprobs for chunk in served.client.completions.create(**ask, stream=True)]
    streamed = [offset for logprobs in chunks if logprobs for offset in logprobs.text_offset]
    assert whole.text == "foam é" and streamed == whole.logprobs.text_offset


def test_an_echoed_prompt_has_log_probabilities(served: Served) -> None:
    served.says("c", end="</s>")
    choice = served.client.completions.create(model="tiny", prompt="ab", echo=True, logprobs=1, max_tokens=1).choices[0]
    assert served.sampling.prompt_logprobs and choice.text == "abc"
    logprobs = choice.logprobs
    assert logprobs.tokens == ["a", "b", "c"] and logprobs.token_logprobs == [None, -0.5, -0.5]
    assert logprobs.text_offset == [0, 1, 2]
    first = served.decode([0])
    assert logprobs.top_logprobs == [None, {first: -0.25, "b": -0.5}, {first: -0.25, "c": -0.5}]
    alone = served.client.completions.create(model="tiny", prompt="ab", echo=True, logprobs=1, max_tokens=0).choices[0]
    assert (alone.text, alone.logprobs.tokens) == ("ab", ["a", "b"])
    ask = {"prompt": "ab", "echo": True, "max_tokens": 0, "return_token_ids": True}
    none = served.http.post("/v1/completions", json=ask).json()
    assert none["choices"][0]["token_ids"] == [] and none["usage"]["completion_tokens"] == 0
    assert none["choices"][0]["finish_reason"] == "length"


def test_a_prompt_that_fills_the_length_can_be_scored(served: Served) -> None:
    ask = {"prompt": "a" * 1000, "echo": True, "logprobs": 0}
    (choice,) = served.http.post("/v1/completions", json=ask | {"max_tokens": 0}).json()["choices"]
    assert choice["text"] == "a" * 1000 and len(choice["logprobs"]["tokens"]) == 1000
    for body in (ask | {"max_tokens": 1}, ask | {"max_tokens": 0, "prompt": "a" * 1001}):
        refused = served.http.post("/v1/completions", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"max_thinking_tokens": 0}, "max_thinking_tokens"),
        ({"nvext": {"max_thinking_tokens": 0}}, "max_thinking_tokens"),
    ],
)
def test_a_template_that_always_reasons_is_not_asked_without(
    serve: Callable[..., Served], tmp_path: Path, plain_chat: str, fields: dict[str, Any], param: str
) -> None:
    always = tmp_path / "always.jinja"
    plain = Path(plain_chat).read_text()
    always.write_text(plain.replace("assistant\n{%", "assistant\n<think>\n{%"))
    body = {"messages": USER, **fields}
    refused = serve(str(always)).http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    assert "the chat template of tiny opens it all the same" in refused.json()["error"]["message"]
    assert serve(plain_chat).http.post("/v1/chat/completions", json=body).status_code == 200
    talk = [{"role": "user", "content": "Why? /think"}]  # which nano2's template obeys before any switch
    assert serve("nano2").http.post("/v1/chat/completions", json=body | {"messages": talk}).status_code == 400


def test_an_answer_is_not_held_where_nobody_knows_when_it_begins(serve: Callable[..., Served], tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    turns = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    template.write_text(turns + "{% if add_generation_prompt %}<think>{% endif %}{% if tools %}{{ tools }}{% endif %}")
    served = serve(str(template))
    served.says('{"a": 1}')
    body = {"messages": USER, "response_format": {"type": "json_object"}}
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "opens reasoning and does not show what ends it" in answer.text
    assert answer.json()["error"]["param"] == "response_format" and not served.engine.asked


def test_tools_that_a_template_does_not_show_are_refused(serve: Callable[..., Served], plain_chat: str) -> None:
    served = serve(plain_chat)
    body = {"messages": USER, "tools": [ADD]}
    for path in ("/v1/chat/completions", "/tokenize"):
        error = served.http.post(path, json=body).json()["error"]
        assert error["param"] == "tools" and "the chat template of tiny shows no tools" in error["message"]
    assert served.http.post("/v1/chat/completions", json=body | {"tool_choice": "none"}).status_code == 200


def test_models_and_tokens(served: Served) -> None:
    (model,) = served.client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 1000) and served.client.models.retrieve("tiny") == model
    ids = served.encode("hi<|im_end|>")
    said = served.http.post("/tokenize", json={"prompt": "hi<|im_end|>", "return_token_strs": True}).json()
    assert said == {"count": 3, "max_model_len": 1000, "tokens": ids, "token_strs": ["h", "i", "<|im_end|>"]}
    assert served.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "hi<|im_end|>"}
    served.says("2")
    served.client.chat.completions.create(model="tiny", messages=USER, tools=[ADD])
    said = served.http.post("/tokenize", json={"model": "tiny", "messages": USER, "tools": [ADD]}).json()
    assert said["tokens"] == served.engine.asked[0][0]
    assert served.http.get("/tokenizer_info").json()["eos_token"] == "</s>"
    assert served.http.get("/health").status_code == served.http.head("/health").status_code == 200


def test_texts_are_rendered_beside_the_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def render(*args: Any, **kwargs: Any) -> str:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return "text"

    for module in ("app", "prompt"):
        monkeypatch.setattr(f"nemotron.stack.serving.{module}.render_chat", render)
    for path in ("/tokenize", "/v1/chat/completions"):
        assert served.http.post(path, json={"messages": USER}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"messages": USER, "temprature": 1}, 400, "temprature", "did you mean 'temperature'"),
        ({"messages": USER, "temperature": 3}, 400, "temperature", "temperature: 3 is not served; 0 to 2 is"),
        ({"messages": USER, "frequency_penalty": 0.5}, 400, "frequency_penalty", "0.5 is not served; only 0 is"),
        ({"messages": []}, 400, "messages", "messages: [] is not served; at least 1 in it is expected"),
        ({"messages": USER * 10_001}, 400, "messages", "… is not served; at most 10000 in it is expected"),
        ({}, 400, "messages", "messages: is missing"),
        ({"messages": [{"role": "owner", "content": "x"}]}, 400, "messages", "unknown role 'owner'; roles are"),
        ({"messages": [{"role": "usr", "content": "x"}]}, 400, "messages", "did you mean 'user'?; roles are"),
        ({"messages": [*USER, {"role": "system", "content": "x"}]}, 400, "messages", "can only come first"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, "there is only text"),
        ({"messages": USER, "model": "gpt"}, 404, "model", "'tiny' is served"),
        ({"messages": USER, "max_tokens": 1000}, 400, "max_tokens", "takes 1000 tokens"),
        ({"messages": USER, "max_completion_tokens": 1000}, 400, "max_completion_tokens", "takes 1000 tokens"),
        ({"messages": [{"role": "user", "content": "x" * 999}], "max_tokens": 1}, 400, "messages", "takes 1000 tokens"),
        ({"messages": USER, "stop_token_ids": [999999]}, 400, "stop_token_ids", "token 999999 is not known"),
        ({"messages": USER, "top_k": 5}, 400, "top_k", "top_k: 5 is not served; only 0 is, which changes nothing"),
        ({"messages": USER, "tools": [{"function": {"name": "a<b"}}]}, 400, "tools.0.function.name",
         '"a<b" is no name that'),
        ({"messages": USER, "tools": [{"function": {"name": "f", "parameters": {"properties": {"a\nb": {}}}}}]}, 400,
         "tools.0.function.parameters", r'"a\nb" is no name'),
        ({"messages": USER, "max_tokens": 20, "max_thinking_tokens": 19}, 400, "max_thinking_tokens", "no answer"),
        ({"messages": USER, "chat_template_kwargs": {"shout": 1}}, 400, "chat_template_kwargs", "no switch 'shout'"),
        ({"messages": USER, "chat_template_kwargs": {"enable_thinking": "false"}}, 400, "chat_template_kwargs",
         "enable_thinking: 'false' is text; false without quotes is expected"),
        ({"messages": USER, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", "no switch"),
        ({"messages": USER, "reasoning_effort": "medium"}, 400, "reasoning_effort", "none, minimal, low, high"),
        ({"messages": USER, "tool_choice": "required"}, 400, "tool_choice", "there are no tools"),
        ({"messages": [{"role": "user", "content": "a b " * 10**6}]}, 400, None, "takes 1000 tokens"),
        ({"messages": USER, "n": 128, "stop": ["x" * 257]}, 400, "stop.0", "at most 256"),
        ({"messages": USER, "max_thinking_tokens": 0, "chat_template_kwargs": {"enable_thinking": True}}, 400,
         "max_thinking_tokens", "contradict"),
        ({"messages": USER, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": 5}}}]},
         400, None, "required: a list"),
        ({"messages": USER, "top_logprobs": 2}, 400, "top_logprobs", "2 needs logprobs"),
        ({"messages": USER, "response_format": {"type": "json_schema"}}, 400, "response_format", "json_schema"),
        ({"messages": USER, "response_format": {"type": "json_objct"}}, 400, "response_format.type",
         'response_format.type: "json_objct" is not served; did you mean json_object?'),
        ({"messages": USER, "tools": [ADD], "tool_choice": "requird"}, 400, "tool_choice", "did you mean required?"),
        ({"messages": USER, "tools": [ADD], "tool_choice": "x"}, 400, "tool_choice", "from: none, auto, required"),
        ({"messages": USER, "tools": [ADD], "tool_choice": {"type": "function"}}, 400, "tool_choice.function",
         "tool_choice.function: is missing"),
        ({"messages": USER, "tools": [ADD], "tool_choice": {"function": {"name": "ad"}}}, 400, "tool_choice",
         "no tool 'ad' in tools; did you mean add?"),
        ({"messages": USER, "tools": [{"type": "retrieval", "function": ADD["function"]}]}, 400, "tools.0.type",
         '"retrieval" is not served; choose from: function'),
        ({"messages": USER, "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, 400,
         "reasoning_effort", "contradict"),
        ({"messages": USER, "reasoning_effort": "hihg"}, 400, "reasoning_effort", "did you mean high?"),
        ({"messages": USER, "ignore_eos": True}, 400, "ignore_eos", "true is not served; choose from: false"),
        ({"messages": USER, "n": "two"}, 400, "n", 'n: "two" is not served; a whole number is expected'),
        ({"messages": USER, "tool_choice": 5}, 400, "tool_choice", "5 is not served; none, auto, required or"),
        ({"messages": USER, "stop": 5}, 400, "stop", "stop: 5 is not served; text or a list of texts is expected"),
        ({"messages": USER, "stop": {"a": "x " * 500}}, 400, "stop", "x … is not served; text or a list"),
        ({"messages": USER, "stream": "maybe"}, 400, "stream", "true or false is expected"),
        ({"messages": USER, "temperature": {"a": 1}}, 400, "temperature", '{"a": 1} is not served; a number'),
        ({"messages": USER, "logit_bias": {"5": "x" * 99}}, 400, "logit_bias.5", "x… is not served; a number"),
        ({"messages": USER, "nvext": {"max_thinking_tokens": -1}}, 400, "nvext.max_thinking_tokens", "at least 0 is"),
        ({"messages": [{"role": "assistant", "tool_calls": [BROKEN]}]}, 400, "messages", "no JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [DEEP]}]}, 400, "messages", "nested too deeply"),
        ({"messages": USER, "stream": True, "stream_options": {"include_usag": True}}, 400,
         "stream_options.include_usag", "unknown key, did you mean 'include_usage'?"),
        ({"messages": USER, "stream": True, "stream_options": {"continuous_usage_stats": True}}, 400,
         "stream_options.continuous_usage_stats", "true is not served; choose from: false"),
        ({"messages": USER, "stream_options": {"include_usage": True}}, 400, "stream_options", "needs stream: true"),
        ({"messages": USER, "tools": [ADD] * 1001}, 400, "tools", "at most 1000 in it"),
        ({"messages": USER, "response_format": {"type": "json_object", "schema": {}}}, 400, "response_format.schema",
         "unknown key, did you mean 'json_schema'?"),
        ({"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}},
         400, "response_format.json_schema.shema", "unknown key, did you mean 'schema'?"),
        ({"messages": USER, "tools": [{"function": {"name": "f", "paramters": {}}}]}, 400,
         "tools.0.function.paramters", "unknown key, did you mean 'parameters'?"),
        ({"messages": USER, "tools": [{**ADD, "cache": 1}]}, 400, "tools.0.cache", "unknown key"),
        ({"messages": USER, "tools": [ADD], "tool_choice": {"function": {"name": "add", "nam": 1}}}, 400,
         "tool_choice.function.nam", "unknown key, did you mean 'name'?"),
        ({"messages": USER, "tools": [ADD], "tool_choice": {"function": {"name": "add"}, "typ": 1}}, 400,
         "tool_choice.typ", "unknown key, did you mean 'type'?"),
        ({"messages": USER, "nvext": {"max_thinking_token": 1}}, 400, "nvext.max_thinking_token", "did you mean 'max"),
    ],
)  # fmt: skip
def test_what_is_refused(served: Served, body: dict[str, Any], status: int, param: str | None, message: str) -> None:
    answer = served.http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == status and message in error["message"], error
    assert "Input should" not in error["message"] and "\n" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"} and (param is None or error["param"] == param)
    assert not served.engine.asked


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/completions", {"prompt": 5}, "prompt", "prompt: text, a list of texts, a list of token ids, or"),
        ("/v1/completions", {"prompt": ["a", 5]}, "prompt", "prompt: text, a list of texts, a list of token"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt", "prompt: text, a list of texts, a list of token ids, or"),
        ("/v1/completions", {"prompt": []}, "prompt", "prompt: is empty"),
        ("/v1/completions", {"prompt": ["a", ""]}, "prompt", "prompt: is empty"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens", "0 needs echo: true"),
        ("/v1/completions", {"prompt": "a", "echo": True, "stream": True}, "echo", "not served with stream: true"),
        ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of", "3 is not served; choose from: 1"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix", '"b" is not served; null is expected'),
        # a key of the other endpoint is not proposed
        ("/v1/completions", {"prompt": "a", "max_completion_tokns": 1}, "max_completion_tokns", "unknown key"),
        ("/tokenize", {"text": "a"}, "prompt", "prompt: is missing"),
        ("/tokenize", {"messages": USER, "prmpt": "a"}, "prmpt", "unknown key"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0", '"a" is not served; a whole number is expected'),
    ],
)  # fmt: skip
def test_what_other_endpoints_refuse(served: Served, path: str, body: dict[str, Any], param: str, message: str) -> None:
    error = served.http.post(path, json=body).json()["error"]
    assert error["param"] == param and message in error["message"] and "Input should" not in error["message"], error
    assert "max_completion_tokens" not in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("kind", "field", "item"),
    [
        (ChatRequest, "messages", 5),
        (ChatRequest, "tools", {"name": "f"}),
        (ChatRequest, "stop_token_ids", "a"),
        (ChatMessage, "tool_calls", {"function": "f"}),
        (DetokenizeRequest, "tokens", "a"),
    ],
)
def test_a_list_ends_at_its_first_wrong_item(kind: type[BaseModel], field: str, item: Any) -> None:
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate({"messages": USER, "role": "assistant"} | {field: [item] * 1000})
    of_list = [problem["loc"][1] for problem in wrong.value.errors() if problem["loc"][0] == field]
    assert set(of_list) == {0}


def test_more_answers_than_there_are_places_are_refused_before_their_prompts_are_read(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemotron.stack.serving.prompt.encode", lambda *_: pytest.fail("a prompt was tokenised"))
    error = served.http.post("/v1/completions", json={"prompt": ["a"] * 8, "n": 126}).json()["error"]
    assert "1008 answers asked for at once: this server holds 1000" in error["message"] and error["param"] == "prompt"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": USER * 4},
        {"messages": USER, "chat_template_kwargs": {"shout": True}},
        {"messages": USER, "reasoning_effort": "low"},
        {"messages": USER, "max_thinking_tokens": 5},
    ],
)
def test_a_refusal_shows_no_path_of_the_server(
    serve: Callable[..., Served], tmp_path: Path, body: dict[str, Any]
) -> None:
    template = tmp_path / "own.jinja"
    few = "{% if messages | length > 3 %}{{ raise_exception('too much') }}{% endif %}"
    template.write_text(f"{few}{{{{ messages[0].content }}}}<|im_end|>")
    error = serve(str(template)).http.post("/v1/chat/completions", json=body).json()["error"]
    assert "the chat template of tiny" in error["message"] and str(tmp_path) not in error["message"]


def test_errors_in_the_shape_of_openai(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        served.client.chat.completions.create(model="gpt", messages=USER)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        served.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 2000}])
    assert too_long.value.code == "context_length_exceeded"
    for content, header in ((b"{", "application/json"), (b"{}", "text/plain"), (b"[1]", "application/json")):
        answer = served.http.post("/v1/chat/completions", content=content, headers={"Content-Type": header})
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    for body in ({"prompt": "a", "\ud800": 1}, {"prompt": "\ud800"}, {"prompt": "a", "model": "\ud800"}):
        content = json.dumps(body).encode()  # escaped: no UTF-8 can say it
        answer = served.http.post("/tokenize", content=content, headers={"Content-Type": "application/json"})
        said = answer.json()["error"]["message"]
        assert answer.status_code in (400, 404) and ("lone surrogate" in said or r"\ud800" in said)
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405)):
        answer = served.http.request(method, path)
        assert answer.status_code == status and path in answer.json()["error"]["message"]
        assert answer.headers.get("allow") == ("POST" if status == 405 else None)
    answer = served.http.post("/v1/completions", json={"prompt": [5, 9999]})
    assert answer.status_code == 400 and "9999" in answer.json()["error"]["message"]


def test_a_full_queue(served: Served) -> None:
    served.says("</think>2")
    served.engine.places = 1
    with pytest.raises(openai.InternalServerError) as full:
        served.client.chat.completions.create(model="tiny", messages=USER, n=2)
    assert full.value.status_code == 503 and full.value.response.headers["retry-after"] == "1"
    assert full.value.code == "queue_full"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_engine(served: Served, stream: bool) -> None:
    served.follows(lambda prompt, sampling: [*served.encode("</think>a"), -1])
    with pytest.raises(openai.APIError, match="out of memory"):
        list(served.client.chat.completions.create(model="tiny", messages=USER, stream=stream))
    assert not served.engine.running


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_may_take_too_long(serve: Callable[..., Served], stream: bool) -> None:
    served = serve(timeout=0.05)
    served.says("never")
    served.engine.close_gate()
    with pytest.raises(openai.APIError, match=r"not answered within 0\.05 s"):
        list(served.client.chat.completions.create(model="tiny", messages=USER, stream=stream))
    assert served.engine.finished == {"cancelled": 1}


def test_a_stopping_engine(served: Served) -> None:
    served.engine.stop(0)
    with pytest.raises(openai.InternalServerError) as stopping:
        served.client.chat.completions.create(model="tiny", messages=USER)
    assert stopping.value.status_code == 503


def test_a_base_model_completes_and_does_not_chat(serve: Callable[..., Served]) -> None:
    served = serve(None)
    served.says("c", end="</s>")
    assert served.client.completions.create(model="tiny", prompt="ab").choices[0].text == "c"
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        served.client.chat.completions.create(model="tiny", messages=USER)


def test_a_key(serve: Callable[..., Served]) -> None:
    served = serve(api_key="sésame")
    assert served.http.get("/v1/models").status_code == served.http.get("/metrics").status_code == 401
    assert served.http.get("/health").status_code == served.http.get("/").status_code == 200
    for key, status in (("wrong", 401), ("sésame", 200)):
        headers = {"Authorization": f"Bearer {key}".encode()}
        assert served.http.get("/v1/models", headers=headers).status_code == status
    error = served.http.post("/v1/chat/completions", json={}).json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


def test_who_may_ask(serve: Callable[..., Served]) -> None:
    served = serve(is_local=True)
    for host, status in (("127.0.0.1:8000", 200), ("localhost", 200), ("[::1]:9", 200), ("evil.example:8000", 403)):
        assert served.http.get("/v1/models", headers={"Host": host}).status_code == status
    headers = {"Content-Length": str(2**30), "Host": "localhost", "Content-Type": "application/json"}
    assert served.http.post("/tokenize", content=b"{}", headers=headers).status_code == 413
    headers |= {"Content-Length": "2", "Transfer-Encoding": "chunked"}  # as long as it likes
    assert served.http.post("/tokenize", content=b"{}", headers=headers).status_code == 411


@pytest.mark.parametrize(
    ("megabytes", "headers", "read"), [(20, [], 20), (1000, [], 64), (20, [(b"expect", b"100-continue")], 0)]
)
def test_a_refusal_first_reads_what_a_client_may_be_sending(
    serve: Callable[..., Served], megabytes: int, headers: list[tuple[bytes, bytes]], read: int
) -> None:
    app, log = serve(api_key="key").app, list[str]()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}

    async def receive() -> dict[str, Any]:
        log.append("read")
        return {"type": "http.request", "body": bytes(2**20), "more_body": len(log) < megabytes}

    async def send(message: dict[str, Any]) -> None:
        log.append(message["type"])

    asyncio.run(app(scope, receive, send))
    assert log == ["read"] * read + ["http.response.start", "http.response.body"]


def test_metrics(served: Served) -> None:
    served.says("</think>2")
    served.client.chat.completions.create(model="tiny", messages=USER)
    served.http.get("/no/such/place")
    lines = dict(line.rsplit(" ", 1) for line in served.http.get("/metrics").text.splitlines() if line[0] != "#")
    assert lines['nemotron_requests_finished_total{reason="stop"}'] == "1.0"
    assert lines['nemotron_http_responses_total{path="/v1/chat/completions",status="200"}'] == "1.0"
    assert lines['nemotron_http_responses_total{path="other",status="404"}'] == "1.0"
    assert lines["nemotron_request_answer_tokens_sum"] == "3.0"
    assert lines["nemotron_time_to_first_token_seconds_count"] == lines["nemotron_request_seconds_count"] == "1.0"
    assert math.isfinite(float(lines["nemotron_request_seconds_sum"]))
