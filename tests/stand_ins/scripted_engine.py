"""An engine that answers by rule, one token after another, and waits where it is told to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from nemotron.stack.serving.engine import (
    EngineStopped,
    FinishReason,
    Limits,
    QueueFull,
    Sampling,
    Stats,
    Token,
    UnknownStopToken,
)

Script = Callable[[Sequence[int], Sampling], Sequence[int]]


class ScriptedAnswer:
    """Tokens of a script, each of log-probability -1/2, and a likeliest one beside it of -1/4.

    gate: where it is closed, nothing comes but an end by `cancel`.
    """

    def __init__(self, engine: ScriptedEngine, prompt: Sequence[int], sampling: Sampling) -> None:
        self.engine, self.sampling = engine, sampling
        self.prompt_tokens, self.cached_tokens = len(prompt), 0
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.prompt_logprobs = [self.token(token) for token in prompt[1:]] if sampling.prompt_logprobs else None
        self.script = list(engine.script(prompt, sampling))
        self._wake = asyncio.Event()

    def token(self, number: int) -> Token:
        """The token of this id, as the engine reports it."""
        return Token(number, -0.5, tuple((0, -0.25) for _ in range(self.sampling.num_logprobs)))

    async def __aiter__(self) -> AsyncIterator[list[Token]]:
        for position, number in enumerate(self.script):
            if position == self.engine.close_after:
                self.engine.close_gate()
            while not self.engine.is_open and self.finish_reason is None:
                self._wake.clear()
                await self._wake.wait()
            if self.finish_reason is not None:
                return
            if position == self.sampling.max_new_tokens:
                break
            if number < 0:
                self._end("error")
                self.error = "out of memory"
                return
            yield [self.token(number)]
            await asyncio.sleep(0)  # whoever reads them has its turn, as between two steps
            if number in self.sampling.stop_token_ids:
                self._end("stop")
                return
        self._end("length")

    def __iter__(self) -> Iterator[list[Token]]:
        raise NotImplementedError

    def cancel(self, reason: FinishReason = "cancelled") -> None:
        """End it."""
        if self.finish_reason is None:
            self._end(reason)
            self.wake()

    def wake(self) -> None:
        """Look at the gate again."""
        self._wake.set()

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.engine.running.discard(self)
        self.engine.finished[reason] += 1


class ScriptedEngine:
    """`script(prompt, sampling)`: the ids of an answer, -1 for a failure. `close_gate` keeps the tokens back."""

    def __init__(self, script: Script) -> None:
        self.script, self.is_open, self.places = script, True, 1000
        self.close_after: int | None = None  # tokens of an answer
        self.asked: list[tuple[list[int], Sampling]] = []
        self.running: set[ScriptedAnswer] = set()
        self.finished: Counter[FinishReason] = Counter()
        self.has_stopped = False
        self.limits, self.is_alive = Limits(max_length=1 << 20, max_rows=300, max_waiting=700), True

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> ScriptedAnswer:
        """As the engine."""
        if self.has_stopped:
            raise EngineStopped
        if len(self.running) >= self.places:
            raise QueueFull
        if unknown := [token for token in prompt if token > 1000]:
            raise ValueError(f"token {unknown[0]} is not known")
        if unknown := [token for token in sampling.stop_token_ids if token > 1000]:
            raise UnknownStopToken(f"token {unknown[0]} is not known")
        self.asked.append((list(prompt), sampling))
        answer = ScriptedAnswer(self, prompt, sampling)
        self.running.add(answer)
        return answer

    def close_gate(self) -> None:
        """No token from now on."""
        self.is_open = False

    def open_gate(self) -> None:
        """They come again."""
        self.is_open = True
        for answer in list(self.running):
            answer.wake()

    def start(self) -> None:
        """Nothing to start."""

    def stop(self, drain_seconds: float) -> None:
        """No new requests."""
        self.has_stopped = True

    @property
    def stats(self) -> Stats:
        """What runs, and how what ran has ended."""
        return Stats(running=len(self.running), finished=dict(self.finished))
