"""The engine of `nemotron serve`: requests in, tokens out. One thread owns the model; whoever asks waits for no lock.

The thread does the same three things over and over, and sleeps when there is nothing to do:

1. Requests that wait get a row while one is free, in the order in which they came.
2. One pass of reading, of at most `READ_TOKENS` tokens with their padding: the next chunk of the prompt at the head of
   those being read, and with it the chunks of others that have at least half as much left to read. What is not finished
   goes to the end of the line, so that a short prompt behind a long one waits for a pass of it and not for all. What a
   kept state has read of a prompt is not read again (`prompt_cache.py`).
3. One step of all rows that are decoded (`batch.py`). They wait for one pass of reading at most.

A request that was cancelled is dropped before each of these rounds. An exception ends all requests that are being read
or decoded, whose states may be half-written, and all states are thrown away; those that wait go on.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from nemotron.stack.models import NemotronH
from nemotron.stack.serving.batch import Batch, Row
from nemotron.stack.serving.delivery import Answer
from nemotron.stack.serving.grammar import Grammar
from nemotron.stack.serving.prompt_cache import PromptCache, RowState
from nemotron.stack.serving.sampling import Choice, FinishReason, Sampling, Token

__all__ = [
    "Answer", "Engine", "EngineStopped", "FinishReason", "Grammar", "Limits", "PromptTooLong", "QueueFull", "Sampling",
    "Stats", "Token", "UnknownStopToken",
]  # fmt: skip

# Of a pass, padding included: how long rows that are decoded may wait for a prompt.
READ_TOKENS = 1024
# A branch is kept where the next prompt that has it is spared so many tokens more than now.
BRANCH_TOKENS = 32


class QueueFull(Exception):
    """`max_waiting` requests wait already."""


class PromptTooLong(ValueError):
    """Prompt and `max_new_tokens` together exceed `max_length`."""


class UnknownStopToken(ValueError):
    """A stop token that the model does not have."""


class EngineStopped(Exception):
    """The engine takes no requests any more."""


@dataclass(frozen=True)
class Limits:
    """What an engine takes on.

    max_rows: requests that are read and decoded at once. max_length: tokens of a prompt and its answer. max_waiting:
    requests that wait for a row; one more is refused. num_drafts: tokens that the multi-token prediction block drafts
    for each row and step; 0: plain decoding. prompt_cache_bytes: memory for the states that are kept of prompts and
    answers; 0: none are.
    """

    max_length: int
    max_rows: int = 64
    max_waiting: int = 256
    num_drafts: int = 0
    prompt_cache_bytes: int = 1 << 30


@dataclass(frozen=True)
class Stats:
    """What the engine is at and what it has done since its start.

    running: requests being read or decoded. waiting: those before them. rows: rows that a step computes at present,
    idle ones included. prompt_tokens, cached_prompt_tokens: of the requests that were begun; the latter were not read
    anew. drafts_proposed, drafts_accepted: by multi-token prediction. finished: requests by finish reason. steps: of
    decoding. prompt_cache_bytes: what is kept at present.
    """

    running: int = 0
    waiting: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)
    steps: int = 0
    prompt_cache_bytes: int = 0


@dataclass(eq=False)
class Request:
    """An answer, its row, and, while its prompt is read: the states, and after how many tokens some are to be kept."""

    answer: Answer
    row: Row
    state: RowState | None = None
    points: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens up to the next point."""
        return self.points[0] - self.state.trunk.length if self.state is not None and self.points else 0


class Engine:
    """Serves one model, put into eval mode, until `stop`."""

    def __init__(self, model: NemotronH, limits: Limits) -> None:
        """Raises ValueError where `limits` asks for drafts and the model has no block that makes them."""
        if limits.num_drafts and model.mtp is None:
            raise ValueError("the model has no multi-token prediction block: nothing can draft")
        self.model, self.limits = model.eval(), limits
        self._changed = threading.Condition()  # guards the next three, and wakes the thread and who waits for its end
        self._waiting: deque[Request] = deque()
        self._open: set[Request] = set()
        self._stopping = False
        self._thread: threading.Thread | None = None
        # All below is the thread's own.
        self._reading: deque[Request] = deque()
        self._decoding: dict[Row, Request] = {}
        self._prompts = PromptCache(limits.prompt_cache_bytes)
        self._batch = Batch(model, limits.num_drafts)
        self._counts: Counter[str] = Counter()  # by the name in `Stats`
        self._finished: Counter[FinishReason] = Counter()

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="engine")
        self._thread.start()

    def stop(self, drain_seconds: float) -> None:
        """Take no requests any more, let those accepted go on for so long, cancel the rest; the thread has ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._open, drain_seconds if self._thread is not None else 0)
            left = list(self._open)
        for request in left:
            request.answer.cancel()
        if self._thread is not None:
            self._thread.join()
        else:
            for request in left:
                self._end(request, "cancelled")

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Answer:
        """Queue a request.

        Raises:
            QueueFull: as many wait as may.
            PromptTooLong: prompt and `max_new_tokens` together exceed `max_length`.
            EngineStopped: `stop` was called.
            UnknownStopToken: the model does not have one of the stop tokens.
            ValueError: an empty prompt, or ids in it that the model does not have.
        """
        vocab_size, limits = self.model.config.vocab_size, self.limits
        if not prompt:
            raise ValueError("the prompt needs at least one token")
        if unknown := next((token for token in prompt if not 0 <= token < vocab_size), None):
            raise ValueError(f"prompt token {unknown}: the model has 0 to {vocab_size - 1}")
        if unknown := next((token for token in sampling.stop_token_ids if not 0 <= token < vocab_size), None):
            raise UnknownStopToken(f"stop token {unknown}: the model has 0 to {vocab_size - 1}")
        if len(prompt) + sampling.max_new_tokens > limits.max_length:
            raise PromptTooLong(
                f"{len(prompt)} tokens of prompt and {sampling.max_new_tokens} new ones exceed {limits.max_length}"
            )
        answer = Answer(len(prompt), self._wake)
        request = Request(answer, Row(list(prompt), Choice(sampling, vocab_size)))
        with self._changed:
            if self._stopping:
                raise EngineStopped("the engine takes no requests any more")
            if len(self._open) >= limits.max_rows + limits.max_waiting:
                raise QueueFull(f"{limits.max_waiting} requests wait already")
            self._open.add(request)
            self._waiting.append(request)
            self._changed.notify_all()
        return answer

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def stats(self) -> Stats:
        """At this moment."""
        with self._changed:
            num_open, waiting = len(self._open), len(self._waiting)
        batch = self._batch
        return Stats(
            running=num_open - waiting, waiting=waiting, rows=len(batch.slots) if batch.rows else 0,
            finished=dict(self._finished), prompt_cache_bytes=self._prompts.num_bytes,
            drafts_proposed=batch.drafts_proposed, drafts_accepted=batch.drafts_accepted, **self._counts,
        )  # fmt: skip

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._rounds()
        finally:  # at a proper end nothing is open
            with self._changed:
                self._stopping, left = True, list(self._open)
                self._open.clear()
                self._waiting.clear()
                self._changed.notify_all()
            for request in left:
                request.answer.end("error", "the engine has ended")

    @torch.inference_mode()
    def _rounds(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._stopping)
                if not self._open:
                    return
            try:
                self._drop_cancelled()
                self._begin()
                if self._reading:
                    self._read()
                if self._decoding:
                    self._step()
            except Exception as error:
                traceback.print_exc()
                self._fail(f"{type(error).__name__}: {error}")

    def _drop_cancelled(self) -> None:
        with self._changed:
            cancelled = [request for request in self._open if request.answer.is_cancelled]
            for request in cancelled:
                if request in self._waiting:
                    self._waiting.remove(request)
        for request in cancelled:
            self._end(request, request.answer.cancelled_as or "cancelled")

    def _begin(self) -> None:
        """Give rows to requests that wait."""
        with self._changed:
            while self._waiting and len(self._reading) + len(self._decoding) < self.limits.max_rows:
                self._reading.append(self._waiting.popleft())

    def _look_up(self, request: Request) -> None:
        """Where the request's prompt is to be read from, and the points up to its last token but one."""
        prompt, end = request.row.prompt, len(request.row.prompt) - 1
        kept = None if request.row.choice.sampling.prompt_logprobs else self._prompts.longest(prompt)
        known = 0 if kept is None else kept.trunk.length
        branch = self._prompts.num_shared(prompt) - 1
        request.state = self._batch.new_state(end) if kept is None else kept.resized(end)
        request.points = [branch, end] if known + BRANCH_TOKENS <= branch < end else [end]
        request.answer.cached_tokens = known
        self._counts["prompt_tokens"] += len(prompt)
        self._counts["cached_prompt_tokens"] += known

    def _read(self) -> None:
        """One pass of reading. A prompt is looked up when its turn comes: what was read until then may help."""
        group: list[Request] = []
        most = 0
        for request in list(self._reading):
            if request.state is None:
                if self._is_read_already(request):
                    continue
                self._look_up(request)
            if request.left == 0:
                self._join(request)
                continue
            most = most or min(request.left, READ_TOKENS)
            if 2 * request.left >= most:
                group.append(request)
            if len(group) == READ_TOKENS // most:
                break
        if not group:
            return
        states = [request.state for request in group if request.state is not None]
        self._batch.read([request.row for request in group], states, [min(request.left, most) for request in group])
        for request, state in zip(group, states, strict=True):
            self._reading.remove(request)
            self._reading.append(request)
            if request.left == 0:
                point = request.points.pop(0)
                self._prompts.keep(request.row.prompt[: point + 1], state.resized(point) if request.points else state)
                if not request.points:
                    self._join(request)

    def _is_read_already(self, request: Request) -> bool:
        """Whether an equal prompt is being read, whose state this one can soon go on from."""
        if not self.limits.prompt_cache_bytes or request.row.choice.sampling.prompt_logprobs:
            return False
        prompt = request.row.prompt
        return any(other.state is not None and other.row.prompt == prompt for other in self._reading)

    def _join(self, request: Request) -> None:
        """The prompt is read: from the next step on its row is decoded."""
        assert request.state is not None
        if request.row.choice.sampling.prompt_logprobs:
            request.answer.prompt_logprobs = request.row.prompt_logprobs
        self._batch.join(request.row, request.state)
        self._reading.remove(request)
        self._decoding[request.row], request.state = request, None

    def _step(self) -> None:
        """One step of all rows."""
        results = self._batch.step()
        self._counts["steps"] += 1
        for row, tokens in results:
            request, choice = self._decoding[row], row.choice
            self._counts["generated_tokens"] += len(tokens)
            if tokens:
                request.answer.put(tokens)
            if choice.finish_reason in ("stop", "length") and self.limits.prompt_cache_bytes:
                self._prompts.keep(row.tokens, self._batch.state(row))
            if choice.finish_reason is not None:
                self._end(request, choice.finish_reason, choice.error)

    def _fail(self, error: str) -> None:
        """End what is being read or decoded, with states that can't be trusted any more."""
        self._reading.clear()
        self._decoding.clear()
        self._prompts.clear()
        self._batch.reset()
        with self._changed:
            failed = self._open - set(self._waiting)
        for request in failed:
            self._end(request, "error", error)

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """The request has no part in anything any more."""
        if request in self._reading:
            self._reading.remove(request)
        if self._decoding.pop(request.row, None) is not None:
            self._batch.leave(request.row)
        self._finished[reason] += 1
        request.answer.end(reason, error)
        with self._changed:
            self._open.discard(request)
            self._changed.notify_all()
