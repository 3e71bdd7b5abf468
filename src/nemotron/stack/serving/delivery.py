"""What a request gets back: its tokens as they come, for a thread or for an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from nemotron.stack.serving.sampling import FinishReason, Token


class Answer:
    """A request that was accepted. Its tokens can be taken once, by `for` in a thread or `async for` on a loop.

    cached_tokens: of the prompt, taken from the prompt cache. prompt_logprobs: of its tokens from the second on, where
    they were asked for; both are known with the first token. finish_reason: None while tokens may come. error: the
    message where that is "error". Whoever leaves the iteration before its end cancels.
    """

    def __init__(self, prompt_tokens: int, wake: Callable[[], None]) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.prompt_logprobs: list[Token] | None = None
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.cancelled_as: FinishReason | None = None
        self._wake = wake
        self._changed = threading.Condition()
        self._new: list[Token] = []
        self._tell_loop: Callable[[], object] | None = None

    def __iter__(self) -> Iterator[list[Token]]:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._new or self.finish_reason is not None)
                    new, self._new = self._new, []
                if not new:
                    return
                yield new
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[list[Token]]:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        changed.set()
        with self._changed:
            self._tell_loop = lambda: loop.call_soon_threadsafe(changed.set)
        try:
            while True:
                await changed.wait()
                changed.clear()
                with self._changed:
                    new, self._new = self._new, []
                    is_over = self.finish_reason is not None
                if new:
                    yield new
                if is_over:
                    return
        finally:
            self.cancel()

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called before its end."""
        return self.cancelled_as is not None

    def cancel(self, reason: FinishReason = "cancelled") -> None:
        """End the answer where it is, before the next step. From any thread, any number of times.

        reason: of which the first call counts; "stop" where whoever reads the text has found its end.
        """
        if not self.is_cancelled and self.finish_reason is None:
            self.cancelled_as = reason
            self._wake()

    def put(self, tokens: Sequence[Token]) -> None:
        """Called by the engine: more tokens."""
        with self._changed:
            self._new += tokens
            self._notify()

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Called by the engine: there are no more."""
        with self._changed:
            self.finish_reason, self.error = reason, error
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        if self._tell_loop is not None:
            try:
                self._tell_loop()
            except RuntimeError:  # the loop is closed, with nobody left to take the tokens
                self._tell_loop, self.cancelled_as = None, "cancelled"
