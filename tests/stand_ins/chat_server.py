"""A small OpenAI-compatible endpoint on loopback that answers by rule, and that fails as it is told to."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

from http_server import serving

Body = dict[str, Any]


class ChatServer:
    """What the endpoint does, and what it was asked.

    `answer(body)`: its text, or its message without the role. `fault(number, attempt, handler)` may do something else
    and return True; `attempt`: how often this very request has come before. `asked`: requests by content; `most`: at
    one time.
    """

    def __init__(self) -> None:
        self.url = ""
        self.fault: Callable[[int, int, BaseHTTPRequestHandler], bool] = lambda number, attempt, handler: False
        self.answer: Callable[[Body], str | Body] = lambda body: f"Reworded: {text_in(body)}"
        self.delay = 0.0
        self.bodies: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.asked: Counter[str] = Counter()
        self.now = self.most = 0
        self.lock = threading.Lock()


@contextlib.contextmanager
def chat_server() -> Iterator[ChatServer]:
    """An endpoint for as long as the context lasts."""
    server = ChatServer()
    with serving(_Handler, chat=server) as address:
        server.url = f"{address}/v1"
        yield server


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        chat: ChatServer = self.server.chat  # type: ignore[attr-defined]
        content = self.rfile.read(int(self.headers["Content-Length"]))
        body, key = json.loads(content), content.decode()
        with chat.lock:
            number, attempt = len(chat.bodies), chat.asked[key]
            chat.bodies.append(body)
            chat.headers.append({name.lower(): value for name, value in self.headers.items()})
            chat.asked[key] += 1
            chat.now += 1
            chat.most = max(chat.most, chat.now)
        try:
            assert self.path == "/v1/chat/completions"
            if chat.fault(number, attempt, self):
                return
            time.sleep(chat.delay)
        finally:
            with chat.lock:  # before the answer: with it the client may ask again
                chat.now -= 1
        answer = chat.answer(body)
        message = {"content": answer} if isinstance(answer, str) else answer
        prompt_tokens = len(str(body["messages"][-1]["content"]).split())  # parts of text or text
        value = {
            "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": len(message["content"].split())},
        }
        send(self, 200, json.dumps(value).encode(), Content_Type="application/json")

    def log_message(self, *_: object) -> None:
        pass


def text_in(body: Body) -> str:
    """The text that is to be reworded."""
    text: str = body["messages"][1]["content"].partition("<text>\n")[2].removesuffix("\n</text>")
    return text


def send(handler: BaseHTTPRequestHandler, status: int, payload: bytes, **headers: str) -> None:
    """An answer, whatever it says."""
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(payload)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(payload)
