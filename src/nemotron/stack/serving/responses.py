"""Responses of the OpenAI API, with what vLLM adds to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field


def only_if_given() -> Any:
    """A field of a response that is left out where it is None: OpenAI's own are null then, vLLM's additions are not."""
    return Field(default=None, exclude_if=lambda value: value is None)


class TokenLogprob(BaseModel):
    """A token and its log-probability; `bytes` is null where the token is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobs(TokenLogprob):
    """The token that was drawn, and the likeliest ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Of the tokens of an answer, reasoning and the token that ended it included."""

    content: list[TokenLogprobs]


class CompletionLogprobs(BaseModel):
    """The same for a completion; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunction(BaseModel):
    """`arguments`: JSON of an object."""

    name: str
    arguments: str


class Call(BaseModel):
    """A tool call of an answer, whole; `index` in streams."""

    index: int | None = only_if_given()
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(BaseModel):
    """A message of the assistant. The reasoning goes by both names that clients know."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = only_if_given()


class AnswerDelta(BaseModel):
    """What is new in it."""

    role: Literal["assistant"] | None = only_if_given()
    content: str | None = only_if_given()
    reasoning_content: str | None = only_if_given()
    reasoning: str | None = only_if_given()
    tool_calls: list[Call] | None = only_if_given()


class _Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = only_if_given()


class ChatChoice(_Choice):
    """One answer."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(_Choice):
    """A piece of one answer."""

    delta: AnswerDelta
    logprobs: ChatLogprobs | None = None


class CompletionChoice(_Choice):
    """A completion, or in a stream a piece of it. `prompt_token_ids`: of its prompt, in a stream with the first one."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | None = only_if_given()


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class _Response(BaseModel):
    id: str
    object: str
    created: int
    model: str
    usage: Usage | None = only_if_given()


class ChatResponse(_Response):
    """What POST /v1/chat/completions answers; in a stream, a chunk."""

    choices: Sequence[ChatChoice | ChatChunkChoice]
    prompt_token_ids: list[int] | None = only_if_given()


class CompletionResponse(_Response):
    """What POST /v1/completions answers, also in a stream."""

    choices: Sequence[CompletionChoice]
