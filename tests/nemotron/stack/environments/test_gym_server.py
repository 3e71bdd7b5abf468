"""Environments served as NeMo Gym's resources servers are: over HTTP, with its requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nemotron.stack.environments import Task, generate_tasks, gym_server, iter_tasks
from nemotron.stack.environments.gym import response_of
from nemotron.stack.environments.gym_server import GymHTTPServer, ResourcesServer, record_of, summary
from nemotron.stack.environments.task import Solution


class Client:
    """What Gym's agents do: JSON, and the cookies of the last answer."""

    def __init__(self, url: str) -> None:
        self.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        self.cookie = ""

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        return self.send("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())

    def send(self, method: str, path: str, content: bytes = b"") -> tuple[int, Any]:
        self.connection.request(method, path, content, {"Cookie": self.cookie, "Content-Type": "application/json"})
        answer = self.connection.getresponse()
        if cookie := answer.getheader("Set-Cookie"):
            self.cookie = cookie.partition(";")[0]
        return answer.status, json.loads(answer.read())


@contextlib.contextmanager
def serving(family: str, environment: Any = None, host: str = "127.0.0.1") -> Iterator[str]:
    with GymHTTPServer(ResourcesServer(family, environment), host) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


def task_of(family: str) -> Task:
    return next(iter_tasks(family, "train", 0))


def call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"type": "function_call", "call_id": f"call_{number}", "name": name, "arguments": text}


def with_response(record: dict[str, Any], *items: dict[str, Any]) -> dict[str, Any]:
    return record | {"response": response_of("") | {"output": list(items)}}


@pytest.mark.parametrize("family", ["math", "multiple_choice", "instruction_following", "structured_output"])
def test_a_response_is_verified_and_the_request_comes_back_with_its_reward(family: str) -> None:
    task = task_of(family)
    record = record_of(task) | {"_ng_task_index": 7, "anything": [1]}
    with serving(family) as url:
        client = Client(url)
        assert client.post("/seed_session", record) == (200, {})
        for text, reward in ((task.solution.answer, 1.0), ("no answer at all", 0.0)):
            request = record | {"response": response_of(text)}
            status, verified = client.post("/verify", request)
            assert status == 200 and verified["reward"] == reward
            assert {key: verified[key] for key in request} == request
            assert "_ng_failure_class" not in verified
        assert client.send("GET", "/") == (200, {"status": "ok"})
        assert client.send("GET", "/reverify_mode") == (200, "stateless")


def test_reasoning_is_no_answer_wherever_it_stands() -> None:
    task = task_of("math")
    right = task.solution.answer
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": right}]}
    with serving("math") as url:
        client = Client(url)
        message = response_of(f"<think>\n12</think>{right}")["output"][0]
        assert client.post("/verify", with_response(record_of(task), reasoning, message))[1]["reward"] == 1.0
        assert client.post("/verify", with_response(record_of(task), reasoning))[1]["reward"] == 0.0


def test_records_that_are_published_for_gym_are_verified_too() -> None:
    record = {
        "responses_create_params": {"input": [{"role": "user", "content": "What is 2+2? Box it."}]},
        "question": "What is 2+2?", "expected_answer": "4",
    }  # fmt: skip
    with serving("math") as url:
        client = Client(url)
        rewards = [
            client.post("/verify", record | {"response": response_of(text)})[1]["reward"]
            for text in (r"It is \boxed{4}.", r"\boxed{\frac{8}{2}}", r"\boxed{5}", "4?")
        ]
    assert rewards == [1.0, 1.0, 0.0, 0.0]


def test_an_error_is_a_failure_that_gym_leaves_out_and_no_zero() -> None:
    class Broken:
        def tasks(self) -> list[Any]:
            return []

        def verify_answer(self, spec: dict[str, Any], answer: str) -> float:
            raise TimeoutError("the judge does not answer")

    task = Task("mine", "?", "mine|?", {}, Solution("", ""))
    with serving("mine", Broken()) as url:
        status, failed = Client(url).post("/verify", record_of(task) | {"response": response_of("4")})
    assert status == 200
    assert failed["_ng_failure_class"] == "verifier_failed" and failed["mask_sample"] is True
    assert failed["_ng_failure_verifier_error"] == "TimeoutError: the judge does not answer"
    rows = [failed | {"_ng_task_index": 0}, {"reward": 1.0, "_ng_task_index": 0}]
    metrics = ResourcesServer("math").aggregate_metrics({"verify_responses": rows})
    assert metrics["key_metrics"] == {"mean/reward": 1.0}
    assert metrics["agent_metrics"]["num_failures"] == 1
    broken = task_of("math").to_dict() | {"spec": {}}
    with serving("math") as url:
        status, failed = Client(url).post("/verify", record_of(Task.from_dict(broken)) | {"response": response_of("4")})
    assert status == 200 and failed["_ng_failure_class"] == "verifier_failed"


def test_tools_are_called_by_their_names_in_the_session_of_a_cookie() -> None:
    task = task_of("workplace_assistant")
    record = record_of(task)
    write = task.spec["calls"][0]
    with serving("workplace_assistant") as url:
        first, second = Client(url), Client(url)
        assert first.post(f"/{write['name']}", write["arguments"])[0] == 400  # before it has begun
        for client in (first, second):
            assert client.post("/seed_session", record) == (200, {})
        assert first.cookie != second.cookie
        outputs = [client.post(f"/{write['name']}", write["arguments"])[1]["output"] for client in (first, second)]
        assert outputs[0] == outputs[1] and not outputs[0].startswith("Error")  # each has its own databases
        status, refused = first.post("/no_such_tool", {})
        assert status == 200 and refused == {"output": "Error: no tool is called no_such_tool."}
        # What counts are the calls of the response, not those of the session.
        right, wrong = call(write["name"], write["arguments"]), call(write["name"], {"email_id": "none"})
        said = response_of("Done.")["output"][0]
        for items, reward in (((wrong, right, said), 1.0), ((wrong, said), 0.0), ((call("x", "{"), right), 1.0)):
            assert second.post("/verify", with_response(record, *items))[1]["reward"] == reward


def test_the_tools_of_math_are_answered() -> None:
    task = generate_tasks("math", "eval", 1, 0, {"tool_share": 1.0})[0]
    record = record_of(task)
    [tool] = record["responses_create_params"]["tools"]
    with serving("math") as url:
        client = Client(url)
        assert client.post("/seed_session", record) == (200, {})
        answer = client.post(f"/{tool['name']}", {"expression": task.spec["expression"]})
        assert answer == (200, {"output": task.solution.answer})
        assert client.post("/weather", {"place": "here"})[1]["output"].startswith("Error: the weather")


def test_the_session_used_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym_server, "MAX_SESSIONS", 2)
    record = record_of(task_of("workplace_assistant"))
    server = ResourcesServer("workplace_assistant")
    for session in ("a", "b", "a", "c"):
        server.seed_session(session, record)
    assert list(server.sessions) == ["a", "c"]


@pytest.mark.parametrize(
    ("path", "body", "status", "detail"),
    [
        ("/verify", b"{", 400, "the body is no JSON"),
        ("/verify", b"[" * 100_000, 400, "the body is no JSON"),
        ("/verify", [], 422, "the body: an object is needed"),
        ("/verify", {}, 422, "no prompt in responses_create_params.input"),
        ("/verify", {"task": {"family": "math"}}, 422, "not a task record: prompt, canonical, spec, solution missing"),
        ("/verify", record_of(task_of("multiple_choice")), 422, "a task of multiple_choice, and this server has math"),
        ("/verify", record_of(task_of("math")), 422, "response.output: a list is needed"),
        ("/verify", record_of(task_of("math")) | {"response": {"output": [3]}}, 422, "an item is no object with a"),
        ("/aggregate_metrics", {}, 422, "verify_responses: a list of objects is needed"),
        ("/aggregate_metrics", {"verify_responses": [{"response": {"usage": "many"}}]}, 422, "verify_responses: 'str'"),
        ("/aggregate_metrics", {"verify_responses": [{"_ng_task_index": [1]}]}, 422, "verify_responses: unhashable"),
        ("/aggregate_metrics", {"verify_responses": [{"reward": 10**400}]}, 422, "too large"),
        ("/look", {}, 404, "no endpoint /look: math has no tools"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_request_is_refused_in_one_line(path: str, body: Any, status: int, detail: str) -> None:
    with serving("math") as url:
        client = Client(url)
        answer = client.post(path, body)
        assert answer[0] == status and detail in answer[1]["detail"] and "\n" not in answer[1]["detail"]
        assert client.send("GET", "/")[0] == 200  # and the connection goes on


def test_a_fault_of_the_server_is_an_answer_and_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise LookupError("no\ntable")

    monkeypatch.setattr(ResourcesServer, "verify", fails)
    with serving("math") as url:
        client = Client(url)
        assert client.post("/verify", {}) == (500, {"detail": "LookupError: no table"})
        assert client.post("/seed_session", {}) == (200, {})  # on the same connection
    assert capsys.readouterr().err == "/verify: LookupError: no table\n"


def test_a_page_in_a_browser_cannot_have_anything_verified() -> None:
    with serving("math") as url:
        for headers, status in (({"Content-Type": "text/plain"}, 415), ({"Host": "evil.example:80"}, 403)):
            client = Client(url)
            client.connection.request("POST", "/verify", b"{}", {"Content-Type": "application/json", **headers})
            assert client.connection.getresponse().status == status
        client = Client(url)
        client.cookie = 'nemotron_session="a\\015\\012b"'
        assert client.post("/seed_session", {}) == (200, {})
        assert len(client.cookie) == len("nemotron_session=") + 32  # another one, without line breaks


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_each_name_of_this_machine_can_be_listened_on_and_asked_for(host: str) -> None:
    if host == "::1":
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("no IPv6 here")
    with serving("math", host=host) as url:
        assert Client(url).post("/seed_session", {}) == (200, {})


def test_a_body_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym_server, "MAX_BYTES", 10)
    with serving("math") as url:
        assert Client(url).post("/verify", {"a": "0123456789"})[0] == 413


def test_metrics_are_those_of_the_rewards_by_task_and_of_all() -> None:
    rows = [
        {"_ng_task_index": task, "_ng_rollout_index": index, "reward": reward, "is_short": reward > 0, "name": "x",
         "response": {"usage": {"output_tokens": 10}}}
        for task, rewards in ((3, (1.0, 0.0, 0.5)), (1, (1.0,)))
        for index, reward in enumerate(rewards)
    ]  # fmt: skip
    metrics = ResourcesServer("math").aggregate_metrics({"verify_responses": rows})
    first, last = metrics["group_level_metrics"]
    assert (first["_ng_task_index"], first["num_rollouts"], first["mean/reward"], first["std/reward"]) == (1, 1, 1, 0)
    assert last["_ng_task_index"] == 3
    assert [last[f"{name}/reward"] for name in ("mean", "median", "std", "min")] == [0.5, 0.5, 0.5, 0.0]
    assert metrics["key_metrics"] == {"mean/reward": 0.625, "mean/is_short": 0.75, "mean/output_tokens": 10.0}
    assert summary([]) == {}
    assert ResourcesServer("math").aggregate_metrics({"verify_responses": []})["agent_metrics"] == {}
