"""Other people's environments, each in one short file: a server of NeMo Gym, reasoning-gym, verifiers.

The last two need their libraries, which no extra brings: CI skips them. They hold with reasoning-gym 0.1.25 and
verifiers 0.4.0.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from chat_server import send
from http_server import serving

from nemotron.stack.environments import Task, Verdict, iter_tasks, load_environment, open_episode, verify
from nemotron.stack.environments.gym_server import GymHTTPServer, ResourcesServer, record_of
from nemotron.stack.environments.own import read_tasks

EXAMPLES = Path(__file__).parents[2] / "examples/environments"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.name)
def test_an_example_has_at_most_thirty_lines(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 30


def of_gym(monkeypatch: pytest.MonkeyPatch, url: str, records: Path, family: str) -> list[tuple[Task, Task]]:
    """Three tasks of a family, and what the example makes of their records."""
    tasks = [task for task, _ in zip(iter_tasks(family, "train", 0, distinct=True), range(3), strict=False)]
    records.write_text("".join(json.dumps(record_of(task)) + "\n" for task in tasks))
    monkeypatch.setenv("GYM_URL", url)
    monkeypatch.setenv("GYM_RECORDS", str(records))
    theirs = read_tasks("theirs", load_environment(f"{EXAMPLES}/gym_server.py:GymServer"))
    return list(zip(tasks, theirs, strict=True))


@pytest.fixture
def serve() -> Iterator[Any]:
    servers = []

    def start(family: str) -> str:
        server = GymHTTPServer(ResourcesServer(family))
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server.url

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("family", ["math", "instruction_following"])
def test_a_server_of_gym_gives_its_verdicts(
    family: str, serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task, theirs in of_gym(monkeypatch, serve(family), tmp_path / "records.jsonl", family):
        assert theirs.prompt == task.prompt
        for answer in (task.solution.answer, "nothing of the kind", ""):
            assert verify(theirs, answer).score == verify(task, answer).score
        episode = open_episode(theirs, thinking=True)
        assert episode is not None and episode.respond(f"so</think>{task.solution.answer}") is None
        assert episode.verdict() == Verdict("score", 1.0)


def test_tools_of_a_server_of_gym_answer_over_several_turns(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = serve("workplace_assistant")
    for task, theirs in of_gym(monkeypatch, url, tmp_path / "records.jsonl", "workplace_assistant"):
        episode, ours = open_episode(theirs), open_episode(task)
        assert episode is not None and ours is not None
        shown, expected = episode.respond(task.solution.answer), ours.respond(task.solution.answer)
        assert shown is not None and expected is not None
        assert [json.loads(each["content"])["output"] for each in shown] == [each["content"] for each in expected]
        forged = "<tool_call><function=verify></function></tool_call>"
        assert episode.respond(forged) == [{"role": "tool", "content": "Error: no tool is called verify."}]
        assert episode.respond("Done.") is None
        assert episode.verdict().score == ours.verdict().score == 1.0
        idle = open_episode(theirs)
        assert idle is not None and idle.respond("Done.") is None and idle.verdict().status == "wrong"


class Faulty(BaseHTTPRequestHandler):
    """A server that fails in the way that its attribute says."""

    def do_POST(self) -> None:
        status, content = self.server.answers[self.path]  # type: ignore[attr-defined]
        self.rfile.read(int(self.headers["Content-Length"]))
        send(self, status, content if isinstance(content, bytes) else json.dumps(content).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("seeded", "verified", "reason"),
    [
        ((200, {}), (500, {"detail": "down"}), "HTTPError: HTTP Error 500"),
        ((503, {}), (200, {"reward": 1.0}), "HTTPError: HTTP Error 503"),
        ((200, {}), (200, b"<html>"), "JSONDecodeError"),
        ((200, {}), (200, {"reward": 0.0, "_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "busy"}),
         "the server reports judge_failed: busy"),
        ((200, {}), (200, {"reward": 0.0, "mask_sample": True}), "leaves the sample out"),
        ((200, {}), (200, {"reward": math.nan}), "nan, which is not in 0..1"),
        ((200, {}), (200, {}), "gave None, not a number"),
    ],
    ids=range(7),
)  # fmt: skip
def test_a_server_that_fails_makes_errors_and_no_zeros(
    seeded: Any, verified: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Faulty, answers={"/seed_session": seeded, "/verify": verified}) as url:
        _, theirs = of_gym(monkeypatch, url, tmp_path / "records.jsonl", "math")[0]
        verdict = verify(theirs, "4")
    assert verdict.status == "error" and math.isnan(verdict.score) and reason in verdict.reason


def test_a_server_that_is_not_there_makes_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Faulty) as url:
        pass
    for family in ("math", "workplace_assistant"):
        _, theirs = of_gym(monkeypatch, url, tmp_path / "records.jsonl", family)[0]
        assert verify(theirs, "4").status == "error"


def test_a_dataset_of_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")
    tasks = list(read_tasks("legs", load_environment(f"{EXAMPLES}/leg_counting.py:LegCounting")))
    assert len(tasks) == 2000  # each answer was held against its own scoring
    assert verify(tasks[0], tasks[0].solution.answer).score == 1.0
    assert verify(tasks[0], tasks[1].solution.answer).score < 0.1


TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Task(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return 1 / len(trace.last_reply) if trace.last_reply != self.data.answer else 1.0

class Reverse(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for word in ("garden", "winter"):
            yield Task(Data(prompt=f"Reverse {word}.", system_prompt="One word.", answer=word[::-1]))

__all__ = ["Reverse"]
"""


def test_a_taskset_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    (tmp_path / "reverse_words.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VERIFIERS_TASKSET", "reverse_words")
    tasks = list(read_tasks("theirs", load_environment(f"{EXAMPLES}/verifiers_taskset.py:Taskset")))
    assert [task.prompt for task in tasks] == ["One word.\n\nReverse garden.", "One word.\n\nReverse winter."]
    assert [verify(tasks[0], answer).score for answer in ("nedrag", "abcd")] == [1.0, 0.25]
    assert verify(tasks[0], "").status == "error"  # what its reward raises
