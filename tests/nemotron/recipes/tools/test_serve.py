"""`nemotron serve` as a user has it: the command, OpenAI's client and lm-eval on it, a browser on its page."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from browser import PROGRAM, browser

from nemo_runspec.errors import UserError
from nemotron.data_prep.tokens.tokenizer import save_tokenizer, train_tokenizer
from nemotron.kit.schemas.evaluation import ResponsesConfig
from nemotron.recipes.tools import env_serve, lm_eval_run, serve
from nemotron.stack.environments import answer_of, generate_tasks, plain_text
from nemotron.stack.evaluation.lm_eval_model import NemotronLM
from nemotron.stack.evaluation.model import evaluate_model
from nemotron.stack.models import NemotronH
from nemotron.stack.serving.prompt import completion_prompts
from nemotron.stack.serving.requests import CompletionRequest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[4]
NUM_TASKS = 6
USER = [{"role": "user", "content": "What is 12 + 7?"}]
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_model: Callable[..., NemotronH]) -> Path:
    """A model that was never trained, with a tokenizer for the tasks."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tasks = [task for family in ("math", "multiple_choice") for task in generate_tasks(family, "train", 40)]
    tokenizer = train_tokenizer([plain_text(task) for task in tasks], 500)
    save_tokenizer(tokenizer, folder, model_max_length=512, template="super3")
    model = small_model("MEM*E-", 1, vocab_size=tokenizer.get_vocab_size(), moe_intermediate_size=16)
    model.save_pretrained(folder)
    return folder


class Process:
    """A server, and where it is."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nemotron", "serve", str(folder), "--port", "0", *words],
            env=os.environ | {"PYTHONPATH": str(ROOT / "src"), **environment}, cwd=folder.parent,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stderr is not None
        self.said: list[str] = []
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"(http://\S+)/v1", line):
                self.url = found[1]
                break
        else:
            raise AssertionError("".join(self.said))
        # What it says later must not fill the pipe.
        self._reader = threading.Thread(target=lambda: self.said.extend(self.process.stderr or ()), daemon=True)
        self._reader.start()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, number: signal.Signals) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join()
        return code

    def metric(self, name: str) -> float:
        """A number of /metrics."""
        import urllib.request

        with urllib.request.urlopen(f"{self.url}/metrics") as page:
            lines = page.read().decode().splitlines()
        return float(next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(name)))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Process]:
    with Process(folder) as server:
        yield server
        assert server.stop(signal.SIGTERM) == 143, server.said


def test_a_client_of_openai(server: Process) -> None:
    (model,) = server.client.models.list().data
    create = server.client.chat.completions.create
    settings: dict[str, Any] = {"model": model.id, "messages": USER, "temperature": 0, "max_tokens": 24}
    whole = create(**settings, logprobs=True, top_logprobs=3, extra_body={"return_token_ids": True})
    choice = whole.choices[0]
    assert whole.usage.completion_tokens == len(choice.token_ids) == len(choice.logprobs.content)
    assert all(each.logprob == each.top_logprobs[0].logprob for each in choice.logprobs.content)  # greedy
    text, ids = "", []
    for chunk in create(**settings, stream=True, extra_body={"return_token_ids": True}):
        delta = chunk.choices[0].delta
        text += (getattr(delta, "reasoning", None) or "") + (delta.content or "")
        ids += chunk.choices[0].token_ids
    assert text == (choice.message.reasoning or "") + choice.message.content and ids == choice.token_ids
    drawn = [create(**settings | {"temperature": 1, "seed": seed}).choices[0].message for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    several = create(**settings | {"temperature": 1, "seed": 1, "n": 2}).choices
    assert [each.message for each in several] == [drawn[0], drawn[2]]


def test_what_an_answer_is_held_to(server: Process) -> None:
    create = server.client.chat.completions.create
    settings: dict[str, Any] = {"model": "tiny", "messages": USER, "seed": 0, "max_tokens": 200}
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}, "many": {"type": "boolean"}},
        "required": ["size", "many"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for body in ({"max_thinking_tokens": 5}, {"reasoning_effort": "none"}):
        choice = create(**settings, response_format=wanted, extra_body=body).choices[0]
        assert set(json.loads(choice.message.content)) == {"size", "many"} and choice.finish_reason == "stop"
        assert bool(choice.message.reasoning) == ("max_thinking_tokens" in body)
    forced = {"type": "function", "function": {"name": "add"}}
    choice = create(**settings, tools=[ADD], tool_choice=forced, extra_body={"max_thinking_tokens": 5}).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "add" and isinstance(json.loads(call.function.arguments)["a"], int)

    class Answer(pydantic.BaseModel):
        unit: Literal["m", "km"] | None
        is_exact: bool | None

    declared = openai.pydantic_function_tool(Answer, name="answer")
    required: dict[str, Any] = {"tools": [declared], "tool_choice": "required", "parallel_tool_calls": False}
    choice = create(**settings, **required, reasoning_effort="none").choices[0]
    (call,) = choice.message.tool_calls
    Answer.model_validate_json(call.function.arguments, strict=True)


def test_what_is_refused(server: Process, folder: Path) -> None:
    with pytest.raises(openai.NotFoundError):
        server.client.chat.completions.create(model="other", messages=USER)
    with pytest.raises(openai.BadRequestError) as too_long:
        server.client.completions.create(model="tiny", prompt="x " * 5000)
    assert too_long.value.code == "context_length_exceeded"
    port = server.url.rpartition(":")[2]
    run = [sys.executable, "-m", "nemotron", "serve", str(folder), "--port", port]
    taken = subprocess.run(run, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")})
    assert taken.returncode == 2 and f"cannot listen on 127.0.0.1:{port}" in taken.stderr


def test_what_a_request_does_not_say_the_model_does(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = serve.Options(
        model=str(tmp_path), tokenizer=str(folder), template="super3", thinking=True, name="tiny", host="", port=0,
        api_key_env=None, max_length=512, max_rows=1, max_waiting=1, num_drafts=0, prompt_cache=0, timeout=1, drain=1,
    )  # fmt: skip
    shutil.copy(folder / "config.json", tmp_path)
    file = tmp_path / "generation_config.json"

    def drawn(**said: float) -> tuple[float, float]:
        request = CompletionRequest.model_validate({"model": "tiny", "prompt": "1", **said})
        ((sampling,),) = (prompt.samplings for prompt in completion_prompts(serve.served_model(options), request))
        return sampling.temperature, sampling.top_p

    assert drawn() == (1.0, 1.0)
    file.write_text('{"temperature": 0.6, "top_p": 0.95, "top_k": 20}')
    assert drawn() == (0.6, 0.95)
    assert drawn(temperature=0, top_p=1) == (0.0, 1.0)
    assert "top_k = 20 is not served" in capsys.readouterr().err
    file.write_text('{"temperature": -1}')
    with pytest.raises(UserError, match=r"generation_config\.json: temperature >= 0"):
        serve.served_model(options)


def test_an_address_that_is_not_of_this_machine() -> None:
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1:0") as refused:  # one for documentation
        serve.bind("192.0.2.1", 0)
    assert refused.value.hint is not None and "--host" in refused.value.hint
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1:0") as refused:
        env_serve.main(env_serve.Options("math", "192.0.2.1", 0, "bubblewrap"))
    assert refused.value.hint is not None and "--host" in refused.value.hint


def harness(model: Any, task: str, **settings: Any) -> list[dict[str, Any]]:
    """The samples of lm-eval, without its own tasks."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(
        include_path=str(lm_eval_run.TASKS), include_defaults=False, metadata={"num_tasks": NUM_TASKS, "seed": 0}
    )
    results = simple_evaluate(model, tasks=[task], task_manager=manager, bootstrap_iters=0, **settings)
    return sorted(results["samples"][task], key=lambda sample: sample["doc_id"])


def test_lm_eval_finds_what_our_own_evaluation_does(server: Process, folder: Path) -> None:
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    model = NemotronH.from_pretrained(folder)
    chat = LocalChatCompletion(base_url=f"{server.url}/v1/chat/completions", model="tiny", num_concurrent=4)
    for family in ("math", "multiple_choice"):
        samples = harness(chat, f"nemotron_{family}", apply_chat_template=True)
        known = evaluate_model(
            model, folder, generate_tasks(family, "eval", NUM_TASKS), ResponsesConfig(samples=0), template="super3"
        )
        assert [sample["acc"] for sample in samples] == known.greedy_T.tolist()
        answers = [answer_of(completion.text, thinking=True) for completion in known.greedy_completions]
        assert [sample["resps"][0][0] for sample in samples] == answers
    text = LocalCompletionsAPI(base_url=f"{server.url}/v1/completions", model="tiny", max_length=512)
    assert text.tokenizer_backend == "remote"
    embedded = NemotronLM(model, folder, None, max_length=512)
    for mine, other in zip(harness(text, "nemotron_letters"), harness(embedded, "nemotron_letters"), strict=True):
        for (likelihood, is_greedy), (expected, greedy) in zip(
            mine["filtered_resps"], other["filtered_resps"], strict=True
        ):
            assert likelihood == pytest.approx(expected, abs=1e-4) and is_greedy == greedy


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")
def test_the_page_in_a_browser(server: Process, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as page:
        page.open(f"{server.url}/")
        page.wait("document.title === 'tiny'")
        page.value("at('temperature').value = 0; at('length').value = 30")
        page.value("at('question').value = '<b>What</b> is 1 + 1?'; at('send').click()")
        page.wait("document.querySelector('.assistant')?.dataset.finish")
        assert page.value("document.querySelector('.user').innerText.trim()") == "<b>What</b> is 1 + 1?"
        shown = page.value("document.querySelector('.assistant').textContent")
        said = json.loads(page.value("JSON.stringify(messages)"))[1]
        assert (said["content"] or said["reasoning_content"]) in shown and " tokens/s" in shown
        assert not page.value("document.querySelector('details').open")  # reasoning is folded
        page.value("at('thinks').checked = false; at('question').value = 'And without?'; at('send').click()")
        page.wait("document.querySelectorAll('.assistant')[1]?.dataset.finish")
        assert page.value("document.querySelectorAll('details')[1].hidden") is True
        colours = [page.value("getComputedStyle(document.body).backgroundColor")]
        page.value("at('theme').click()")
        colours.append(page.value("getComputedStyle(document.body).backgroundColor"))
        assert colours[0] != colours[1]
        page.value("at('length').value = 3000; at('temperature').value = 2")
        finished = ""
        for turn in range(2, 12):  # an untrained model draws the end of a turn now and then
            page.value(f"at('question').value = 'Number {turn}'; at('send').click()")
            page.wait(f"document.querySelectorAll('.assistant')[{turn}]?.textContent.length > 20")
            page.value("at('send').textContent === 'Stop' && at('send').click()")
            page.wait(f"document.querySelectorAll('.assistant')[{turn}].dataset.finish")
            finished = page.value(f"document.querySelectorAll('.assistant')[{turn}].dataset.finish")
            if finished == "stopped":
                break
        assert finished == "stopped"
        page.value("at('fresh').click(); at('length').value = 9999; at('question').value = 'x'; at('send').click()")
        page.wait("document.querySelector('.wrong')")
        assert "this model takes 4096 tokens" in page.value("document.querySelector('.wrong').textContent")
        loaded = page.value("performance.getEntriesByType('resource').map((entry) => new URL(entry.name).origin)")
        assert set(loaded) <= {server.url}


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")
def test_the_page_of_a_model_that_completes_text(folder: Path, tmp_path: Path) -> None:
    base = shutil.copytree(folder, tmp_path / "base")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "chat_template.jinja").unlink(missing_ok=True)
    with Process(base) as server, browser(tmp_path / "profile") as page:
        assert "a page to complete text (the model has no chat template)" in server.said[-1]
        page.open(f"{server.url}/")
        page.wait("document.title === 'base'")
        assert "completes text" in page.value("document.querySelector('main').textContent")
        assert page.value("at('send').textContent") == "Complete" and page.value("at('length').value") == "64"
        assert page.value("at('thinks').checkVisibility()") is page.value("at('budget').checkVisibility()") is False
        page.value("at('temperature').value = 0; at('length').value = 8; at('question').value = 'What is 12 '")
        page.value("at('send').click()")
        page.wait("document.querySelector('.assistant')?.dataset.finish")
        shown = page.value("document.querySelector('.assistant > div').textContent")
        known = server.client.completions.create(model="base", prompt="What is 12 ", max_tokens=8, temperature=0)
        assert shown == f"What is 12 {known.choices[0].text}" and page.value("at('send').textContent") == "Complete"
        assert not page.value("document.querySelectorAll('.user, .wrong').length")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_lets_those_at_work_finish(folder: Path, number: signal.Signals, code: int) -> None:
    with Process(folder) as server:
        settings: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 400, "temperature": 0}
        stream = server.client.completions.create(**settings, stream=True)
        next(stream)
        server.process.send_signal(number)
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
        assert server.process.wait(60) == code
        with pytest.raises(openai.APIConnectionError):
            server.client.models.list()


def test_a_key_for_others(folder: Path) -> None:
    with Process(folder, "--host", "0.0.0.0", "--api-key-env", "SERVE_KEY", SERVE_KEY="sesame") as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1") + "/v1"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="wrong").models.list()
        assert openai.OpenAI(base_url=url, api_key="sesame").models.list().data
        assert server.stop(signal.SIGTERM) == 143 and "sesame" not in "".join(server.said)


@pytest.mark.slow
def test_a_thousand_requests_whose_clients_leave_at_random_leak_nothing(folder: Path) -> None:
    with Process(folder, "--max-rows", "16", "--max-waiting", "64", "--prompt-cache", "16") as server:
        host, port = "127.0.0.1", int(server.url.rpartition(":")[2])
        proc = Path(f"/proc/{server.process.pid}")

        def client(number: int) -> int | None:
            """A request that is sent, and read to its end or left; its status where it came to know one."""
            draw = random.Random(number)
            fields = {"messages": USER, "max_tokens": draw.randint(1, 60), "stream": draw.random() < 0.6}
            body = json.dumps(fields | {"n": draw.choice([1, 1, 1, 2])}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            with socket.create_connection((host, port), timeout=60) as connection, contextlib.suppress(ConnectionError):
                connection.sendall(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body)
                leaves = draw.random()
                if leaves < 0.2:  # before it has read a byte
                    time.sleep(draw.random() / 50)
                    return None
                answer = b""
                while more := connection.recv(512):
                    answer += more
                    if leaves < 0.6 and draw.random() < 0.2:
                        # A reset, as of a client that was killed, in place of an end.
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                        return None
                return int(answer.split(b" ", 2)[1])
            return None

        def at_rest() -> tuple[int, int, int]:
            """Open files, threads, and KiB in memory, when nothing is left to do."""
            until = time.monotonic() + 60
            while server.metric("nemotron_requests_running") + server.metric("nemotron_requests_waiting"):
                assert time.monotonic() < until
            status = (proc / "status").read_text()
            numbers = {
                name: int(re.findall(rf"^{name}:\s+(\d+)", status, re.MULTILINE)[0]) for name in ("Threads", "VmRSS")
            }
            return len(list((proc / "fd").iterdir())), numbers["Threads"], numbers["VmRSS"]

        with ThreadPoolExecutor(32) as pool:
            statuses = list(pool.map(client, range(300)))
            files, threads, memory = at_rest()
            statuses += pool.map(client, range(300, 1000))
            after = at_rest()
        assert set(statuses) <= {None, 200, 503} and statuses.count(200) > 200 and statuses.count(None) > 200
        assert after[0] <= files + 2 and after[1] <= threads + 2  # a connection of this process may be about to close
        assert after[2] < memory + 64 * 1024, (memory, after)
        assert server.metric('nemotron_requests_finished_total{reason="error"}') == 0
        assert server.metric('nemotron_requests_finished_total{reason="cancelled"}') > 100
        assert (
            server.client.chat.completions.create(model="tiny", messages=USER, max_tokens=3).usage.completion_tokens
            == 3
        )
        assert server.stop(signal.SIGTERM) == 143


def test_a_port_is_taken_before_anybody_is_served() -> None:
    with serve.bind("127.0.0.1", 0) as first, pytest.raises(UserError, match="cannot listen"):
        serve.bind("127.0.0.1", first.getsockname()[1])
