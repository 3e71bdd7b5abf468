"""An environment as a resources server of NeMo Gym: JSON over HTTP, which its agents and trainers call.

A rollout there is: POST `/seed_session` with the record, which gives the rollout a cookie; for each call of a tool
POST `/TOOL` with its arguments; POST `/verify` with the record and the model's `response`, as the OpenAI Responses API
writes it, which is answered with all of that and the `reward`. `/aggregate_metrics` sums up what was verified.

A verdict that is an error is no reward. It is marked as Gym marks a failed judge, by `_ng_failure_class`: such a row
goes to the file of failures and into no mean. `mask_sample` leaves it out of NeMo-RL's loss. There is one objective, so
no `reward_components`.

Requests as in NeMo Gym, commit 07d6b0d: nemo_gym/base_resources_server.py, judge.py, reward_profile.py.
"""

from __future__ import annotations

import json
import math
import re
import socket
import statistics
import sys
import threading
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from nemo_runspec.errors import UserError
from nemotron.kit.chat import function_of
from nemotron.kit.schemas.sandbox import Sandbox
from nemotron.stack.environments import calculator, code_generation, tool_comparison, workplace_assistant
from nemotron.stack.environments.families import from_gym, prompt_messages, prompt_tools, verify
from nemotron.stack.environments.gym import calls_in, input_of, text_of
from nemotron.stack.environments.own import verify_answer
from nemotron.stack.environments.sandbox import program_slots
from nemotron.stack.environments.task import Environment, Task, Verdict, answer_of, error
from nemotron.stack.environments.workplace import Workplace

SERVERS = {
    "math": "math_with_judge", "multiple_choice": "mcqa", "instruction_following": "instruction_following",
    "structured_output": "structured_outputs", "code_generation": "code_gen",
}  # fmt: skip
"""Family -> the resources server whose published records it verifies, too."""
FAILURE, ROLLOUT, TASK = "_ng_failure_class", "_ng_rollout_index", "_ng_task_index"
COOKIE = "nemotron_session"
LOCAL = ("127.0.0.1", "localhost", "::1")
MAX_SESSIONS = 4096
MAX_BYTES = 16 * 2**20

Body = dict[str, Any]


class BadRequest(Exception):
    """A request that cannot be answered: HTTP status and one line why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, " ".join(reason.split())[:500]


@dataclass
class ResourcesServer:
    """The endpoints of one family, or of an environment of the user's. Requests come from several threads.

    sessions: the workplace of each rollout with tools, the one used longest ago first; beyond `MAX_SESSIONS` that one
    is forgotten.
    """

    family: str
    environment: Environment | None = None
    sandbox: Sandbox = "bubblewrap"
    sessions: OrderedDict[str, tuple[Workplace, tuple[str, ...]]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        # Programs have a limit of time, which as many as there are processors keep.
        self._programs = threading.BoundedSemaphore(program_slots())

    def task_of(self, body: Body) -> Task:
        """The task that a request is about: under `task` as `data prep rl` and `nemotron env records` write it, else a
        record as published for the Gym server that does what this family does."""
        try:
            if isinstance(body.get("task"), dict):
                task = Task.from_dict(body["task"])
                if self.environment is None and task.family != self.family:
                    raise UserError(f"a task of {task.family}, and this server has {self.family}")
                return task
            if self.environment is None and self.family in SERVERS:
                return from_gym(SERVERS[self.family], body)
            raise UserError("no `task` in the request: `nemotron env records` writes records that have one")
        except UserError as failure:
            raise BadRequest(422, failure.message) from failure
        except (KeyError, TypeError, ValueError, AttributeError) as failure:
            raise BadRequest(422, f"not a record of {self.family}: {type(failure).__name__}: {failure}") from failure

    def seed_session(self, session: str, body: Body) -> Body:
        """Begin a rollout; where its task has tools, with a workplace of its own."""
        if self.family == workplace_assistant.FAMILY and self.environment is None:
            spec = self.task_of(body).spec
            try:
                opened = workplace_assistant.open_workplace(spec), tuple(spec["tools"])
            except (KeyError, TypeError) as failure:
                raise BadRequest(422, f"spec is broken: {type(failure).__name__}: {failure}") from failure
            with self._lock:
                self.sessions[session] = opened
                self.sessions.move_to_end(session)
                while len(self.sessions) > MAX_SESSIONS:
                    self.sessions.popitem(last=False)
        return {}

    def call_tool(self, session: str, name: str, arguments: Body) -> Body:
        """What a tool answers; also where it refuses the call, which is for the model to read."""
        if self.family == "math" and self.environment is None and name in calculator.NAMES:
            return {"output": calculator.call(name, arguments, calculator.NAMES)}
        if self.family != workplace_assistant.FAMILY or self.environment is not None:
            raise BadRequest(404, f"no endpoint /{name}: {self.family} has no tools")
        with self._lock:
            if session not in self.sessions:
                raise BadRequest(400, "no such session: POST /seed_session first, and send its cookie")
            self.sessions.move_to_end(session)
            workplace, offered = self.sessions[session]
            without_nulls = {key: value for key, value in arguments.items() if value is not None}
            return {"output": workplace.call(name, without_nulls, offered)}

    def verify(self, body: Body) -> Body:
        """The request with its reward: of the response alone, whatever session it comes from."""
        task, response = self.task_of(body), body.get("response")
        if not isinstance(body.get("responses_create_params"), dict):
            raise BadRequest(422, "responses_create_params: an object is needed")
        if not isinstance(response, dict) or not isinstance(response.get("output"), list):
            raise BadRequest(422, "response.output: a list is needed")
        verdict = self._verdict(task, response["output"])
        if verdict.status == "error":
            failed = {"reward": 0.0, FAILURE: "verifier_failed", "_ng_failure_verifier_error": verdict.reason}
            return body | failed | {"mask_sample": True}
        return body | {"reward": verdict.score, "reason": verdict.reason}

    def _verdict(self, task: Task, output: list[Any]) -> Verdict:
        try:
            text, calls = text_of(output), calls_in(output)
        except UserError as failure:
            raise BadRequest(422, failure.message) from failure
        if self.environment is not None:
            return verify_answer(self.environment, task.spec, answer_of(text))
        try:
            if task.family == workplace_assistant.FAMILY:
                return workplace_assistant.verify_calls(task.spec, calls)
            if task.family == tool_comparison.FAMILY:
                return tool_comparison.verify_calls(task.spec, text, calls)
        except Exception as failure:
            return error(f"{type(failure).__name__}: {failure}")
        if task.family == code_generation.FAMILY:
            with self._programs:
                return verify(task, text, sandbox=self.sandbox)
        return verify(task, text)

    def aggregate_metrics(self, body: Body) -> Body:
        """Mean, largest, smallest, median and standard deviation (of a sample; 0 of one) of every number, by task and
        of all. Failures are counted, and in no other number."""
        rows = body.get("verify_responses")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise BadRequest(422, "verify_responses: a list of objects is needed")
        scored = [row for row in rows if FAILURE not in row]
        by_task: dict[Any, list[Body]] = defaultdict(list)
        for row in scored:
            by_task[row.get(TASK, 0)].append(row)
        groups = [
            {TASK: task, "num_rollouts": len(by_task[task]), **summary(by_task[task])}
            for task in sorted(by_task, key=lambda index: (str(type(index)), index))
        ]
        agent = summary(scored)
        if failed := len(rows) - len(scored):
            agent["num_failures"] = failed
        key_metrics = {name: value for name, value in agent.items() if name.startswith("mean/")}
        return {"group_level_metrics": groups, "agent_metrics": agent, "key_metrics": key_metrics}


def record_of(task: Task) -> dict[str, Any]:
    """A task as a record for a resources server that has its environment (`nemotron env serve`)."""
    params: dict[str, Any] = {"input": input_of(prompt_messages(task))}
    if tools := prompt_tools(task):
        params |= {"tools": [tool_of(tool) for tool in tools], "parallel_tool_calls": False}
    agent = {"type": "responses_api_agents", "name": f"{task.family}_simple_agent"}
    return {"responses_create_params": params, "agent_ref": agent, "task": task.to_dict()}


def tool_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The definition of a tool as the Responses API takes it."""
    function = function_of(tool)
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return {
        "type": "function", "name": function["name"], "description": function.get("description") or "",
        "parameters": parameters, "strict": False,
    }  # fmt: skip


def summary(rows: list[Body]) -> dict[str, float]:
    """The five figures of each number of the rows, that of tokens used included."""
    columns: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        response = row.get("response")
        usage = response.get("usage") if isinstance(response, dict) else None
        for name, value in {**row, **(usage or {})}.items():
            if isinstance(value, int | float) and name not in (TASK, ROLLOUT) and math.isfinite(value):
                columns[name].append(value)
    figures: Mapping[str, Callable[[list[float]], float]] = {
        "mean": statistics.fmean, "max": max, "min": min, "median": statistics.median,
        "std": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
    }  # fmt: skip
    return {f"{name}/{column}": float(of(values)) for name, of in figures.items() for column, values in columns.items()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # a connection serves many requests
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body of an answer in one packet
    timeout = 600
    server: GymHTTPServer

    def do_GET(self) -> None:
        """Whether the server is up, and that `/verify` needs no session."""
        answers = {"/": {"status": "ok"}, "/reverify_mode": "stateless"}
        if self.path in answers:
            self._answer(200, answers[self.path])
        else:
            self._answer(404, {"detail": f"no endpoint {self.path}"})

    def do_POST(self) -> None:
        """The endpoints of the resources server."""
        session = None
        try:
            body, cookie = self._read(), self._session()
            status, content, session = 200, self._dispatch(body, cookie), cookie
        except BadRequest as refusal:
            status, content = refusal.status, {"detail": refusal.reason}
        except (ConnectionError, TimeoutError):  # nobody is there to be answered
            raise
        except Exception as failure:  # the caller learns that it failed here, and the next request is answered
            status, content = 500, {"detail": BadRequest(500, f"{type(failure).__name__}: {failure}").reason}
            print(f"{self.path}: {content['detail']}", file=sys.stderr)
        self._answer(status, content, session)

    def _dispatch(self, body: Body, session: str) -> Body:
        resources = self.server.resources
        match self.path:
            case "/seed_session":
                return resources.seed_session(session, body)
            case "/verify":
                return resources.verify(body)
            case "/aggregate_metrics":
                try:
                    return resources.aggregate_metrics(body)
                except (TypeError, OverflowError) as failure:
                    raise BadRequest(422, f"verify_responses: {failure}") from failure
        return resources.call_tool(session, self.path.removeprefix("/"), body)

    def _read(self) -> Body:
        # A page in a browser on this machine can send neither of these, and programs may be run here.
        host = re.sub(r":\d*$", "", self.headers.get("Host", "")).strip("[]")
        if self.server.is_local and host not in LOCAL:
            self.close_connection = True
            raise BadRequest(
                403, f"asked for as {host!r}: this server is for this machine alone; --host lets others in"
            )
        if self.headers.get_content_type() != "application/json":
            self.close_connection = True
            raise BadRequest(415, "Content-Type has to be application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BYTES:
            self.close_connection = True  # what follows is not read
            raise BadRequest(
                *((413, f"more than {MAX_BYTES} bytes") if length.isdecimal() else (411, "Content-Length is missing"))
            )
        try:
            body = json.loads(self.rfile.read(int(length)) or b"{}")
        except (ValueError, RecursionError) as failure:
            raise BadRequest(400, f"the body is no JSON: {failure}") from failure
        if not isinstance(body, dict):
            raise BadRequest(422, "the body: an object is needed")
        return body

    def _session(self) -> str:
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        # It goes back as a header: nothing but what was given out.
        return cookie.value if cookie and re.fullmatch("[0-9a-f]{32}", cookie.value) else uuid.uuid4().hex

    def _answer(self, status: int, value: Any, session: str | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if session:  # with every answer: Gym's agents keep the cookies of the last one only
            self.send_header("Set-Cookie", f"{COOKIE}={session}; Path=/; HttpOnly; SameSite=Lax")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing: there are thousands of requests."""


class GymHTTPServer(ThreadingHTTPServer):
    """`resources` over HTTP, a thread a connection."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, resources: ResourcesServer, host: str = "127.0.0.1", port: int = 0) -> None:
        self.resources, self.is_local = resources, host in LOCAL
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Where it is, with the port that it was given where 0 was asked for."""
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}" if self.address_family == socket.AF_INET6 else f"http://{host!s}:{port}"
