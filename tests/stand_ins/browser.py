"""A real browser without a window: Chromium, told what to do over the pipes of its debugging protocol."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """A tab. Commands go to its file descriptor 3, and answers come from 4, each ended by a zero byte."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, open(answers, "rb", buffering=0)  # noqa: SIM115
        self._number, self._left, self._session = 0, b"", {}
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self.tell("Runtime.enable")
        self.tell("Page.enable")

    def tell(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(self._next())
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> bytes:
        while b"\0" not in self._left:
            more = self._answers.read(1 << 16)
            assert more, "the browser has ended"
            self._left += more
        answer, _, self._left = self._left.partition(b"\0")
        return answer

    def open(self, url: str) -> None:
        """Load a page to its end."""
        self.tell("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives."""
        result = self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> None:
        """Until an expression is true."""
        until = time.monotonic() + seconds
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < until, f"never: {expression}"
            time.sleep(0.02)


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with one tab, 900 x 700."""
    assert PROGRAM is not None
    (commands_out, commands_in), (answers_out, answers_in) = os.pipe(), os.pipe()
    words = [
        PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", f"--user-data-dir={profile}", "--window-size=900,700",
        "--remote-debugging-pipe",
    ]  # fmt: skip

    def as_three_and_four() -> None:
        # Copies first: either may be 3 or 4 already.
        source, sink = os.dup(commands_out), os.dup(answers_in)
        os.dup2(source, 3)
        os.dup2(sink, 4)

    process = subprocess.Popen(
        words, preexec_fn=as_three_and_four, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(commands_out)
    os.close(answers_in)
    try:
        yield Page(commands_in, answers_out)
    finally:
        os.close(commands_in)
        process.terminate()
        process.wait(20)
