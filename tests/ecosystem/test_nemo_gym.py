"""NeMo Gym 0.4.0, the real package: its servers verify rollouts of a model of ours, on the data path to NeMo-RL.

`make test-ecosystem` makes the environment, where there is a Python that the package takes. The model server, the
simple agent, one resources server (mcqa) and the collection of rollouts are Gym's; the other resources server is
`nemotron env serve`, and behind Gym's model server stands a model of ours in vLLM's place.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from http_server import serving
from nemo_rl_rollouts import READ, as_nemo_rl_reads, message_log
from tokenizers import Tokenizer

from nemotron.data_prep.tokens.tokenizer import train_tokenizer
from nemotron.kit import RLPrompts
from nemotron.kit.nemo_rl import check_gym_prompts
from nemotron.stack.environments import iter_tasks
from nemotron.stack.environments.gym_server import GymHTTPServer, ResourcesServer, record_of
from nemotron.stack.models import NemotronH, NemotronHConfig
from nemotron.stack.models.decoding.generate import generate

PYTHON = Path(__file__).parents[2] / ".venv-gym/bin/python"
SERVERS = Path(__file__).with_name("gym_servers.py")
HOST = "127.0.0.1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason="NeMo Gym is not here: `make test-ecosystem`"),
]


class Policy(BaseHTTPRequestHandler):
    """vLLM's two endpoints that Gym's model server asks. Every second prompt is answered right, others are sampled."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokenizer: Tokenizer = self.server.tokenizer  # type: ignore[attr-defined]
        prompt = tokenizer.encode(json.dumps(body["messages"])).ids
        answer = self.tokens(body) if self.path == "/tokenize" else self.completion(body, prompt, tokenizer)
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def tokens(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": self.server.tokenizer.encode(json.dumps(body["messages"])).ids}  # type: ignore[attr-defined]

    def completion(self, body: dict[str, Any], prompt: list[int], tokenizer: Tokenizer) -> dict[str, Any]:
        assert body["logprobs"] and body["return_tokens_as_token_ids"] and body["temperature"] == 1.0
        right = next((text for words, text in self.server.answers.items() if words in str(body["messages"])), None)  # type: ignore[attr-defined]
        if right is None:
            drawn = generate(
                self.server.model, [prompt], max_new_tokens=8, stop_token_ids=(),  # type: ignore[attr-defined]
                generator=torch.Generator().manual_seed(0),
            )  # fmt: skip
            ids, logprobs = drawn.tokens[0], drawn.logprobs[0]
        else:
            ids = tokenizer.encode(right).ids
            logprobs = [-0.5] * len(ids)
        message = {"role": "assistant", "content": right or tokenizer.decode(ids, skip_special_tokens=False)}
        tokens = [{"token": f"token_id:{id}", "logprob": value} for id, value in zip(ids, logprobs, strict=True)]
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": tokens}}
        return {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}

    def log_message(self, *_: object) -> None:
        pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def gym_config(vllm: str, ours: str) -> dict[str, Any]:
    """Gym's global config: instances as its config files have them, with addresses."""

    def at(port: int | None = None, **more: Any) -> dict[str, Any]:
        return {"entrypoint": "app.py", "host": HOST, "port": port or free_port(), **more}

    def agent(server: str) -> dict[str, Any]:
        return {
            "responses_api_agents": {
                "simple_agent": at(
                    resources_server={"type": "resources_servers", "name": server},
                    model_server={"type": "responses_api_models", "name": "policy_model"},
                )
            }
        }

    model = at(base_url=f"{vllm}/v1", api_key="none", model="policy", return_token_id_information=True,
               uses_reasoning_parser=True)  # fmt: skip
    return {
        "head_server": {"host": HOST, "port": free_port()},
        "policy_model": {"responses_api_models": {"vllm_model": model}},
        "mcqa": {"resources_servers": {"mcqa": at(domain="knowledge")}},
        "mcqa_simple_agent": agent("mcqa"),
        "math": {"resources_servers": {"ours": at(int(ours.rpartition(":")[2]), domain="math")}},
        "math_simple_agent": agent("math"),
        "default_host": HOST,
        "dry_run": False,
    }


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen([PYTHON, SERVERS, "serve", name], env=environment))
        return processes[-1]

    yield start
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(20)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        try:
            with urlopen(f"http://{HOST}:{port}/", timeout=2) as answer:
                assert answer.status == 200
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no server at port {port}")


def test_gym_s_own_servers_and_ours_verify_rollouts_of_our_model(
    tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    tasks = [task for task, _ in zip(iter_tasks("math", "train", 0), range(4), strict=False)]
    question = "Which number is the largest? A: 3, B: 8, C: 5. Put the letter in a box."
    choice = {
        "responses_create_params": {"input": [{"role": "user", "content": question}]},
        "agent_ref": {"type": "responses_api_agents", "name": "mcqa_simple_agent"},
        "options": [{"A": "3"}, {"B": "8"}, {"C": "5"}], "expected_answer": "B",
    }  # fmt: skip
    sampled = json.loads(json.dumps(choice).replace("largest", "smallest").replace('"B"}', '"A"}'))
    path = tmp_path / "train.jsonl"
    records = [*map(record_of, tasks), choice, sampled]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    check_gym_prompts(RLPrompts.model_construct(path=tmp_path, train_path=path, valid_path=path))
    rows = as_nemo_rl_reads(path, max_new_tokens=32)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    answers = {task.prompt.splitlines()[0]: task.solution.answer for task in tasks[::2]} | {"largest": r"\boxed{B}"}
    tokenizer = train_tokenizer([task.prompt for task in tasks] * 20, vocab_size=400)
    torch.manual_seed(0)
    model = NemotronH(
        NemotronHConfig(
            "M*", vocab_size=tokenizer.get_vocab_size(), hidden_size=32, mamba_num_heads=4, mamba_head_dim=16,
            ssm_state_size=8, n_groups=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        )
    ).eval()  # fmt: skip
    with (
        serving(Policy, tokenizer=tokenizer, model=model, answers=answers) as vllm,
        GymHTTPServer(ResourcesServer("math")) as ours,
    ):
        thread = threading.Thread(target=ours.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        config = gym_config(vllm, ours.url)
        environment = {**os.environ, "NEMO_GYM_CONFIG_DICT": json.dumps(config)}
        names = ["policy_model", "mcqa", "mcqa_simple_agent", "math_simple_agent"]
        processes = {name: started(name, environment) for name in names}
        for name, process in processes.items():
            ((app,),) = (tuple(kind.values()) for kind in config[name].values())
            wait_for(app["port"], process)
        collected = subprocess.run(
            [PYTHON, SERVERS, "collect", path], env=environment, capture_output=True, text=True, check=True
        )
        ours.shutdown()
        thread.join()
    results = [json.loads(line) for line in collected.stdout.splitlines() if line.startswith("{")]
    assert [result["reward"] for result in results] == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    for result in results:
        assert set(READ["nemo_gym_result"] + READ["full_result"]) <= set(result)
        user, assistant = message_log(result)
        assert user["token_ids"] and len(assistant["token_ids"]) == len(assistant["generation_logprobs"]) > 0
