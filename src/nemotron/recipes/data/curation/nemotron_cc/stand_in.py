"""A stand-in for a language model: answers like an OpenAI-compatible endpoint, by taking sentences out of the text.

IT IS NO MODEL. It picks, drops and reorders sentences by fixed rules, so that the rephrasing step can be run from end
to end without a network and gives the same bytes every time. What it writes teaches a model nothing new.

    python stand_in.py --port 8099          # then: endpoint.base_url=http://127.0.0.1:8099/v1

`rephrase.py` starts it by itself, in its own process, where the config says `endpoint.base_url: stand-in`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from nemotron.data_prep.curation.rephrasing import BEGIN_TEXT, END_TEXT, STYLES

MODEL = "stand-in-by-rules"
NOTE = "not a language model: sentences taken from the text by fixed rules"
MAX_REQUEST_BYTES = 2**22

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
_STATES = re.compile(r"(?P<what>[A-Z][\w' -]{2,40}?) (?P<verb>is|are|was|were) (?P<that>[^.!?]{8,200})[.!?]?")


@contextlib.contextmanager
def serve(port: int = 0) -> Iterator[str]:
    """Answer on this machine only, until the end of the `with`; gives the base URL. `port` 0: any free one."""
    server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


def answer(style: str, text: str) -> str:
    """What is answered to a text in one of the styles of nemotron.data_prep.curation.rephrasing."""
    lines = [" ".join(line.split()) for line in text.split("\n")]
    # A line that ends like no sentence is a heading or what a page has around its text.
    sentences = [s for line in lines if line.endswith((".", "!", "?", '"')) for s in _SENTENCE.split(line)]
    sentences = list(dict.fromkeys(sentence for sentence in sentences if len(sentence.split()) >= 4))
    if style == "diverse_qa":
        found = [match for sentence in sentences if (match := _STATES.match(sentence))]
        pairs = [
            (f"What {match['verb']} {_lower(match['what'])}?", f"{match['that'].capitalize()}.") for match in found
        ]
        pairs += [(f'Does the text say: "{sentence}"', "Yes, it does.") for sentence in sentences[:2]]
        return "\n\n".join(f"Question: {question}\nAnswer: {reply}" for question, reply in pairs[:8])
    if style == "knowledge_list":
        return "\n".join(f"- {sentence}" for sentence in sorted(sentences, key=len)[:12])
    if style == "distill":
        by_length = sorted(sentences, key=len, reverse=True)[: max(1, len(sentences) // 2)]
        return " ".join(sentence for sentence in sentences if sentence in by_length)
    if style == "extract_knowledge":
        telling = [s for s in sentences if re.search(r"\b(?:is|are|was|were|has|have|can|must|returns?)\b|\d", s)]
        return " ".join(telling or sentences)
    return " ".join(sentences)  # wikipedia: what are sentences, as one paragraph


def _lower(words: str) -> str:
    return words[0].lower() + words[1:] if words[1:2].islower() else words


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        if self.path != "/v1/chat/completions":
            self._send(404, {"error": {"message": f"no such path: {self.path}"}})
            return
        try:
            size = int(self.headers.get("Content-Length", "0"))
            if size > MAX_REQUEST_BYTES:
                raise ValueError("request too large")
            body = json.loads(self.rfile.read(size))
            asked = str(body["messages"][-1]["content"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            self._send(400, {"error": {"message": f"not a chat completion request: {error}"}})
            return
        instruction, _, text = asked.partition(f"\n{BEGIN_TEXT}\n")
        style = next((s.name for s in STYLES.values() if s.instruction.strip() == instruction.strip()), "wikipedia")
        said = answer(style, text.removesuffix(f"\n{END_TEXT}"))
        prompt, completion = len(asked.split()), len(said.split())  # words, for want of tokens
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        self._send(200, {"object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage})

    def _send(self, status: int, value: dict[str, Any]) -> None:
        payload = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        """No line for each request."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=NOTE)
    parser.add_argument("--port", type=int, default=8099)
    with serve(parser.parse_args().port) as url:
        print(f"{url}: {NOTE}", file=sys.stderr)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
