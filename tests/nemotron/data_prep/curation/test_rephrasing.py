"""Rephrasing against a small server that answers by rule, and that fails in every way that an endpoint can fail."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, chat_server, send, text_in
from hypothesis import given
from hypothesis import strategies as st

from nemo_runspec.errors import RunFailed, UserError
from nemotron.data_prep.curation import rephrasing
from nemotron.data_prep.curation.rephrasing import (
    STYLES,
    Client,
    Journal,
    accept,
    segments,
)
from nemotron.data_prep.curation.step import Document, plan_step, read_documents, write_documents
from nemotron.data_prep.work.engines import SerialEngine
from nemotron.data_prep.work.shards import Receipt, freeze, run_shards
from nemotron.kit.schemas.curation import EndpointConfig, RephrasingSettings, RuleConfig, StylesConfig

KEY = "sk" + "-test-0123456789abcdef0123456789"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)  # of seconds that double


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


def endpoint(url: str, **more: Any) -> EndpointConfig:
    patience = {"concurrency": 4, "timeout": 5.0, "max_attempts": 4, "max_failed": 0.0}
    return EndpointConfig(base_url=url, model="m", **(patience | more))


def document(number: int, quality: str = "low", words: int = 12) -> Document:
    text = " ".join(f"word{number}x{i}" for i in range(words))
    return {"id": f"d{number}", "text": text, "url": f"https://site.org/{number}", "quality": quality, "bucket": 3}


def settings_for(url: str, **patience: Any) -> RephrasingSettings:
    size = {"max_input_words": 400, "max_output_tokens": 512}
    styles = StylesConfig(wikipedia=RuleConfig(labels=["low"], **size), distill=RuleConfig(labels=["high"], **size))
    return RephrasingSettings(endpoint=endpoint(url, **patience), styles=styles, min_words=3)


def rephrase(folder: Path, url: str, documents: list[Document], **patience: Any) -> Receipt[Any]:
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "in.jsonl.zst"
    if not source.exists():
        write_documents(source, documents)
    plan = plan_step([source], {})
    freeze(plan, folder / "work")
    task, job = rephrasing.rephrase_shard, (settings_for(url, **patience), folder / "state")
    [(receipt, _)] = run_shards(plan, folder / "work", task, job, SerialEngine(), rephrasing.RephrasingCounts)
    return receipt


def synthetic(folder: Path) -> list[Document]:
    return list(read_documents(folder / "work" / "documents" / "in-synthetic.jsonl.zst"))


# --- The request, and documents that come of it ---


def test_documents_styles_and_what_is_sent(server: ChatServer, tmp_path: Path) -> None:
    documents = [document(0), document(1, "medium"), document(2, "high"), document(3) | {"split": "valid"}]
    receipt = rephrase(tmp_path, server.url, documents)
    assert list(read_documents(tmp_path / "work" / "documents" / "in.jsonl.zst")) == documents
    made = synthetic(tmp_path)
    assert [(d["id"], d["source"], d["rephrased_from"], d["model"]) for d in made] == [
        ("d0#wikipedia", "synthetic_wikipedia", "d0", "m"),
        ("d2#distill", "synthetic_distill", "d2", "m"),
    ]
    assert [d["text"] for d in made] == [f"Reworded: {documents[i]['text']}" for i in (0, 2)]
    assert made[0]["url"] == documents[0]["url"] and made[0]["quality"] == "low"

    body = next(body for body in server.bodies if text_in(body) == documents[0]["text"])
    assert set(body) == {"model", "messages", "temperature", "top_p", "max_tokens", "seed"}
    assert (body["model"], body["temperature"], body["top_p"], body["max_tokens"]) == ("m", 0.5, 0.9, 512)
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    assert len({body["seed"] for body in server.bodies}) == 2
    assert all("authorization" not in headers for headers in server.headers)

    usage = receipt.counts.usage["wikipedia"]
    assert (usage["requests"], usage["answers"], usage["completion_tokens"]) == (1, 1, 13)
    assert usage["prompt_tokens"] == len(body["messages"][1]["content"].split())
    table = receipt.counts.table
    assert table.read.documents == 4 and table.kept.documents == 6
    assert table.noted["synthetic, distill"].documents == 1


def test_a_long_document_goes_in_parts_and_comes_back_as_one(server: ChatServer, tmp_path: Path) -> None:
    long = document(0, words=0) | {"text": "\n".join(" ".join(f"l{i}w{j}" for j in range(100)) for i in range(9))}
    rephrase(tmp_path, server.url, [long])
    assert sorted(len(text_in(body).split()) for body in server.bodies) == [100, 400, 400]
    [made] = synthetic(tmp_path)
    assert made["text"].replace("Reworded: ", "").split() == long["text"].split()


# --- An endpoint that fails ---


def status(number: int, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda handler: send(handler, number, b'{"error": {"message": "busy"}}', **headers)


def reset(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.close()


def cut(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [{"message": {"content": "half')
    handler.wfile.flush()
    handler.close_connection = True


def dribble(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(20):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.1)


FAULTS = [
    status(429, Retry_After="0"),
    status(500),
    status(503, Retry_After=email.utils.formatdate(0)),
    status(408),
    lambda handler: time.sleep(1.5),
    dribble,
    reset,
    cut,
    lambda handler: send(handler, 200, b'{"choices": ['),
    lambda handler: send(handler, 200, b'{"choices": []}'),
    lambda handler: send(handler, 200, b"[1]"),
    lambda handler: send(handler, 200, b'{"choices": [{"message": {"content": 7}}]}'),
    lambda handler: send(handler, 200, b" " * 2**21),
]


def test_every_failure_that_passes_leaves_no_trace_in_the_documents(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rephrasing, "_MAX_ANSWER_BYTES", 2**20)
    documents = [document(i, ("low", "high")[i % 2]) for i in range(2 * len(FAULTS))]
    calm = rephrase(tmp_path / "calm", server.url, documents)
    server.asked.clear()
    order: dict[str, int] = {}

    def fault(number: int, attempt: int, handler: Any) -> bool:
        place = order.setdefault(text_in(server.bodies[number]), len(order))
        if attempt == 0:
            FAULTS[place % len(FAULTS)](handler)
        return attempt == 0

    server.fault = fault
    rough = rephrase(tmp_path / "rough", server.url, documents, timeout=0.6)
    assert [output.sha256 for output in rough.outputs.values()] == [output.sha256 for output in calm.outputs.values()]
    assert sum(usage["retries"] for usage in rough.counts.usage.values()) == 2 * len(FAULTS)
    assert set(server.asked.values()) == {2}
    assert calm.counts.table == rough.counts.table


def ask(endpoint: EndpointConfig) -> rephrasing.Answer:
    async def once() -> rephrasing.Answer:
        async with Client(endpoint) as client:
            return await client.ask({"model": "m", "messages": [{}, {"content": "<text>\nhi\n</text>"}]})

    return asyncio.run(once())


@pytest.mark.parametrize(
    ("broken", "failure"),
    [(status(500), "status 500"), (reset, "no connection"), (lambda h: send(h, 200, b"{"), "unreadable answer")],
)
def test_attempts_are_counted_and_have_a_limit(server: ChatServer, broken: Any, failure: str) -> None:
    server.fault = lambda number, attempt, handler: broken(handler) is None
    answer = ask(endpoint(server.url, max_attempts=3))
    assert (answer.failure, answer.retries, len(server.bodies)) == (failure, 2, 3)


def test_concurrency_is_bounded_and_used(server: ChatServer, tmp_path: Path) -> None:
    together = threading.Barrier(6)  # nobody is answered before six have asked
    server.fault = lambda number, attempt, handler: together.wait(30) < 0
    rephrase(tmp_path, server.url, [document(i) for i in range(24)], concurrency=6, timeout=60.0)
    assert server.most == 6


@pytest.mark.parametrize("number", [401, 403, 404, 307])
def test_what_concerns_all_requests_stops_at_once(number: int, server: ChatServer, tmp_path: Path) -> None:
    server.fault = lambda n, attempt, handler: status(number, Location=server.url)(handler) is None
    with pytest.raises(RunFailed, match=f"status {number}"):
        rephrase(tmp_path, server.url, [document(i) for i in range(50)], concurrency=2)
    assert len(server.bodies) <= 4  # nothing asked again, no redirect followed


def test_a_refused_request_is_counted_and_not_asked_again(server: ChatServer, tmp_path: Path) -> None:
    def fault(number: int, attempt: int, handler: Any) -> bool:
        bad = "word1x0" in text_in(server.bodies[number])
        if bad:
            status(400)(handler)
        return bad

    server.fault = fault
    documents = [document(i) for i in range(4)]
    for _ in range(2):  # the second attempt knows of the first one's refusal
        with pytest.raises(RunFailed, match="1 of 4 requests failed, most by refused with status 400"):
            rephrase(tmp_path, server.url, documents)
    receipt = rephrase(tmp_path, server.url, documents, max_failed=0.25)
    assert receipt.counts.usage["wikipedia"]["failed: refused with status 400"] == 1
    assert [d["id"] for d in synthetic(tmp_path)] == ["d0#wikipedia", "d2#wikipedia", "d3#wikipedia"]
    assert [count for request, count in server.asked.items() if "word1x0" in request] == [1]


def test_an_endpoint_that_is_gone_stops_the_run_soon_and_answers_are_kept(server: ChatServer, tmp_path: Path) -> None:
    documents = [document(i) for i in range(40)]
    server.fault = lambda number, attempt, handler: number >= 10 and reset(handler) is None
    with pytest.raises(RunFailed, match=r"of 40 requests failed, most by no connection"):
        rephrase(tmp_path, server.url, documents, max_failed=0.9, concurrency=2, max_attempts=2)
    assert len(server.bodies) < 40  # three times the concurrency, not all forty
    server.fault = lambda number, attempt, handler: False
    before = dict(server.asked)
    rephrase(tmp_path, server.url, documents, max_failed=0.9, concurrency=2, max_attempts=2)
    assert all(server.asked[request] == before[request] for request in list(server.asked)[:10])
    assert len(synthetic(tmp_path)) == 40


# --- Going on ---


CHILD = """
import sys
from pathlib import Path
from nemotron.data_prep.curation import rephrasing
from nemotron.kit.schemas.curation import RephrasingSettings
from nemotron.data_prep.curation.step import plan_step
from nemotron.data_prep.work.engines import SerialEngine
from nemotron.data_prep.work.shards import freeze, run_shards

folder, settings = Path(sys.argv[1]), RephrasingSettings.model_validate_json(sys.argv[2])
plan = plan_step([folder / "in.jsonl.zst"], {})
freeze(plan, folder / "work")
task, job = rephrasing.rephrase_shard, (settings, folder / "state")
list(run_shards(plan, folder / "work", task, job, SerialEngine(), rephrasing.RephrasingCounts))
"""


@pytest.mark.slow
def test_killed_again_and_again_it_asks_nothing_twice_that_was_answered(server: ChatServer, tmp_path: Path) -> None:
    documents = [document(i) for i in range(60)]
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    rephrase(calm, server.url, documents)
    assert len(server.bodies) == 60
    rough.mkdir()
    shutil.copy(calm / "in.jsonl.zst", rough)
    server.asked.clear()
    server.bodies.clear()
    server.delay = 0.05
    child = [sys.executable, "-c", CHILD, str(rough), settings_for(server.url, concurrency=3).model_dump_json()]
    kills = 0
    for wanted in (10, 25, 45):
        process = subprocess.Popen(child)
        while len(server.bodies) < wanted + kills * 3 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() != 0
    assert kills == 3
    subprocess.run(child, check=True)
    assert len(server.asked) == 60
    assert len(server.bodies) - 60 <= 3 * kills  # those that were under way
    for name in ("in", "in-synthetic"):
        file = f"work/documents/{name}.jsonl.zst"
        assert (calm / file).read_bytes() == (rough / file).read_bytes()


def test_a_journal_with_a_line_cut_off_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    answers = {f"k{i}": rephrasing.Answer(f"text {i}", "stop", 1, 2, "", 4) for i in range(3)}
    with Journal(path) as journal:
        for key, answer in answers.items():
            journal.add(key, answer)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with Journal(path) as journal:
            known = dict(journal.answers)
            journal.add("new", answers["k0"])
        expected = sum(len(b"".join(lines[: i + 1])) <= size for i in range(3))
        assert known == dict(list(answers.items())[:expected])
        with Journal(path) as journal:
            assert journal.answers == known | {"new": answers["k0"]}


# --- The key ---


def test_the_key_goes_into_the_header_and_nowhere_else(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_API_KEY", KEY)
    receipt = rephrase(tmp_path, server.url, [document(0)], api_key_env="SOME_API_KEY")
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    echo = json.dumps({"error": {"message": f"Incorrect API key provided: {KEY[:12]}***"}}).encode()
    server.fault = lambda number, attempt, handler: send(handler, 401, echo) is None
    with pytest.raises(RunFailed) as error:
        rephrase(tmp_path / "refused", server.url, [document(1)], api_key_env="SOME_API_KEY")
    assert "SOME_API_KEY" in str(error.value)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    seen = written.decode(errors="replace") + str(error.value) + repr(receipt) + "".join(capfd.readouterr())
    assert KEY not in seen and KEY[:12] not in seen and KEY[-8:] not in seen


@pytest.mark.parametrize("value", [None, "", "two words", "line\nbreak", "schlüssel"])
def test_a_missing_or_impossible_key_is_named_not_shown(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_API_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_API_KEY", value)
    with pytest.raises(UserError, match="SOME_API_KEY") as error:
        Client(endpoint("https://h.org/v1", api_key_env="SOME_API_KEY"))
    assert not value or value not in str(error.value)


def test_neither_a_proxy_nor_what_the_environment_holds_for_another_host_is_used(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_BASE_URL"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"X-Key: {KEY}")
    assert ask(endpoint(server.url)).text == "Reworded: hi"
    assert not any(KEY in value for value in server.headers[0].values())
    assert "authorization" not in server.headers[0] and os.environ["OPENAI_API_KEY"] == KEY


# --- What counts as an answer ---

TEXT = "The heap is a binary tree in which every parent is at most as large as its children, kept in a list."


@pytest.mark.parametrize(
    ("style", "answer", "finish", "expected"),
    [
        ("wikipedia", "A heap is a tree whose parents never exceed their children.", "stop", ""),
        (
            "wikipedia",
            "Here is the reworded text:\nA heap is a tree whose parents never exceed their children.",
            "stop",
            "",
        ),
        ("wikipedia", "<think>hm</think>A heap is a tree whose parents never exceed their children.", "stop", ""),
        ("wikipedia", "A heap is", "length", "cut off"),
        ("wikipedia", "<think>let me see", "stop", "cut off"),
        ("wikipedia", " \n", "stop", "empty"),
        ("wikipedia", "I'm sorry, but I can't help with rewriting this text for you today.", "stop", "refusal"),
        ("wikipedia", "As an AI, I cannot reword this.", "stop", "refusal"),
        ("wikipedia", "A heap.", "stop", "too short"),
        ("wikipedia", "A heap is a tree. " * 40, "stop", "too long"),
        ("wikipedia", TEXT.upper(), "stop", "copies the text"),
        (
            "wikipedia",
            f"Use full sentences, keep every statement of fact, and leave out: {TEXT}",
            "stop",
            "copies the prompt",
        ),
        ("knowledge_list", "- A heap is a tree.\n- Parents are not larger than children.", "stop", ""),
        ("knowledge_list", "A heap is a tree. Parents are not larger than children.", "stop", "no list"),
        ("diverse_qa", "Question: What is a heap?\nAnswer: A binary tree.", "stop", ""),
        ("diverse_qa", "1. **Question:** What is a heap?\n**Answer:** A binary tree.", "stop", ""),
        ("diverse_qa", "What is a heap? A binary tree.", "stop", "no question with an answer"),
        ("diverse_qa", "Question: What is a heap?\nQuestion: Why?", "stop", "no question with an answer"),
    ],
)
def test_answers_are_judged(style: str, answer: str, finish: str, expected: str) -> None:
    text, reason = accept(STYLES[style], TEXT, answer, finish)
    assert reason == expected
    assert (text is None) == bool(expected)


def test_questions_stand_below_their_text_and_openings_go() -> None:
    text, _ = accept(STYLES["diverse_qa"], TEXT, "Q: What?\nA: This.\nQuestion 2: Why?\nAnswer 2: Because.", "stop", 1)
    assert text is not None and text.startswith(TEXT + "\n\n")
    assert sorted(text.removeprefix(TEXT).strip().split("\n\n")) == [
        "Question: What?\nAnswer: This.",
        "Question: Why?\nAnswer: Because.",
    ]
    text, _ = accept(
        STYLES["distill"], TEXT, "Sure, here is a shorter version:\n\nHeaps are trees kept in lists.", "stop"
    )
    assert text == "Heaps are trees kept in lists."
    answer = (
        "Measure the size of heaps in nodes as follows:\nHeaps are trees. Here are two facts:\nThey are kept in lists."
    )
    assert accept(STYLES["distill"], TEXT, answer, "stop")[0] == answer


@given(st.lists(st.lists(st.text("ab", min_size=1, max_size=3), max_size=12), max_size=12), st.integers(1, 9))
def test_segments_keep_all_words_in_order_within_the_limit(lines: list[list[str]], limit: int) -> None:
    text = "\n".join(" ".join(words) for words in lines)
    found = segments(text, limit)
    assert " ".join(found).split() == text.split()
    assert all(1 <= len(piece.split()) <= limit for piece in found)
