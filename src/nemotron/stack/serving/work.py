"""The work of one request: its answers, together asked for and cancelled, and what a client is told of them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel

from nemotron.stack.serving.answer import Writing, calls_of, chat_logprobs, completion_logprobs, shown, usage_of
from nemotron.stack.serving.engine import Answer, Engine, EngineStopped, QueueFull, UnknownStopToken
from nemotron.stack.serving.metrics import Metrics
from nemotron.stack.serving.prompt import Prompt, ServedModel
from nemotron.stack.serving.refusals import ApiError
from nemotron.stack.serving.requests import ChatRequest, CompletionRequest
from nemotron.stack.serving.responses import (
    AnswerDelta,
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatResponse,
    CompletionChoice,
    CompletionResponse,
)
from nemotron.stack.serving.sampling import Token
from nemotron.stack.serving.text import Delta


@dataclass(frozen=True)
class Server:
    """What the endpoints work with. timeout: seconds that a request may take, its time in the queue included."""

    engine: Engine
    model: ServedModel
    timeout: float

    @cached_property
    def metrics(self) -> Metrics:
        """Of this server."""
        return Metrics(lambda: self.engine.stats)

    def check_count(self, body: ChatRequest | CompletionRequest) -> None:
        """ApiError where a request wants more answers than there are places: waiting would not help."""
        num_prompts = 1 if isinstance(body, ChatRequest) else len(body.prompts())
        asked, most = num_prompts * (body.n or 1), self.engine.limits.max_rows + self.engine.limits.max_waiting
        if asked > most:
            message = f"{asked} answers asked for at once: this server holds {most}"
            raise ApiError(400, message, param="n" if num_prompts == 1 else "prompt")


class Work:
    """The answers of one request, which are asked for together and cancelled together.

    Raises:
        ApiError: the queue has no place for all of them, the engine has stopped, or it refuses the prompt.
    """

    def __init__(self, server: Server, body: ChatRequest | CompletionRequest, prompts: Sequence[Prompt]) -> None:
        self.server, self.body, self.prompts = server, body, prompts
        self.id = f"{'chatcmpl' if isinstance(body, ChatRequest) else 'cmpl'}-{uuid.uuid4().hex}"
        self.created, self._begin = int(time.time()), time.perf_counter()
        self.timed_out = False
        self.writings: list[Writing] = []
        try:
            for prompt in prompts:
                for sampling in prompt.samplings:
                    answer = server.engine.submit(prompt.tokens, sampling)
                    self.writings.append(Writing(server.model, body, prompt, answer))
        except QueueFull:
            self.cancel()
            raise ApiError(503, "too many requests are waiting; try again later", code="queue_full") from None
        except EngineStopped:
            self.cancel()
            raise ApiError(503, "the server is stopping", code="stopping") from None
        except ValueError as failure:
            self.cancel()
            param = "stop_token_ids" if isinstance(failure, UnknownStopToken) else "prompt"
            raise ApiError(400, str(failure), param=param) from None
        self._deadline = asyncio.get_running_loop().call_later(server.timeout, self._time_out)

    def _time_out(self) -> None:
        self.timed_out = True
        self.cancel()

    def cancel(self) -> None:
        """End what is not at its end."""
        for writing in self.writings:
            writing.answer.cancel()

    def close(self) -> None:
        """Nobody waits for more of it."""
        self.cancel()
        self._deadline.cancel()
        metrics = self.server.metrics
        metrics.duration.observe(time.perf_counter() - self._begin)
        for writing in self.writings:
            metrics.prompt_tokens.observe(writing.answer.prompt_tokens)
            metrics.answer_tokens.observe(len(writing.tokens))

    async def tokens(self) -> AsyncIterator[tuple[int, list[Token] | None]]:
        """Index of an answer and its next tokens, whichever answer has some; None when it has ended."""
        queue: asyncio.Queue[tuple[int, list[Token] | None]] = asyncio.Queue()

        async def pass_on(index: int, answer: Answer) -> None:
            try:
                async for tokens in answer:
                    queue.put_nowait((index, tokens))
            finally:
                queue.put_nowait((index, None))

        tasks = [asyncio.create_task(pass_on(index, writing.answer)) for index, writing in enumerate(self.writings)]
        began = False
        try:
            left = len(tasks)
            while left:
                index, tokens = await queue.get()
                if tokens and not began:
                    began = True
                    self.server.metrics.first_token.observe(time.perf_counter() - self._begin)
                left -= tokens is None
                yield index, tokens
        finally:
            for task in tasks:
                task.cancel()

    def check(self, writing: Writing) -> None:
        """ApiError where an answer was ended by something else than the model, its limit or a stop string."""
        if self.timed_out:
            raise ApiError(504, f"not answered within {self.server.timeout:g} s", code="timeout")
        if writing.finish_reason is None:
            if writing.answer.error is not None:
                raise ApiError(500, writing.answer.error, code="engine_error")
            raise ApiError(503, "the server is stopping", code="stopping")

    def response(self, choices: Sequence[Any], **fields: Any) -> ChatResponse | CompletionResponse:
        """A response, or a chunk of one, with what all of a request have in common."""
        common = {"id": self.id, "created": self.created, "model": self.server.model.name, "choices": choices}
        if isinstance(self.body, ChatRequest):
            kind = "chat.completion.chunk" if self.body.stream else "chat.completion"
            return ChatResponse(object=kind, **common, **fields)
        return CompletionResponse(object="text_completion", **common, **fields)

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are wanted."""
        return self.body.logprobs is not None and self.body.logprobs is not False


async def whole_answer(work: Work) -> ChatResponse | CompletionResponse:
    """All answers of a request at once."""
    deltas = [Delta() for _ in work.writings]
    async for index, tokens in work.tokens():
        writing = work.writings[index]
        deltas[index] += writing.end() if tokens is None else writing.push(tokens)[0]
        if tokens is None:
            work.check(writing)
    choose = chat_choice if isinstance(work.body, ChatRequest) else completion_choice
    choices = [choose(work, index, delta) for index, delta in enumerate(deltas)]
    fields: dict[str, Any] = {}
    if isinstance(work.body, ChatRequest) and work.body.return_token_ids:
        fields["prompt_token_ids"] = work.prompts[0].tokens
    return work.response(choices, usage=usage_of(work.writings, len(work.prompts)), **fields)


def chat_choice(work: Work, index: int, delta: Delta) -> ChatChoice:
    """One answer of a chat."""
    writing, body = work.writings[index], work.body
    reasoning, calls = delta.reasoning or None, calls_of(delta.calls)
    return ChatChoice(
        index=index,
        finish_reason=writing.finish_reason,
        stop_reason=writing.stop_reason,
        message=AnswerMessage(
            content=None if calls and not delta.content else delta.content,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=calls,
        ),
        logprobs=chat_logprobs(work.server.model.tokenizer, writing.tokens, bool(body.return_tokens_as_token_ids))
        if work.wants_logprobs
        else None,
        token_ids=[token.id for token in writing.tokens] if body.return_token_ids else None,
    )


def completion_choice(work: Work, index: int, delta: Delta) -> CompletionChoice:
    """One completion, behind its prompt where that is echoed."""
    writing, body, tokenizer = work.writings[index], work.body, work.server.model.tokenizer
    assert isinstance(body, CompletionRequest)
    prompt = work.prompts[index // (body.n or 1)].tokens
    tokens: list[Token | int] = [*writing.tokens]
    text = delta.content
    if body.echo:
        text = tokenizer.decode(prompt, skip_special_tokens=False) + text
        tokens = [prompt[0], *(writing.answer.prompt_logprobs or ()), *tokens]
    as_ids = bool(body.return_tokens_as_token_ids)
    return CompletionChoice(
        index=index,
        finish_reason="length" if body.max_tokens == 0 else writing.finish_reason,
        stop_reason=writing.stop_reason,
        text=text,
        logprobs=completion_logprobs(tokenizer, tokens, as_ids) if work.wants_logprobs else None,
        token_ids=[token.id for token in writing.tokens] if body.return_token_ids else None,
        prompt_token_ids=prompt if body.return_token_ids else None,
    )


async def streamed_answer(work: Work) -> AsyncIterator[BaseModel]:
    """The answers of a request, a chunk for whatever is new in one of them."""
    body, began = work.body, set[int]()
    offsets = [0] * len(work.writings)
    async for index, tokens in work.tokens():
        writing, ended = work.writings[index], tokens is None
        numbered = writing.calls
        delta, used = (writing.end(), []) if tokens is None else writing.push(tokens)
        if ended:
            work.check(writing)
        first = index not in began
        if not (delta or ended or first or ((work.wants_logprobs or body.return_token_ids) and used)):
            continue
        began.add(index)
        prompt = work.prompts[index // (body.n or 1)].tokens
        common: dict[str, Any] = {
            "index": index,
            "finish_reason": writing.finish_reason if ended else None,
            "stop_reason": writing.stop_reason if ended else None,
            "token_ids": [token.id for token in used] if body.return_token_ids else None,
        }
        as_ids, tokenizer = bool(body.return_tokens_as_token_ids), work.server.model.tokenizer
        if isinstance(body, ChatRequest):
            reasoning = delta.reasoning or None
            new = AnswerDelta(
                role="assistant" if first else None,
                content=delta.content or ("" if first else None),
                reasoning_content=reasoning,
                reasoning=reasoning,
                tool_calls=calls_of(delta.calls, numbered),
            )
            logprobs = chat_logprobs(tokenizer, used, as_ids) if work.wants_logprobs and used else None
            choice = ChatChunkChoice(delta=new, logprobs=logprobs, **common)
            fields = {"prompt_token_ids": prompt} if first and body.return_token_ids else {}
            yield work.response([choice], **fields)
        else:
            text_logprobs = None
            if work.wants_logprobs and used:
                text_logprobs = completion_logprobs(tokenizer, used, as_ids, offsets[index])
            # As in a whole response, of the tokens and not of the text, of which a part may be held back.
            offsets[index] += sum(len(shown(tokenizer, token.id, as_id=False)) for token in used)
            with_prompt = prompt if first and body.return_token_ids else None
            yield work.response(
                [CompletionChoice(text=delta.content, logprobs=text_logprobs, prompt_token_ids=with_prompt, **common)]
            )
    if body.includes_usage:
        yield work.response([], usage=usage_of(work.writings, len(work.prompts)))
