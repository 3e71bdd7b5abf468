"""A rollout at a resources server of NeMo Gym: what an agent asks of it, over HTTP.

Nothing here asks such servers; examples/environments/gym_server.py makes an environment of one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import HTTPCookieProcessor, Request, build_opener

from nemotron.kit.chat import function_of, parse_tool_calls
from nemotron.stack.environments.gym import response_of
from nemotron.stack.environments.own import as_verdict
from nemotron.stack.environments.task import Verdict, error

MAX_BYTES = 16 * 2**20


class GymRollout:
    """An episode whose tools and verdict are the server's. It raises where the server does not answer: an error.

    Args:
        url: of the server, as http://127.0.0.1:8000.
        record: one of the server's own, as published.
        timeout: seconds that an answer may take.
    """

    def __init__(self, url: str, record: Mapping[str, Any], timeout: float = 60.0) -> None:
        self.url, self.record, self.timeout = url.rstrip("/"), dict(record), timeout
        self.tools = list(record["responses_create_params"].get("tools") or [])
        self.items: list[dict[str, Any]] = []
        self._opener = build_opener(HTTPCookieProcessor())
        self._post("seed_session", self.record)

    def respond(self, answer: str) -> list[dict[str, Any]] | None:
        """What the server's tools answer, a refusal included; None where the answer calls none."""
        text, calls = parse_tool_calls(answer, self.tools) if self.tools else (answer, [])
        if text or not calls:
            self.items += response_of(text)["output"]
        results = []
        for call in calls:
            call_id = f"call_{len(self.items)}"
            arguments = json.dumps(call["arguments"])
            self.items.append({"type": "function_call", "call_id": call_id, **call, "arguments": arguments})
            output = self._call(call["name"], call["arguments"])
            self.items.append({"type": "function_call_output", "call_id": call_id, "output": output})
            results.append({"role": "tool", "content": output})
        return results or None

    def verdict(self) -> Verdict:
        """That of `/verify`. A row that Gym leaves out of its means is an error."""
        response = response_of("") | {"output": self.items}
        verified = json.loads(self._post("verify", self.record | {"response": response}))
        if failure := verified.get("_ng_failure_class"):
            reasons = [str(value) for key, value in verified.items() if key.startswith("_ng_failure_") and value]
            return error(f"the server reports {failure}: {'; '.join(reasons[1:])}"[:300])
        if verified.get("mask_sample"):
            return error("the server leaves the sample out (mask_sample)")
        return as_verdict(verified.get("reward"))

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        # No other endpoint is for the model: `/verify` is one, too.
        if name not in [function_of(tool)["name"] for tool in self.tools]:
            return f"Error: no tool is called {name}."
        try:
            return self._post(name, arguments)
        except HTTPError as refusal:
            return refusal.read(MAX_BYTES).decode(errors="replace")

    def _post(self, path: str, body: Mapping[str, Any]) -> str:
        content = json.dumps(body).encode()
        request = Request(f"{self.url}/{quote(path, safe='')}", content, {"Content-Type": "application/json"})
        with self._opener.open(request, timeout=self.timeout) as answer:
            text: str = answer.read(MAX_BYTES).decode()
            return text
