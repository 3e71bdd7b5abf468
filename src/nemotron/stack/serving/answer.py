"""From the engine's tokens to what a client reads: text, reasoning, calls, log-probabilities, and why it ended."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from tokenizers import Tokenizer

from nemotron.stack.serving.engine import Answer
from nemotron.stack.serving.prompt import Prompt, ServedModel
from nemotron.stack.serving.requests import ChatRequest, CompletionRequest
from nemotron.stack.serving.responses import (
    Call,
    CalledFunction,
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from nemotron.stack.serving.sampling import Token
from nemotron.stack.serving.text import Delta, ResponseText, TokenText


class Writing:
    """An answer while it is written.

    tokens: those of the engine, without what it drew behind a stop string. reasoning_tokens: of them. calls: how many
    tool calls there have been.
    """

    def __init__(self, model: ServedModel, body: ChatRequest | CompletionRequest, prompt: Prompt, answer: Answer):
        self.answer, self.body = answer, body
        self.tokens: list[Token] = []
        self.reasoning_tokens = self.calls = 0
        self._stops = prompt.samplings[0].stop_token_ids
        self._text = TokenText(model.tokenizer, self._stops, body.stop)
        self._response = ResponseText(prompt.opening, body.declared_tools) if isinstance(body, ChatRequest) else None

    def push(self, tokens: Iterable[Token]) -> tuple[Delta, list[Token]]:
        """What the next tokens make certain, and those of them that belong to the answer."""
        total, used = Delta(), []
        for token in tokens if self.body.max_tokens != 0 else ():  # of 0, the engine draws one that nobody wants
            if isinstance(self._text.stopped_by, str):
                break
            used.append(token)
            self.reasoning_tokens += self._response is not None and self._response.reasons
            text = self._text.push(token.id)
            delta = Delta(content=text) if self._response is None else self._response.push(text)
            total += delta
        if isinstance(self._text.stopped_by, str):
            self.answer.cancel("stop")
        self.tokens += used
        return self._kept(total), used

    def end(self) -> Delta:
        """The rest, when the engine has ended the answer."""
        text = self._text.end()
        if self._response is None:
            return Delta(content=text)
        return self._kept(self._response.push(text) + self._response.end())

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"] | None:
        """As OpenAI has it; None: it was ended by something else than the model or its limit."""
        if self._text.stopped_by is not None or self.answer.finish_reason == "stop":
            return "tool_calls" if self.calls else "stop"
        return "length" if self.answer.finish_reason == "length" else None

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the token among those that the request named, that ended it."""
        stopped_by = self._text.stopped_by
        named = isinstance(stopped_by, str) or stopped_by in (self.body.stop_token_ids or ())
        return stopped_by if named else None

    def _kept(self, delta: Delta) -> Delta:
        """With one call at most where the request wants no more."""
        if isinstance(self.body, ChatRequest) and self.body.parallel_tool_calls is False:
            delta.calls = delta.calls[: max(0, 1 - self.calls)]
        self.calls += len(delta.calls)
        return delta


def calls_of(called: Sequence[dict[str, Any]], first: int | None = None) -> list[Call] | None:
    """Tool calls as OpenAI has them, numbered from `first` in streams; None where there are none."""
    return [
        Call(
            index=None if first is None else first + i,
            id=f"call_{uuid.uuid4().hex}",
            function=CalledFunction(name=call["name"], arguments=json.dumps(call["arguments"], ensure_ascii=False)),
        )
        for i, call in enumerate(called)
    ] or None


def usage_of(writings: Sequence[Writing], num_prompts: int) -> Usage:
    """Of all answers of a request; a prompt counts once, however many answers it has."""
    firsts = [writing.answer for writing in writings[:: max(1, len(writings) // num_prompts)]]
    prompt, completion = sum(first.prompt_tokens for first in firsts), sum(len(each.tokens) for each in writings)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details={"cached_tokens": sum(first.cached_tokens for first in firsts)},
        completion_tokens_details={"reasoning_tokens": sum(each.reasoning_tokens for each in writings)},
    )


def shown(tokenizer: Tokenizer, token: int, as_id: bool) -> str:
    """A token in log-probabilities: its text, or `token_id:` and its number, which tells any two apart."""
    return f"token_id:{token}" if as_id else tokenizer.decode([token], skip_special_tokens=False)


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[Token], as_ids: bool) -> ChatLogprobs:
    """Log-probabilities of a chat."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = shown(tokenizer, token, as_id=False)
        characters = None if "\ufffd" in text else list(text.encode())
        return {"token": shown(tokenizer, token, as_ids), "logprob": logprob, "bytes": characters}

    return ChatLogprobs(
        content=[
            TokenLogprobs(
                **entry(token.id, token.logprob), top_logprobs=[TokenLogprob(**entry(*each)) for each in token.top]
            )
            for token in tokens
        ]
    )


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[Token | int], as_ids: bool, offset: int = 0
) -> CompletionLogprobs:
    """Log-probabilities of a completion; a bare id is the first token of an echoed prompt, of which there is none.

    The likeliest tokens are those asked for and the one that was drawn, as vLLM gives them.
    """
    out = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token in tokens:
        number = token if isinstance(token, int) else token.id
        out.text_offset.append(offset)
        out.tokens.append(shown(tokenizer, number, as_ids))
        offset += len(shown(tokenizer, number, as_id=False))
        if isinstance(token, int):
            out.token_logprobs.append(None)
            out.top_logprobs.append(None)
        else:
            likeliest: dict[str, float] = {}
            for each, logprob in token.top:  # of several tokens that look the same, the likeliest
                likeliest.setdefault(shown(tokenizer, each, as_ids), logprob)
            out.token_logprobs.append(token.logprob)
            out.top_logprobs.append(likeliest | {shown(tokenizer, number, as_ids): token.logprob})
    return out
